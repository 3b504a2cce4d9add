"""The static side and the scan inputs of the cache: what a segment's program contains, and the
arrays that its scales and layers read."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.cache_write import BlockWrites, block_writes
from pallas_kernels.ragged_attention import BlockTable
from varjax.cache.plan import CachePlan
from varjax.codecs.resize import bilinear_neighbours
from varjax.engine.segments import Segment, token_index
from varjax.policies.base import Needs, Policy


@dataclass(frozen=True)
class CacheSegment:
    """What a segment's program contains: stores or not, selections or not, and for which policy."""

    policy: Policy
    num_slots: int
    last_scale: int
    static_content: bool
    stores: bool
    selects: bool
    moves: bool
    ragged: bool
    remembers: bool
    regroup_scale: int | None
    attention: str | None

    @classmethod
    def of(cls, plan: CachePlan, segment: Segment, attention: str | None) -> "CacheSegment":
        policy = plan.policy
        scales = range(segment.start, segment.stop)
        regroup = getattr(plan.allocation, "regroup_scale", None)
        return cls(
            policy=policy,
            num_slots=plan.pool_tokens,
            last_scale=plan.geometry.schedule.num_scales - 1,
            static_content=plan.static_content,
            stores=any(plan.stores(s) for s in scales),
            selects=any(plan.selects(s) for s in scales),
            moves=any(plan.moves(s) for s in scales),
            ragged=getattr(plan.allocation, "ragged", False),
            remembers=policy.init_state(plan.geometry, 1) is not None,
            regroup_scale=regroup if regroup in scales else None,
            attention=attention,
        )

    @property
    def needs(self) -> Needs:
        return self.policy.needs

    @property
    def decides(self) -> bool:
        """Whether the policy looks at this segment: it chooses contents or takes notes."""
        return self.selects or self.remembers

    @property
    def sums_attention(self) -> bool:
        """Whether the policy is shown attention weights summed over the scale's queries."""
        if self.static_content or not (self.stores or self.remembers):
            return False
        per_scale = self.decides and (self.needs.scale_mass or self.needs.query_variance)
        regroups = self.regroup_scale is not None and self.needs.regroup_mass
        return per_scale or regroups or self.needs.total_mass

    @property
    def raw_queries(self) -> bool:
        return self.decides and self.needs.raw_queries


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerTables:
    """Scan inputs: leading axes [scales of the segment, layers] are scanned away.

    read: the slots that the scale may read.
    write: where the scale's tokens are stored (static contents).
    following, capacity: slots and sizes of the regions after the scale (dynamic contents).
    policy_inputs: `Policy.inputs` of the scale.
    """

    read: BlockTable
    write: BlockWrites | None = None
    following: BlockTable | None = None
    capacity: Int[Array, "... N"] | None = None
    policy_inputs: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaleTables:
    """Scan inputs that all layers of a scale share; the leading axis [scales] is scanned away.

    scale, length, token_index: number, real tokens and global positions of the scale.
    window: the window queries (`Policy.window_tokens`).
    neighbours, neighbour_weights: four tokens of the previous scale for every token, and their
      bilinear weights.
    """

    scale: Int[Array, "..."]
    length: Int[Array, "..."]
    token_index: Int[Array, "... T"]
    window: Int[Array, "... W"] | None = None
    neighbours: Int[Array, "... 4 T"] | None = None
    neighbour_weights: Float[Array, "... 4 T"] | None = None


def scale_tables(plan: CachePlan, segment: Segment) -> ScaleTables:
    """Host arrays for one segment."""
    schedule, policy, needs = plan.geometry.schedule, plan.policy, plan.policy.needs
    scales = np.arange(segment.start, segment.stop)
    maps = [schedule.maps[s] for s in scales]
    window = neighbours = weights = None
    if needs.window and not plan.static_content:
        window = np.stack([np.asarray(policy.window_tokens(h, w), np.int32) for h, w in maps])
    if needs.key_similarity:
        pairs = [
            bilinear_neighbours(schedule.maps[max(s - 1, 0)], schedule.maps[s]) for s in scales
        ]
        neighbours, weights = (
            np.stack([np.pad(a, ((0, 0), (0, segment.length - a.shape[1]))) for a in arrays])
            for arrays in zip(*pairs, strict=True)
        )
    return ScaleTables(
        scale=scales.astype(np.int32),
        length=np.array([h * w for h, w in maps], np.int32),
        token_index=token_index(schedule, segment),
        window=window,
        neighbours=neighbours,
        neighbour_weights=weights,
    )


def layer_tables(plan: CachePlan, segment: Segment, policy_inputs: Any) -> LayerTables:
    """Host arrays for one segment. Entries are cut to what the segment's scales need."""
    scales = np.arange(segment.start, segment.stop)
    read = _entries(plan, scales)
    if plan.static_content:
        return LayerTables(read=read, write=_write_table(plan, segment))
    following = np.minimum(scales + 1, plan.geometry.schedule.num_scales - 1)
    last = scales == plan.geometry.schedule.num_scales - 1
    capacity = np.where(last[:, None, None], 0, plan.capacity[following])
    inputs = jax.tree.map(lambda a: np.asarray(a)[scales], policy_inputs)
    return LayerTables(
        read=read, following=_entries(plan, following), capacity=capacity, policy_inputs=inputs
    )


def _entries(plan: CachePlan, scales: np.ndarray) -> BlockTable:
    m = max(plan.entries(int(s)) for s in scales)
    return BlockTable(
        *(np.ascontiguousarray(a[scales][..., :m]) for a in (plan.ids, plan.start, plan.stop))
    )


def _write_table(plan: CachePlan, segment: Segment) -> BlockWrites:
    """Arrays [S, L, N, J, ...]; dropped tokens, padding and the last scale are not stored."""
    starts, tokens = plan.geometry.schedule.starts, plan.geometry.schedule.tokens
    scales = range(segment.start, segment.stop)
    assert plan.write_slots is not None
    of_scale = [plan.write_slots[..., starts[s] : starts[s] + tokens[s]] for s in scales]
    longest = max(tokens[s] for s in scales)
    slots = [
        np.pad(a, ((0, 0), (0, 0), (0, longest - a.shape[-1])), constant_values=-1)
        for a in of_scale
    ]
    return block_writes(np.stack(slots), plan.block_size)
