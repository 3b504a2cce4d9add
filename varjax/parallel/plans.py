"""Plans divided over several devices: `data` splits rows, `model` heads. See `sharding`."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from varjax.cache import token_state
from varjax.cache.allocation import StaticAllocation
from varjax.cache.plan import CachePlan, build_plan
from varjax.cache.stages import TokenPlan
from varjax.cache.state import KVState
from varjax.cache.token_state import LayerCache
from varjax.engine.inputs import LayerInputs, Resampling, SegmentInputs, for_images, shared_inputs
from varjax.engine.segments import Segment
from varjax.errors import UserError
from varjax.parallel.split import AXES, MeshSpec
from varjax.sequence import SCALES, TOKENS

DATA, MODEL = AXES
_KNOWN = {SCALES: "full, swa, streaming, heatkv, table", TOKENS: "full, swa, streaming"}


def check_plan(plan: CachePlan, spec: MeshSpec) -> None:
    """Raise `UserError` if a plan cannot be carried out on such a mesh."""
    if spec.model > 1 and not plan.static_content:
        raise UserError(
            f"mesh {spec}: policy {plan.policy.name!r} decides on the device what to keep, which "
            f"does not work with heads on several devices yet: use data only, or a policy whose "
            f"contents are known beforehand ({_KNOWN[plan.geometry.kind]})"
        )

    def input_shapes(images: int) -> list[tuple[int, ...]]:
        index = np.zeros(images, np.int64)  # there may be inputs of one image only
        known = plan.static_content
        inputs = None if known else plan.rule.inputs(plan.geometry, plan.allocation, index)
        return [np.shape(a) for a in jax.tree.leaves(inputs)]

    # Inputs of a policy are shared by all devices along `data`; they may not depend on the images.
    if input_shapes(1) != input_shapes(2):
        raise UserError(
            f"mesh {spec}: policy {plan.policy.name!r} treats the images of a batch differently, "
            f"which works on one device only"
        )


@dataclass(frozen=True, eq=False)
class ShardedPlan:
    """A plan divided over a mesh: one plan per group of heads, all with the same pool size."""

    plan: CachePlan
    spec: MeshSpec

    @cached_property
    def groups(self) -> list[CachePlan]:
        """The plan of each device along `model`."""
        if self.spec.model == 1:
            return [self.plan]
        plans = [self._group(i) for i in range(self.spec.model)]
        # one program for all devices: their pools have one shape, that of the fullest
        blocks = max(p.pool_blocks for p in plans)
        return [dataclasses.replace(p, pool_blocks=blocks) for p in plans]

    def _group(self, index: int) -> CachePlan:
        plan, heads = self.plan, self.plan.geometry.num_heads // self.spec.model
        mine = slice(index * heads, (index + 1) * heads)
        assert isinstance(plan.allocation, StaticAllocation)
        return build_plan(
            dataclasses.replace(plan.geometry, num_heads=heads),
            StaticAllocation(plan.allocation.last_use[:, mine]),
            block_size=plan.block_size,
            budget=plan.budget,
            accounting=plan.accounting,
            policy=plan.policy,
        )

    def empty_state(self, batch_size: int, dtype, compute_dtype) -> KVState:
        """The caches of all devices side by side: rows along `data`, blocks along `model`."""
        # each device indexes its own pool, so block numbers need no offset; only the global array
        # is `groups` times as long
        groups = len(self.groups)
        whole = dataclasses.replace(self.groups[0], pool_blocks=groups * self.groups[0].pool_blocks)
        return KVState.empty(whole, batch_size, dtype, compute_dtype)

    def inputs(
        self, segments: tuple[Segment, ...], image_index: np.ndarray, resampling: Resampling
    ) -> tuple[SegmentInputs, ...]:
        """Scan inputs with the heads of all groups side by side; block numbers are those of each
        group's own pool."""
        return self.for_images(self.shared_inputs(segments, resampling), segments, image_index)

    def shared_inputs(
        self, segments: tuple[Segment, ...], resampling: Resampling
    ) -> tuple[SegmentInputs, ...]:
        """Those that are the same for every batch."""
        groups = [shared_inputs(p, segments, resampling) for p in self.groups]
        return tuple(
            dataclasses.replace(parts[0], layers=_beside([p.layers for p in parts]))
            for parts in zip(*groups, strict=True)
        )

    def for_images(
        self,
        shared: tuple[SegmentInputs, ...],
        segments: tuple[Segment, ...],
        image_index: np.ndarray,
    ) -> tuple[SegmentInputs, ...]:
        """`shared_inputs` for a batch of images. (Groups of heads have static contents, which know
        no images.)"""
        return for_images(shared, self.plan, segments, image_index)

    def specs(self, state: KVState, inputs: tuple[SegmentInputs, ...]) -> tuple[Any, Any]:
        """How state and inputs of these shapes are divided."""
        # keys of the previous scale are the only other array whose type is a choice, and its type
        # does not change how it is divided
        return _state_specs(self, state.kv_pool.dtype, "float32"), _input_specs(inputs, self.spec)


@dataclass(frozen=True, eq=False)
class ShardedTokenPlan:
    """The same for a model that draws token by token: all heads of a layer have equally many slots,
    so the groups are alike, and a layer's pool is cut along its rows and heads."""

    plan: TokenPlan
    spec: MeshSpec

    @cached_property
    def groups(self) -> list[TokenPlan]:
        """As above."""
        plan, parts = self.plan, self.spec.model
        heads = plan.geometry.num_heads // parts
        group = dataclasses.replace(
            plan,
            geometry=dataclasses.replace(plan.geometry, num_heads=heads),
            capacity=plan.capacity[..., :heads],
            pool_blocks=plan.pool_blocks // parts,
        )
        return [group] * parts

    def empty_state(self, batch_size: int, dtype, compute_dtype) -> tuple[LayerCache, ...]:
        """As above."""
        return token_state.empty(self.plan, batch_size, dtype, compute_dtype)

    def specs(self, state: tuple[LayerCache, ...], inputs: tuple) -> tuple[Any, Any]:
        """As above."""
        heads = {"pool": P(DATA, MODEL), "scale": P(DATA, None, MODEL)}

        def of(path, _) -> P:
            return heads.get(path[-1].name, P(DATA)) if self.spec.model > 1 else P(DATA)

        return jax.tree_util.tree_map_with_path(of, state), jax.tree.map(lambda _: P(), inputs)


def _beside(parts: list[LayerInputs]) -> LayerInputs:
    """Tables of groups of heads as one: the head axis is the third, entries are filled up with
    empty ones."""
    if len(parts) == 1:
        return parts[0]

    def join(*arrays):
        # groups differ in how many entries their fullest head has; empty entries are (0, 0, 0)
        entries = max(a.shape[3] for a in arrays)
        fill = -1 if arrays[0].ndim == 5 else 0  # sources of writes; -1 writes nothing
        none, rest = (0, 0), [(0, 0)] * (arrays[0].ndim - 4)
        widths = ((none, none, none, (0, entries - a.shape[3]), *rest) for a in arrays)
        padded = map(partial(np.pad, constant_values=fill), arrays, widths)
        return np.concatenate(list(padded), axis=2)

    return jax.tree.map(join, *parts)


def layout(plan: CachePlan, spec: MeshSpec) -> ShardedPlan | ShardedTokenPlan:
    """A plan divided over a mesh."""
    kind = ShardedTokenPlan if plan.geometry.kind == TOKENS else ShardedPlan
    return kind(plan, spec)


# --- how caches and inputs are divided ------------------------------------------------------------


def _state_specs(plan: ShardedPlan, dtype, compute_dtype) -> KVState:
    """Rows along `data`, found by comparing the caches of one and of two images."""
    one, two = (
        jax.eval_shape(lambda n=n: plan.empty_state(n, dtype, compute_dtype)) for n in (1, 2)
    )
    specs = jax.tree.map(
        lambda a, b: P(*(None if x == y else DATA for x, y in zip(a.shape, b.shape, strict=True))),
        *(one, two),
    )
    if plan.spec.model == 1:
        return specs
    # blocks are divided along `model`, but equal in number for every batch: comparing cannot tell
    scale = None if specs.kv_scale is None else P(DATA, MODEL)
    return dataclasses.replace(specs, kv_pool=P(DATA, MODEL), kv_scale=scale)


def _input_specs(inputs: tuple[SegmentInputs, ...], spec: MeshSpec) -> Any:
    per_head = P(None, None, MODEL) if spec.model > 1 else P()
    return tuple(
        SegmentInputs(
            jax.tree.map(lambda _: P(), segment.step),
            jax.tree.map(lambda _: per_head, segment.layers),
        )
        for segment in inputs
    )
