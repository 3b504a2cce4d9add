"""Bias, L2 norm, multiplier and rotation in the Mosaic GPU kernels. See `projection`.

A tile is 64 tokens of one part (Q, K or V) of one head. It is copied out of the product where it
lies, as columns of a matrix [T, 3 N H], finished in registers in float32, and left in shared memory
as the tensor cores take it. The last tile ends with the array: copies leave out what is beyond its
end. Where rows have one token each, tiles are made of rows.

Queries are finished by the kernel that multiplies them, once per tile, and never written. Keys and
values meet every tile of queries and go into the cache. So `finished` writes them once, 4 R T N H
elements read and written, where each tile of queries would repeat the work. Attention and storing
call it with the same operands, and XLA keeps one of two equal calls. Where nothing that is stored
overwrites what attention reads, `finished_and_stored` stores as well (`Stores`).

The rotation needs each number's neighbour, which lies in the same row. A product with a matrix of
zeros and ones fetches it exactly, 64 columns at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import estimates
from pallas_kernels.projection import K, Projection, Q, V, quarter_turn_matrix
from pallas_kernels.refs import Operand, Ref, one_number
from pallas_kernels.shared import mosaic_operands as mosaic
from pallas_kernels.shared.mosaic_products import (
    LAYOUT,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    Multiply,
    Wgmma,
    across,
    down,
    products,
)
from pallas_kernels.tables import CONSECUTIVE, KIND_BITS, PARTIAL, RUN, BlockWrites

TURNED = 64  # columns that are turned at once
HALVES = range(2)  # key and value
WARPS = 4  # of a warpgroup


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unfinished:
    """A `Projection` as operands of a kernel, and inside the kernel as references.

    product: [R, T, 3 N H].
    layer: int32 [1], place in the first axis of biases [L, N, H] and multiplier [L, N].
    cos, sin: float32, with rows for whole tiles.
    turn: `quarter_turn_matrix`.
    row_scale: float32 [R, T], with rows for whole tiles. channel_scale: float32 [parts, N, H].
    """

    product: Operand
    layer: Operand
    q_bias: Operand
    v_bias: Operand
    multiplier: Operand
    cos: Operand
    sin: Operand
    turn: Operand
    row_scale: Operand
    channel_scale: Operand
    heads: int = field(metadata=dict(static=True))
    scale: float = field(metadata=dict(static=True))

    @classmethod
    def of(cls, projection: Projection, parts: Sequence[int], multiple: int = ROWS) -> "Unfinished":
        """The operands for a projection. parts: those that will be finished. multiple: rows of
        cosines and sines are a multiple of it."""
        rows, heads, tokens, head_dim = projection.shape
        q_bias = projection.q_bias if Q in parts else None
        v_bias = projection.v_bias if V in parts else None
        multiplier = projection.multiplier
        if projection.layer is None:  # an axis of one layer
            vectors = q_bias, v_bias, multiplier
            q_bias, v_bias, multiplier = jax.tree.map(lambda a: a[None], vectors)
        rotated = cos = sin = None
        if projection.rotation is not None:
            cos, sin = (mosaic.padded(a, 0, multiple) for a in projection.rotation)
            rotated = jnp.asarray(quarter_turn_matrix(TURNED), projection.dtype)
        row_scale = projection.row_scale
        if row_scale is not None and row_scale.shape[1] < -(-tokens // multiple) * multiple:
            row_scale = mosaic.padded(row_scale[:, :tokens], 1, multiple)
        return cls(
            product=projection.qkv.reshape(rows, tokens, -1),
            layer=one_number(projection.layer),
            q_bias=q_bias,
            v_bias=v_bias,
            multiplier=multiplier,
            cos=cos,
            sin=sin,
            turn=rotated,
            row_scale=None if row_scale is None else row_scale[..., 0],
            channel_scale=projection.channel_scale,
            heads=heads,
            scale=projection.scale,
        )

    def start(self, part: int, row, head, first, work: "TileMemory") -> None:
        """Start copying the tile of a part that begins with token `first`."""
        head_dim = work.tile.shape[-1]
        columns = pl.ds((part * self.heads + head) * head_dim, head_dim)
        source = self.product.at[row, pl.ds(first, ROWS), columns]
        plgpu.copy_gmem_to_smem(source, work.raw, work.arrived)

    def finish(self, part: int, row, head, first, work: "TileMemory") -> None:
        """Wait for a tile that was started, finish it and leave it in `work.result`."""
        plgpu.barrier_wait(work.arrived)
        # from here to the end all numbers are float32 in registers
        layer, x = self.layer[0], mosaic.load(work.raw, LAYOUT, plain=True).astype(jnp.float32)
        if self.row_scale is not None:
            numbers = mosaic.load(self.row_scale.at[row, pl.ds(first, ROWS)], PER_ROW, plain=True)
            columns = mosaic.load(self.channel_scale.at[part, head], PER_COLUMN, plain=True)
            x *= across(numbers, x.shape) * down(columns, x.shape)
        bias = {Q: self.q_bias, K: None, V: self.v_bias}[part]
        if bias is not None:
            columns = mosaic.load(bias.at[layer, head], PER_COLUMN, plain=True)
            x += down(columns.astype(jnp.float32), x.shape)
        factor = self._factor(part, x, layer, head)
        if self.turn is not None and part != V:  # values are not rotated
            self._rotate(x, factor, first, work)
        else:
            x = x if factor is None else x * across(factor, x.shape)
            mosaic.store(work.result, x.astype(work.result.dtype), work.plain)
            plgpu.commit_smem()

    def _factor(self, part: int, x, layer, head):
        """The factor of each row of a tile, [64], or None. It may be applied after a rotation,
        which keeps lengths."""
        if part == V or (self.multiplier is None and (part == K or self.scale == 1)):
            return None
        if self.multiplier is None:
            return plgpu.layout_cast(jnp.full((ROWS,), self.scale, jnp.float32), PER_ROW)
        # lengths below 1e-12 are treated as 1e-12
        inverse = jax.lax.rsqrt(jnp.maximum((x * x).sum(axis=1), 1e-24))
        return inverse * self.multiplier[layer, head] if part == Q else inverse

    def _rotate(self, x, factor, first, work: "TileMemory") -> None:
        # rounded before the rotation: tensor cores, which fetch the neighbours, take 16 bits
        work.tile[...] = x.astype(work.tile.dtype)
        plgpu.commit_smem()  # the product reads shared memory in another way than stores write it
        rows = pl.ds(first, ROWS)
        for start in range(0, x.shape[1], TURNED):
            columns = pl.ds(start, TURNED)
            piece = work.tile.at[:, columns]
            # one piece after another: registers hold few of them at once
            rotated = mosaic.load(piece, LAYOUT).astype(jnp.float32)
            rotated *= mosaic.load(self.cos.at[rows, columns], LAYOUT, plain=True)
            turned = work.multiply(piece, work.turn[0], (ROWS, TURNED))
            rotated += turned * mosaic.load(self.sin.at[rows, columns], LAYOUT, plain=True)
            if factor is not None:
                rotated *= across(factor, rotated.shape)
            rotated = rotated.astype(work.result.dtype)
            mosaic.store(work.result.at[:, columns], rotated, work.plain)
            plgpu.commit_smem()


@dataclass(frozen=True)
class TileMemory:
    """Shared memory of a tile.

    raw: the tile as it was copied.
    tile: the tile as tensor cores take it.
    result: one of the two, where the finished tile is left.
    arrived: a barrier that says that the copy is there.
    turn, multiply: what the rotation multiplies with.
    plain: whether the result is plain rows.
    """

    raw: Ref
    tile: Ref
    result: Ref
    arrived: Ref
    turn: Sequence
    multiply: Multiply
    plain: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stores:
    """The pool and what is stored in it, as operands of a kernel, and inside it as references.

    The kernel that finishes a tile copies it from shared memory to the slots that its tokens get,
    besides the array that attention reads own keys from. Each warp takes some runs of `RUN` tokens.
    A run whose slots follow one another is one copy of keys and one of values; of others every
    token is copied alone. So storing reads nothing but the table, and takes no kernel of its own.
    Rows of a tile lie one behind another, as single ones can then be copied. Attention runs
    afterwards. None of the slots that it reads may be among those that are stored.

    pool: [R, slots, 2 H], changed in place; `jax.freeze` of it is the array afterwards.
    table: `BlockWrites.by_token`, with an axis of layers in front.
    layer: int32 [1], place in that axis.
    """

    pool: Operand
    table: Operand
    layer: Operand

    @classmethod
    def of(cls, kv_pool: Array, writes: BlockWrites) -> "Stores":
        pool = jax.new_ref(kv_pool.reshape(len(kv_pool), -1, kv_pool.shape[-1]))
        table = writes.by_token if writes.by_token.ndim == 3 else writes.by_token[None]
        return cls(pool, table, one_number(writes.layer))

    def _slot(self, head, token):
        """The slot of a token, or -1."""
        runs = self.table.shape[-1] // (RUN + 1)
        return self.table[self.layer[0], head, runs + token]

    def put(self, results: Ref, row, head, first) -> None:
        """Copy finished keys and values, [2, 64, H] in shared memory, of tokens from `first` on."""

        def copy(token, slot, count: int) -> None:
            """Start copying `count` tokens of the tile to slots from `slot` on."""
            head_dim = results.shape[-1]
            for half in HALVES:
                here = results.at[half, pl.ds(token, count)]
                columns = pl.ds(half * head_dim, head_dim)
                plgpu.copy_smem_to_gmem(here, self.pool.at[row, pl.ds(slot, count), columns])

        def put_run(run) -> None:
            word = self.table[self.layer[0], head, jax.lax.div(first, RUN) + run]
            kind = word & (1 << KIND_BITS) - 1
            pl.when(kind == CONSECUTIVE)(lambda: copy(run * RUN, word >> KIND_BITS, RUN))

            @pl.when(kind == PARTIAL)
            def _():
                for i in range(RUN):
                    token = run * RUN + i
                    slot = self._slot(head, first + token)
                    pl.when(slot >= 0)(partial(copy, token, slot, 1))

        @plgpu.warp_map
        def _(warp):
            for turn in range(ROWS // RUN // WARPS):
                put_run(turn * WARPS + warp)
            plgpu.wait_smem_to_gmem(0)  # of this warp: each waits for its own

    def put_rows(self, results: Ref, head, first) -> None:
        """Copy the only token of rows from `first` on. All rows have it in the same slot."""
        head_dim, slot = results.shape[-1], self._slot(head, 0)

        @pl.when(slot >= 0)
        def _():
            for half in HALVES:
                columns = pl.ds(half * head_dim, head_dim)
                place = self.pool.at[pl.ds(first, ROWS), slot, columns]
                plgpu.copy_smem_to_gmem(results.at[half], place)


def finished(projection: Projection, parts: Sequence[int], interpret) -> Array:
    """Finished parts of a projection as kernels copy them: [R, T', parts N H]. T' is T, rounded up
    where whole pieces of shared memory are copied; tokens from T on may hold anything."""
    return _finished(projection, tuple(parts), products(), interpret)


# One trace serves attention and storing. Two traces would differ in their places in the source, and
# the compiler would not see that one result does for both.
@partial(jax.jit, static_argnames=("parts", "chip", "interpret"))
def _finished(projection: Projection, parts: tuple[int, ...], chip: Wgmma, interpret) -> Array:
    return _launch(projection, parts, chip, interpret)


@partial(jax.jit, static_argnames=("chip", "interpret"))
def finished_and_stored(
    projection: Projection, kv_pool: Array, writes: BlockWrites, chip: Wgmma, interpret
) -> tuple[Array, Array]:
    """Keys and values as `finished` returns them, and the pool, of their type, with those that
    `writes` stores. The table of `writes` has `by_token` and is shared by all rows."""
    stores = Stores.of(kv_pool, writes)
    found = _launch(projection, (K, V), chip, interpret, stores, (kv_pool, writes))
    return found, jax.freeze(stores.pool).reshape(kv_pool.shape)


def _launch(
    projection: Projection, parts, chip: Wgmma, interpret, stores=None, stored=None
) -> Array:
    """Finish parts. stores: of a call that stores keys and values, too. stored: the pool and the
    `BlockWrites` that they are made of."""
    rows, heads, tokens, head_dim = projection.shape
    turned = sum(turn_widths(projection)) * len([part for part in parts if part != V])
    cost = estimates.finish(projection, len(parts), turned, stored)
    if single := tokens == 1:  # tiles are made of rows, whose tokens have the same angles
        qkv, angles = jnp.swapaxes(projection.qkv, 0, 1), projection.rotation
        scale = projection.row_scale
        scale = None if scale is None else jnp.swapaxes(scale[:, :1], 0, 1)
        angles = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, head_dim)), angles)
        projection, tokens = replace(projection, qkv=qkv, rotation=angles, row_scale=scale), rows
    lines, places = pl.cdiv(tokens, ROWS), 1 if single else rows
    whole = tokens if single or tokens < mosaic.PIECE else -(-tokens // mosaic.PIECE) * mosaic.PIECE
    count, dtype = len(parts), projection.dtype
    shape = count, ROWS, head_dim
    landing = mosaic.landing(tokens, shape, dtype, chip.swizzle)
    (found,) = mosaic.launch(
        partial(_finish, parts, single, chip),
        [Unfinished.of(projection, parts, lines * ROWS), stores],
        [jax.ShapeDtypeStruct((places, whole, count * heads * head_dim), dtype)],
        [
            plgpu.SMEM(shape, dtype) if stores else landing,
            mosaic.tile(shape, dtype, chip.swizzle),
            plgpu.Barrier(num_barriers=count),
            turn_scratch(projection, chip),
            chip.scratch(1, *turn_widths(projection)),
        ],
        computing=0,
        grid={"tile": lines, "head": heads, "row": places},
        cost=cost,
        interpret=interpret,
        name="finish_and_store" if stores else "finish",
    )
    return found.reshape(rows, -1, count * heads * head_dim)


def _finish(parts, single: bool, chip: Wgmma, given: Unfinished, stores, out_ref, *scratch):
    """The kernel. single: whether rows have one token; the result then ends within a piece of
    shared memory, so plain rows are copied out. stores: `Stores` or None."""
    raw, tile, arrived, turn, sums = scratch
    row, head, number = (jax.lax.axis_index(name) for name in ("row", "head", "tile"))
    first, head_dim, multiply = number * ROWS, tile.shape[-1], chip.multiply(sums, 0)
    # swizzled memory is copied in whole pieces of 8 rows only
    in_place = single or stores is not None
    results = raw if in_place else tile
    plain = in_place and (stores is not None or mosaic.lands_plain(out_ref.shape[1]))
    works = [
        TileMemory(raw.at[i], tile.at[i], results.at[i], arrived.at[i], turn, multiply, plain)
        for i in range(len(parts))
    ]
    # all copies are under way before the first tile is waited for
    if given.turn is not None:
        plgpu.copy_gmem_to_smem(given.turn, *turn)
    for part, work in zip(parts, works, strict=True):
        given.start(part, row, head, first, work)
    if given.turn is not None:
        plgpu.barrier_wait(turn[1])
    for i, (part, work) in enumerate(zip(parts, works, strict=True)):
        given.finish(part, row, head, first, work)
        columns = pl.ds((i * given.heads + head) * head_dim, head_dim)
        plgpu.copy_smem_to_gmem(work.result, out_ref.at[row, pl.ds(first, ROWS), columns])
    if stores is not None:
        if single:
            stores.put_rows(results, head, first)
        else:
            stores.put(results, row, head, first)
    plgpu.wait_smem_to_gmem(0)


def turn_widths(projection: Projection) -> tuple[int, ...]:
    """Numbers of columns of the products that finishing takes, for `Products.scratch`."""
    return () if projection.rotation is None else (TURNED,)


def turn_scratch(projection: Projection, chip: Wgmma) -> list:
    """The matrix of the rotation in shared memory, and a barrier that says that it is there."""
    if projection.rotation is None:
        return []
    return [mosaic.tile((TURNED, TURNED), projection.dtype, chip.swizzle), plgpu.Barrier()]
