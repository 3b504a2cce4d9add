"""What the scale loop scans over: one `StepInputs` per scale, padded to the segment's longest, and
for every layer the tables of its cache.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.cache_write import BlockWrites, block_writes
from pallas_kernels.ragged_attention import BlockTable
from varjax.cache.plan import CachePlan
from varjax.codecs.maps import bilinear_neighbours
from varjax.engine.segments import Segment
from varjax.models.step_inputs import AnyArray, Resampling, StepInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StaticInputs:
    """For contents that are known beforehand; leading axes [scales of the segment, layers].

    read: the slots that the scale may read. write: where the scale's tokens are stored.
    """

    read: BlockTable
    write: BlockWrites

    def packed(self) -> "StaticInputs":
        """With tables as kernels read them: for all layers, before a loop over them."""
        return StaticInputs(self.read.with_packed(), self.write.with_packed())

    def of_layer(self, layer: Int[Array, ""]) -> "StaticInputs":
        """Those of one layer, from the inputs of all layers of a scale."""
        return StaticInputs(self.read.of_layer(layer), self.write.of_layer(layer))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RegionInputs:
    """For contents that the device decides; leading axes [scales of the segment, layers].

    read, following: slots of the regions when the scale starts, and after it.
    capacity: int32 [..., N], tokens that the regions hold after the scale.
    policy: `Policy.inputs` of the scale.
    """

    read: BlockTable
    following: BlockTable
    capacity: Int[AnyArray, "... N"]
    policy: Any = None

    def packed(self) -> "RegionInputs":
        """As in `StaticInputs`."""
        return replace(self, read=self.read.with_packed())

    def of_layer(self, layer: Int[Array, ""]) -> "RegionInputs":
        """Those of one layer, from the inputs of all layers of a scale."""
        tables = self.read.of_layer(layer), self.following.of_layer(layer)
        capacity, policy = jax.tree.map(lambda a: a[layer], (self.capacity, self.policy))
        return RegionInputs(*tables, capacity, policy)


LayerInputs = StaticInputs | RegionInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SegmentInputs:
    """Scan inputs of one segment: what a scale needs (leading axis scales) and what its layers need
    (scales, layers)."""

    step: StepInputs
    layers: LayerInputs


def program_inputs(
    plan: CachePlan, segments: tuple[Segment, ...], image_index: np.ndarray, resampling: Resampling
) -> tuple[SegmentInputs, ...]:
    """Host arrays of all segments for a batch of images. resampling: the model's."""
    return for_images(shared_inputs(plan, segments, resampling), plan, segments, image_index)


def shared_inputs(
    plan: CachePlan, segments: tuple[Segment, ...], resampling: Resampling
) -> tuple[SegmentInputs, ...]:
    """Host arrays of all segments that are the same for every batch: all but `Policy.inputs`. Those
    of VAR-d30 take 0.3 s on a CPU of 2026, longer than drawing an image on a GPU should."""
    schedule = plan.geometry.schedule
    return tuple(
        SegmentInputs(
            StepInputs.of(schedule, s.scales, s.length, resampling, **observed_inputs(plan, s)),
            layer_inputs(plan, s),
        )
        for s in segments
    )


def for_images(
    shared: tuple[SegmentInputs, ...],
    plan: CachePlan,
    segments: tuple[Segment, ...],
    image_index: np.ndarray,
) -> tuple[SegmentInputs, ...]:
    """`shared_inputs` with what the policy wants to know about these images."""
    if plan.static_content:
        return shared
    inputs = plan.policy.inputs(plan.geometry, plan.allocation, image_index)

    def filled(given: SegmentInputs, segment: Segment) -> SegmentInputs:
        mine = jax.tree.map(lambda a: np.asarray(a)[np.asarray(segment.scales)], inputs)
        return replace(given, layers=replace(given.layers, policy=mine))

    return tuple(map(filled, shared, segments))


def layer_inputs(plan: CachePlan, segment: Segment) -> LayerInputs:
    """Host arrays for one segment. Entries are cut to what the segment's scales need."""
    scales = np.arange(segment.start, segment.stop)
    read = _entries(plan, scales)
    if plan.static_content:
        return StaticInputs(read, write_table(plan, segment))
    last_scale = plan.geometry.schedule.num_scales - 1
    following = np.minimum(scales + 1, last_scale)
    # the last scale has no scale after it: it reads tables of its own again, and keeps nothing
    capacity = np.where((scales == last_scale)[:, None, None], 0, plan.capacity[following])
    return RegionInputs(read, _entries(plan, following), capacity)


def observed_inputs(plan: CachePlan, segment: Segment) -> dict[str, np.ndarray]:
    """Fields of `StepInputs` that the plan's policy asks for (`Needs`)."""
    policy, maps = plan.policy, plan.geometry.schedule.maps
    found = {}
    if policy.needs.window and not plan.static_content:
        windows = [policy.window_tokens(*maps[s]) for s in segment.scales]
        found["window"] = np.stack([np.asarray(w, np.int32) for w in windows])
    if policy.needs.key_similarity:
        # the first scale has none before it: its own map stands in, and the result is not used
        pairs = [bilinear_neighbours(maps[max(s - 1, 0)], maps[s]) for s in segment.scales]
        names = ("neighbours", "neighbour_weights")
        for name, arrays in zip(names, zip(*pairs, strict=True), strict=True):
            padding = [((0, 0), (0, segment.length - a.shape[1])) for a in arrays]
            found[name] = np.stack([np.pad(a, p) for a, p in zip(arrays, padding, strict=True)])
    return found


def _entries(plan: CachePlan, scales: np.ndarray) -> BlockTable:
    # small early scales have few entries: a segment's tables need not be as wide as the last one's
    m = max(plan.entries(int(s)) for s in scales)
    return BlockTable(
        *(
            np.ascontiguousarray(a[scales][..., :m], np.int32)
            for a in (plan.ids, plan.start, plan.stop)
        )
    )


def write_table(plan: CachePlan, segment: Segment) -> BlockWrites:
    """Arrays [S, L, N, J, ...]; dropped tokens, padding and the last scale are not stored."""
    starts, tokens = plan.geometry.schedule.starts, plan.geometry.schedule.tokens
    assert plan.write_slots is not None
    of_scale = [plan.write_slots[..., starts[s] : starts[s] + tokens[s]] for s in segment.scales]
    slots = [
        np.pad(a, ((0, 0), (0, 0), (0, segment.length - a.shape[-1])), constant_values=-1)
        for a in of_scale
    ]
    return block_writes(np.stack(slots), plan.block_size)
