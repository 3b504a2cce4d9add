"""Scan inputs of the cache: the host arrays that the scales and layers of a segment read."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.cache_write import BlockWrites, block_writes
from pallas_kernels.ragged_attention import BlockTable
from varjax.cache.plan import CachePlan
from varjax.codecs.maps import bilinear_neighbours
from varjax.engine.segments import Segment


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StaticInputs:
    """For contents that are known beforehand; leading axes [scales of the segment, layers].

    read: the slots that the scale may read. write: where the scale's tokens are stored.
    """

    read: BlockTable
    write: BlockWrites


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
    capacity: Int[Array | np.ndarray, "... N"]
    policy: Any = None


LayerInputs = StaticInputs | RegionInputs


def layer_inputs(plan: CachePlan, segment: Segment, policy_inputs: Any) -> LayerInputs:
    """Host arrays for one segment. Entries are cut to what the segment's scales need."""
    scales = np.arange(segment.start, segment.stop)
    read = _entries(plan, scales)
    if plan.static_content:
        return StaticInputs(read, _write_table(plan, segment))
    last_scale = plan.geometry.schedule.num_scales - 1
    following = np.minimum(scales + 1, last_scale)
    # the last scale has no scale after it: it reads tables of its own again, and keeps nothing
    capacity = np.where((scales == last_scale)[:, None, None], 0, plan.capacity[following])
    policy = jax.tree.map(lambda a: np.asarray(a)[scales], policy_inputs)
    return RegionInputs(read, _entries(plan, following), capacity, policy)


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
        *(np.ascontiguousarray(a[scales][..., :m]) for a in (plan.ids, plan.start, plan.stop))
    )


def _write_table(plan: CachePlan, segment: Segment) -> BlockWrites:
    """Arrays [S, L, N, J, ...]; dropped tokens, padding and the last scale are not stored."""
    starts, tokens = plan.geometry.schedule.starts, plan.geometry.schedule.tokens
    assert plan.write_slots is not None
    of_scale = [plan.write_slots[..., starts[s] : starts[s] + tokens[s]] for s in segment.scales]
    slots = [
        np.pad(a, ((0, 0), (0, 0), (0, segment.length - a.shape[-1])), constant_values=-1)
        for a in of_scale
    ]
    return block_writes(np.stack(slots), plan.block_size)
