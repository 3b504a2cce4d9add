"""What the scale loop scans over: one `StepInputs` per scale, padded to the segment's longest, and
for every layer the tables of its cache.

Scales of a segment have different map sizes but one padded shape. Tokens live in a row of length T
(row-major map, then padding); resizing works on a grid of Gh x Gw, the largest height and width of
the segment. Padding of the grid meets zero columns of the matrices, padding of the token row
repeats the scale's last token; neither reaches a result.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.cache_write import BlockWrites, block_writes
from pallas_kernels.ragged_attention import BlockTable
from varjax.cache.plan import CachePlan
from varjax.codecs.maps import MATRICES, bilinear_neighbours, patchify, resize, unpatchify
from varjax.engine.segments import Segment, token_index
from varjax.schedule import Schedule

AnyArray = Array | np.ndarray  # made on the host, read on the device


@dataclass(frozen=True)
class Resampling:
    """How a model's code map changes size: names of `MATRICES` towards a scale and back (by default
    as VAR does), and the side of the square of codes that one token stands for."""

    down: str = "area"
    up: str = "bicubic"
    patch: int = 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What a scale, and every layer of it, reads. Arrays have a leading axis over the segment's
    scales, which `lax.scan` takes away.

    scale, length: index and real tokens of the scale.
    ratio: k / (K - 1).
    token_index: global position of every (padded) token.
    cell, token: grid cell of every token; token of every grid cell.
    down_*, up_*: matrices from the latent map to the grid and back; with patches of side p, the
      latent map and the grid have p x p cells per token.
    window: the queries that a policy looks at more closely (`Rule.window_tokens`).
    neighbours, neighbour_weights: four tokens of the previous scale for every token, and their
      bilinear weights. None, as `window`, where the policy does not ask for them.
    patch: p, static.
    """

    scale: Int[AnyArray, "..."]
    length: Int[AnyArray, "..."]
    ratio: Float[AnyArray, "..."]
    token_index: Int[AnyArray, "... T"]
    cell: Int[AnyArray, "... T"]
    token: Int[AnyArray, "... G"]
    down_rows: Float[AnyArray, "... Gh P"]
    down_columns: Float[AnyArray, "... Gw Q"]
    up_rows: Float[AnyArray, "... P Gh"]
    up_columns: Float[AnyArray, "... Q Gw"]
    window: Int[AnyArray, "... W"] | None = None
    neighbours: Int[AnyArray, "... 4 T"] | None = None
    neighbour_weights: Float[AnyArray, "... 4 T"] | None = None
    patch: int = field(default=1, metadata=dict(static=True))

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        segment: Segment,
        resampling: Resampling = Resampling(),
        **observed: np.ndarray,
    ) -> "StepInputs":
        """Host arrays for one segment. observed: window and neighbours
        (`observed_inputs`)."""
        scales = np.arange(segment.start, segment.stop)
        maps = np.array([schedule.maps[s] for s in scales])
        # Heights and widths of a segment may peak at different scales; the grid covers all of them.
        grid = tuple(int(n) for n in maps.max(0))
        cells = [_cell(h, w, grid, segment.length) for h, w in maps]
        axes = [_resizing(maps[:, i], grid[i], schedule.final_map[i], resampling) for i in (0, 1)]
        (down_rows, up_rows), (down_columns, up_columns) = axes
        return cls(
            scale=scales.astype(np.int32),
            length=maps.prod(1).astype(np.int32),
            ratio=(scales / max(1, schedule.num_scales - 1)).astype(np.float32),
            token_index=token_index(schedule, segment),
            cell=np.stack(cells),
            token=np.stack([_token(h, w, grid) for h, w in maps]),
            down_rows=down_rows,
            down_columns=down_columns,
            up_rows=up_rows,
            up_columns=up_columns,
            patch=resampling.patch,
            **observed,
        )

    def shrink(self, code_map: Float[Array, "B P Q C"]) -> Float[Array, "B T codes"]:
        """The latent map resized to this scale, as a padded token row; with patches the channels of
        a token are those of `patchify`."""
        grid = patchify(resize(code_map, self.down_rows, self.down_columns), self.patch)
        return grid.reshape(len(grid), -1, grid.shape[-1])[:, self.cell]

    def enlarge(self, codes: Float[Array, "B T codes"]) -> Float[Array, "B P Q C"]:
        """A padded row of codes enlarged to the latent map."""
        height, width = (a.shape[-1] // self.patch for a in (self.up_rows, self.up_columns))
        grid = codes[:, self.token].reshape(len(codes), height, width, -1)
        return resize(unpatchify(grid, self.patch), self.up_rows, self.up_columns)


def _resizing(
    sides: np.ndarray, grid: int, final: int, resampling: Resampling
) -> tuple[np.ndarray, np.ndarray]:
    """Matrices of all scales along one axis, to the (padded) grid and back."""
    patch, final, grid = resampling.patch, final * resampling.patch, grid * resampling.patch
    # Resizing is linear and separable: two matrices per scale. Padded rows and columns are zero, so
    # the padding of the grid neither enters the latent map nor comes out of it.
    down, up = MATRICES[resampling.down], MATRICES[resampling.up]
    sides = [int(side) * patch for side in sides]
    return (
        np.stack([np.pad(down(final, side), ((0, grid - side), (0, 0))) for side in sides]),
        np.stack([np.pad(up(side, final), ((0, 0), (0, grid - side))) for side in sides]),
    )


def _cell(h: int, w: int, grid: tuple[int, int], length: int) -> np.ndarray:
    # padding repeats the last token: a valid number, so that gathers stay inside the array
    cells = (np.arange(h)[:, None] * grid[1] + np.arange(w)).reshape(-1)
    return np.pad(cells, (0, length - cells.size), mode="edge").astype(np.int32)


def _token(h: int, w: int, grid: tuple[int, int]) -> np.ndarray:
    row, column = (np.minimum(np.arange(g), n - 1) for g, n in zip(grid, (h, w), strict=True))
    return (row[:, None] * w + column).reshape(-1).astype(np.int32)


# --- the cache ---


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
    policy: `Rule.inputs` of the scale.
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
    """Host arrays of all segments that are the same for every batch: all but `Rule.inputs`. Those
    of VAR-d30 take 0.3 s on a CPU of 2026, longer than drawing an image on a GPU should."""
    schedule = plan.geometry.schedule
    return tuple(
        SegmentInputs(
            StepInputs.of(schedule, s, resampling, **observed_inputs(plan, s)),
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
    inputs = plan.rule.inputs(plan.geometry, plan.allocation, image_index)

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
    rule, maps = plan.rule, plan.geometry.schedule.maps
    found = {}
    if rule.needs.window and not plan.static_content:
        windows = [rule.window_tokens(*maps[s]) for s in segment.scales]
        found["window"] = np.stack([np.asarray(w, np.int32) for w in windows])
    if rule.needs.key_similarity:
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
