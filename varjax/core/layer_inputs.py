"""Inputs of the scale loop: for every scale its `StepInputs`, padded to the longest of its segment,
and for every layer what its cache step reads: tables of the slots that it reads and writes, and
facts that its policy knows beforehand. These are host arrays; the program scans over their scales
and indexes them by layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jaxtyping import Array, Int, PyTree

from pallas_kernels.cache_write import BlockWrites, block_writes
from pallas_kernels.ragged_attention import BlockTable
from varjax.core.maps import bilinear_neighbours
from varjax.core.scale_plan import ScalePlan
from varjax.core.step_inputs import AnyArray, StepInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StaticInputs:
    """Tables for contents that are known beforehand; leading axes [scales, layers].

    read: the slots that the scale may read.
    write: where the scale's tokens are stored.
    apart: static, whether no layer writes a slot that it reads at the same scale. What it stores
      may then come before its attention.
    following: the slots that hold what the scale read and all that it stored, if it gives up none
      of them, or None. They are what the next scale reads.
    """

    read: BlockTable
    write: BlockWrites
    apart: bool = field(default=False, metadata=dict(static=True))
    following: BlockTable | None = None

    def packed(self, block_size: int) -> "StaticInputs":
        """The inputs with tables as kernels read them. Call it once, before the loop over layers:
        packing within it would run for every layer."""
        read, write = self.read.with_packed(block_size), self.write.with_packed()
        following = self.following and self.following.with_packed(block_size)
        return replace(self, read=read, write=write, following=following)

    def of_layer(self, layer: Int[Array, ""]) -> "StaticInputs":
        """The inputs of one layer from those of all layers of a scale."""
        read, write = self.read.of_layer(layer), self.write.of_layer(layer)
        following = self.following and self.following.of_layer(layer)
        return replace(self, read=read, write=write, following=following)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RegionInputs:
    """Tables for contents that the device decides; leading axes [scales, layers].

    read: slots of the regions when the scale starts.
    following: slots of the regions after the scale.
    capacity: int32 [..., N], tokens that the regions hold after the scale.
    policy: what the policy knows beforehand about the scale (its `inputs`), or None.
    """

    read: BlockTable
    following: BlockTable
    capacity: Int[AnyArray, "... N"]
    policy: PyTree = None

    def packed(self, block_size: int) -> "RegionInputs":
        return replace(self, read=self.read.with_packed(block_size))

    def of_layer(self, layer: Int[Array, ""]) -> "RegionInputs":
        rest = jax.tree.map(lambda a: a[layer], (self.capacity, self.policy))
        return RegionInputs(self.read.of_layer(layer), self.following.of_layer(layer), *rest)


LayerInputs = StaticInputs | RegionInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SegmentInputs:
    """Inputs of the scan over a segment's scales.

    step: what a scale reads; leading axis [scales].
    layers: what the caches of its layers read; leading axes [scales, layers].
    """

    step: StepInputs
    layers: LayerInputs


def layer_inputs(plan: ScalePlan, scales: range, length: int) -> LayerInputs:
    """Host arrays for consecutive scales, each padded to `length` tokens. Tables have as many
    entries as these scales need."""
    number = np.arange(scales.start, scales.stop)
    read = _read_table(plan, number)
    if plan.static_content:
        # one program serves the segment, so it may store first only if every scale may
        apart = not any(map(plan.overwrites, scales))
        starts, ends = plan.geometry.schedule.starts, plan.geometry.schedule.ends
        slots = [plan.write_slots[..., starts[s] : ends[s]] for s in scales]
        # the padding of a scale is never stored, like dropped tokens and the last scale: slot -1
        padding = [((0, 0), (0, 0), (0, length - a.shape[-1])) for a in slots]
        padded = [np.pad(a, p, constant_values=-1) for a, p in zip(slots, padding, strict=True)]
        following = _read_table(plan, number + 1) if all(map(plan.keeps, scales)) else None
        return StaticInputs(read, block_writes(np.stack(padded), plan.block_size), apart, following)
    last_scale = plan.geometry.schedule.num_scales - 1
    following = np.minimum(number + 1, last_scale)
    # No scale follows the last one: it gets its own table once more, and may keep nothing.
    capacity = np.where((number == last_scale)[:, None, None], 0, plan.capacity[following])
    return RegionInputs(read, _read_table(plan, following), capacity)


def join_heads(groups: Sequence[LayerInputs]) -> LayerInputs:
    """Joins the inputs of groups of heads for devices that each hold one group. Heads are the third
    axis. Slot numbers stay those of each group's own pool, because a device indexes its own."""
    if len(groups) == 1:
        return groups[0]
    if isinstance(groups[0], StaticInputs):  # one program serves them all
        shared = dict(apart=all(group.apart for group in groups))
        if any(group.following is None for group in groups):
            shared["following"] = None
        groups = [replace(group, **shared) for group in groups]

    def join(*arrays: np.ndarray) -> np.ndarray:
        # Groups differ in how many entries their fullest head has. (0, 0, 0) is an empty entry of a
        # table that is read; source -1 writes nothing.
        most = max(a.shape[3] for a in arrays)
        fill = -1 if arrays[0].ndim == 5 else 0
        rest = [(0, 0)] * (arrays[0].ndim - 4)
        widths = [[*[(0, 0)] * 3, (0, most - a.shape[3]), *rest] for a in arrays]
        pairs = zip(arrays, widths, strict=True)
        return np.concatenate([np.pad(*pair, constant_values=fill) for pair in pairs], axis=2)

    return jax.tree.map(join, *groups)


def _read_table(plan: ScalePlan, scales: np.ndarray) -> BlockTable:
    # Early scales have few entries, so their tables need not be as wide as the last scale's.
    most = max(plan.entries(int(s)) for s in scales)
    # Kernels take int32. The plan stores first and last slots in a byte, because its tables are
    # those of all scales.
    ids, start, stop = (
        np.ascontiguousarray(a[scales][..., :most], np.int32)
        for a in (plan.ids, plan.start, plan.stop)
    )
    return BlockTable(ids, start, stop, finite=True)  # a pool begins with zeros


def observed_inputs(plan: ScalePlan, scales: range, length: int) -> dict[str, np.ndarray]:
    """The fields of `StepInputs` that the plan's policy asks for (`Needs`)."""
    rule, maps = plan.rule, plan.geometry.schedule.maps
    found = {}
    if rule.needs.window and not plan.static_content:
        # every scale has a window of the same length, so that one program serves a segment
        windows = [rule.window_tokens(*maps[s]) for s in scales]
        found["window"] = np.stack([np.asarray(w, np.int32) for w in windows])
    if rule.needs.key_similarity:
        # The first scale has none before it: its own map stands in, and the result is not used.
        # All scales of a segment are padded to one length; padding gets token 0 with weight 0.
        pairs = [bilinear_neighbours(maps[max(s - 1, 0)], maps[s]) for s in scales]
        names = ("neighbours", "neighbour_weights")
        for name, arrays in zip(names, zip(*pairs, strict=True), strict=True):
            padding = [((0, 0), (0, length - a.shape[1])) for a in arrays]
            found[name] = np.stack([np.pad(a, p) for a, p in zip(arrays, padding, strict=True)])
    return found
