"""Bias, L2 norm, multiplier and rotation in the Mosaic GPU kernels. See `projection`.

A tile is 64 tokens of one part (Q, K or V) of one head. It is copied out of the product where it
lies, as columns of a matrix [T, 3 N H], finished in registers in float32, and left in shared memory
as the tensor cores take it, or as it came where it is not multiplied. The last tile ends with the
array: copies leave out what is beyond its end. Where rows have one token each, tiles are made of
rows.

Queries are finished by the kernel that multiplies them, once per tile, and never written. Keys and
values meet every tile of queries and go into the cache. So `finished` writes them once, 4 R T N H
elements read and written, where each tile of queries would repeat the work. Attention and storing
call it with the same operands, and XLA keeps one of two equal calls. Where nothing that is stored
overwrites what attention reads, `finished_and_stored` stores as well (`Stores`), and nothing else
where all tokens are stored: attention then finds them in the pool.

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
from pallas_kernels.shared.mosaic_products import LAYOUT, ROWS, Multiply, Wgmma, across, products
from pallas_kernels.tables import CONSECUTIVE, KIND_BITS, PARTIAL, RUN, BlockWrites

TURNED = 64  # columns that are turned at once
WARPS = 4  # of a warpgroup
# How registers hold plain rows: a thread 16 bytes, of which a warp takes 4 lines of 128 bytes at
# once. As products lie (`LAYOUT`), 8 rows meet in the same banks of shared memory.
BY_LINES = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


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
        head_dim = work.raw.shape[-1]
        columns = pl.ds((part * self.heads + head) * head_dim, head_dim)
        source = self.product.at[row, pl.ds(first, ROWS), columns]
        plgpu.copy_gmem_to_smem(source, work.raw, work.arrived)

    def finish(self, part: int, row, head, first, work: "TileMemory") -> None:
        """Wait for a tile that was started, finish it and leave it in `work.result`."""
        rotated = self.turn is not None and part != V  # values are not rotated
        layout = BY_LINES if work.plain and not rotated else LAYOUT

        def spread(numbers, axis: int):
            """Repeat a number per row (axis 0) or per column."""
            found = jax.lax.broadcast_in_dim(numbers, x.shape, [axis])
            return plgpu.layout_cast(found, layout)

        # vectors are read while the tile is on its way
        layer, bias = self.layer[0], {Q: self.q_bias, K: None, V: self.v_bias}[part]
        if bias is not None:
            bias = mosaic.load(bias.at[layer, head], layout.reduce(0), plain=True)
        if self.row_scale is not None:
            here = self.row_scale.at[row, pl.ds(first, ROWS)]
            numbers = mosaic.load(here, layout.reduce(1), plain=True)
            columns = mosaic.load(self.channel_scale.at[part, head], layout.reduce(0), plain=True)
        if work.arrived is not None:
            plgpu.barrier_wait(work.arrived)
        # from here to the end all numbers are float32 in registers
        x = mosaic.load(work.raw, layout, plain=True).astype(jnp.float32)
        if self.row_scale is not None:
            x *= spread(numbers, 0) * spread(columns, 1)
        if bias is not None:
            x += spread(bias.astype(jnp.float32), 1)
        factor = self._factor(part, x, layer, head, layout)
        if rotated:
            self._rotate(x, factor, first, work)
        else:
            x = x if factor is None else x * spread(factor, 0)
            mosaic.store(work.result, x.astype(work.result.dtype), work.plain)
            plgpu.commit_smem()

    def _factor(self, part: int, x, layer, head, layout):
        """The factor of each row of a tile, [64], or None. It may be applied after a rotation,
        which keeps lengths."""
        if part == V or (self.multiplier is None and (part == K or self.scale == 1)):
            return None
        if self.multiplier is None:
            return plgpu.layout_cast(jnp.full((ROWS,), self.scale, jnp.float32), layout.reduce(1))
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
    tile: the tile as tensor cores take it, if it is rotated.
    result: one of the two, where the finished tile is left.
    arrived: a barrier that says that the copy is there; None: it is.
    turn, multiply: what the rotation multiplies with.
    plain: whether both are plain rows.
    """

    raw: Ref
    tile: Ref
    result: Ref
    arrived: Ref | None
    turn: Sequence
    multiply: Multiply
    plain: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stores:
    """The pool and what is stored in it, as operands of a kernel, and inside it as references.

    The kernel that finishes a tile copies it from shared memory to the slots that its tokens get,
    besides the array that attention may read own keys from. Each warp takes some runs of `RUN`
    tokens. A run whose slots follow one another is one copy; of others every token is copied alone.
    So storing reads nothing but the table, and takes no kernel of its own. A token's key lies
    beside its value, in the product's copy as in the pool, and tokens lie one behind another, as
    single ones can then be copied. Attention runs afterwards. None of the slots that it reads may
    be among those that are stored, but for own keys.

    pool: [R, slots, 2, H], changed in place; `jax.freeze` of it is the array afterwards.
    table: `BlockWrites.by_token`, with an axis of layers in front.
    layer: int32 [1], place in that axis.
    """

    pool: Operand
    table: Operand
    layer: Operand

    @classmethod
    def of(cls, kv_pool: Array, writes: BlockWrites) -> "Stores":
        pool = jax.new_ref(kv_pool.reshape(len(kv_pool), -1, 2, kv_pool.shape[-1] // 2))
        table = writes.by_token if writes.by_token.ndim == 3 else writes.by_token[None]
        return cls(pool, table, one_number(writes.layer))

    def _slot(self, head, token):
        """The slot of a token, or -1."""
        runs = self.table.shape[-1] // (RUN + 1)
        return self.table[self.layer[0], head, runs + token]

    def words(self, head, first) -> list:
        """The first slot and the kind of every run of a tile, for `put`."""
        first, layer = jax.lax.div(first, RUN), self.layer[0]
        return [self.table[layer, head, first + run] for run in range(ROWS // RUN)]

    def put(self, results: Ref, words: list, row, head, first) -> None:
        """Copy finished keys and values, [64, 2, H] in shared memory, of tokens from `first` on."""

        def copy(token, slot, count: int) -> None:
            """Start copying `count` tokens of the tile to slots from `slot` on."""
            place = self.pool.at[row, pl.ds(slot, count)]
            plgpu.copy_smem_to_gmem(results.at[pl.ds(token, count)], place)

        def put_run(run, word) -> None:
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
            for turn in range(0, ROWS // RUN, WARPS):
                word = words[turn]
                for other in range(1, WARPS):
                    word = jnp.where(warp == other, words[turn + other], word)
                put_run(turn + warp, word)
            # of this warp: each waits for its own
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def put_rows(self, results: Ref, head, first) -> None:
        """Copy the only token of rows from `first` on. All rows have it in the same slot."""
        slot = self._slot(head, 0)
        rows = pl.ds(first, ROWS)
        pl.when(slot >= 0)(lambda: plgpu.copy_smem_to_gmem(results, self.pool.at[rows, slot]))


def finished(projection: Projection, parts: Sequence[int], interpret) -> Array:
    """Finished parts of a projection as kernels copy them: [R, T', parts N H]. T' is T, rounded up
    where whole pieces of shared memory are copied; tokens from T on may hold anything."""
    return _finished(projection, tuple(parts), products(), interpret)


# One trace serves attention and storing. Two traces would differ in their places in the source, and
# the compiler would not see that one result does for both.
@partial(jax.jit, static_argnames=("parts", "chip", "interpret"))
def _finished(projection: Projection, parts: tuple[int, ...], chip: Wgmma, interpret) -> Array:
    return _launch(projection, parts, chip, interpret)


@partial(jax.jit, static_argnames=("chip", "interpret", "wanted"))
def finished_and_stored(
    projection: Projection, kv_pool: Array, writes: BlockWrites, chip: Wgmma, interpret, wanted=True
) -> tuple[Array | None, Array]:
    """Keys and values as `finished` returns them, if they are `wanted`, or None; and the pool, of
    their type, with those that `writes` stores. The table of `writes` has `by_token` and is shared
    by all rows."""
    stores, made_of = Stores.of(kv_pool, writes), (kv_pool, writes)
    found = _launch(projection, (K, V), chip, interpret, stores, made_of, wanted)
    return found, jax.freeze(stores.pool).reshape(kv_pool.shape)


def _launch(
    projection: Projection, parts, chip: Wgmma, interpret, stores=None, stored=None, wanted=True
) -> Array | None:
    """Finish parts. stores: of a call that stores keys and values, too. stored: the pool and the
    `BlockWrites` that they are made of. wanted: whether finished parts are a result."""
    rows, heads, tokens, head_dim = projection.shape
    turned = sum(turn_widths(projection)) * len([part for part in parts if part != V])
    cost = estimates.finish(projection, len(parts), turned, stored, wanted)
    if single := tokens == 1:  # tiles are made of rows, whose tokens have the same angles
        qkv, angles = jnp.swapaxes(projection.qkv, 0, 1), projection.rotation
        scale = projection.row_scale
        scale = None if scale is None else jnp.swapaxes(scale[:, :1], 0, 1)
        angles = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, head_dim)), angles)
        projection, tokens = replace(projection, qkv=qkv, rotation=angles, row_scale=scale), rows
    lines, places = pl.cdiv(tokens, ROWS), 1 if single else rows
    whole = tokens if single or tokens < mosaic.PIECE else -(-tokens // mosaic.PIECE) * mosaic.PIECE
    count, dtype = len(parts), projection.dtype
    given = Unfinished.of(projection, parts, lines * ROWS)
    given = replace(given, product=projection.qkv.reshape(*projection.qkv.shape[:3], -1))
    result = jax.ShapeDtypeStruct((places, whole, count, heads * head_dim), dtype)
    (found,) = mosaic.launch(
        partial(_finish, parts, single, chip),
        [given, stores],
        [[result] * wanted],
        [
            plgpu.SMEM((ROWS, count, head_dim), dtype),
            mosaic.tile((ROWS, head_dim), dtype, chip.swizzle) if turned else [],
            plgpu.Barrier(),
            turn_scratch(projection, chip),
            chip.scratch(1, *turn_widths(projection)),
        ],
        computing=0,
        grid={"tile": lines, "head": heads, "row": places},
        cost=cost,
        interpret=interpret,
        name="finish_and_store" if stores else "finish",
    )
    return found[0].reshape(rows, -1, count * heads * head_dim) if wanted else None


def _finish(parts, single: bool, chip: Wgmma, given: Unfinished, stores, outs, *scratch):
    """The kernel. A token's parts lie side by side in shared memory, as in the pool. single:
    whether rows have one token. stores: `Stores` or None. outs: the result, or nothing."""
    raw, tile, arrived, turn, sums = scratch
    row, head, number = (jax.lax.axis_index(name) for name in ("row", "head", "tile"))
    first, head_dim, multiply = number * ROWS, raw.shape[-1], chip.multiply(sums, 0)
    here, columns = pl.ds(first, ROWS), pl.ds(head * head_dim, head_dim)
    source = given.product.at[row, here, pl.ds(parts[0], len(parts)), columns]
    plgpu.copy_gmem_to_smem(source, raw, arrived)
    words = stores.words(head, first) if stores is not None and not single else None
    if given.turn is not None:
        plgpu.copy_gmem_to_smem(given.turn, *turn)
        plgpu.barrier_wait(turn[1])
    for i, part in reversed(list(enumerate(parts))):  # values first: their bias is to be read
        place, barrier = raw.at[:, i], arrived if part == parts[-1] else None
        work = TileMemory(place, tile, place, barrier, turn, multiply, plain=True)
        given.finish(part, row, head, first, work)
    if outs:
        plgpu.copy_smem_to_gmem(raw, outs[0].at[row, here, :, columns])
    if stores is not None:
        if single:
            stores.put_rows(raw, head, first)
        else:
            stores.put(raw, words, row, head, first)
    # What a program has stored is there when all have ended.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def turn_widths(projection: Projection) -> tuple[int, ...]:
    """Numbers of columns of the products that finishing takes, for `Products.scratch`."""
    return () if projection.rotation is None else (TURNED,)


def turn_scratch(projection: Projection, chip: Wgmma) -> list:
    """The matrix of the rotation in shared memory, and a barrier that says that it is there."""
    if projection.rotation is None:
        return []
    return [mosaic.tile((TURNED, TURNED), projection.dtype, chip.swizzle), plgpu.Barrier()]
