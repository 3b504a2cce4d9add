"""Between matrix products on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend.

Memory traffic. A row is read once, kept in registers in float32, and its results are written once:
for a norm 2 + 2 bytes a number are read (stream, branch) and 2 + 2 written (stream, normalised), or
2 + 1 in 8 bits; for a product that is brought into 8 bits 2 are read and 1 written. XLA writes the
scale of a row in a kernel of its own, reads the row a second time to bring it into 8 bits, and
starts a kernel of its own for many sums. Vectors of a row come from caches: its tiles run side by
side.

Tiling. A program is a warpgroup without shared memory. Rows up to `NARROW` numbers: a warp has one
of four rows, so that sums stay within a warp, and a thread has 8 or 16 bytes at a time of numbers
that lie side by side. Wider rows, and up to three tokens that are left: all four warps share a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import estimates
from pallas_kernels.implementations import require
from pallas_kernels.refs import Ref, one_number
from pallas_kernels.residual.operands import (
    TILE,
    TINY,
    Activation,
    Bits8,
    Branch,
    Norm,
    Rows8,
    Sums,
    Vectors,
)
from pallas_kernels.shared import mosaic_operands as mosaic

LANES, WARPS = 32, 4  # threads of a warp, warps of a warpgroup
NARROW = 2560  # numbers of a row that a warp holds, 80 of a thread
WIDTHS = (8, 4, 2, 1)  # numbers that lie side by side in a thread
MEETING = 4 * LANES * WARPS  # bytes of shared memory through which warps join a sum
NAMES = ("float32", "bfloat16", "float16")


# --- operations -----------------------------------------------------------------------------------


# Traced and lowered once for layers whose bodies differ elsewhere, as the first one's does.
@partial(jax.jit, static_argnames="interpret")
def add_and_normalize(stream, branch: Branch | None, norm: Norm, *, interpret):
    """See `api.add_and_normalize`."""
    sums = None if branch is None else branch.sums
    kind, bits = jnp.dtype(norm.dtype), norm.bits
    results = {"normal": jax.ShapeDtypeStruct(stream.shape, bits.dtype if bits else kind)}
    added = None
    if branch is not None:
        results["stream"] = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
        added = _sums(sums), _vectors(branch.gates)
    found = _launch(
        partial(_add_and_normalize, branch and branch.place, norm),
        (stream, added, _vectors(norm.vectors)),
        results,
        bits,
        [stream.dtype] if sums is None else [stream.dtype, sums.array.dtype],
        estimates.add_and_normalize(stream, sums, results["normal"].dtype),
        interpret=interpret,
        name="add_and_normalize",
    )
    return _normal(found, bits, kind), found.get("stream", stream)


@partial(jax.jit, static_argnames=("bits", "activation", "interpret"))
def to_8_bits(sums: Sums, bits: Bits8, activation: Activation | None, *, interpret):
    """See `api.to_8_bits`."""
    found = _launch(
        partial(_to_8_bits, activation),
        _sums(sums),
        {"normal": jax.ShapeDtypeStruct(sums.array.shape, bits.dtype)},
        bits,
        [sums.array.dtype],
        estimates.to_8_bits(sums, activation is not None),
        interpret=interpret,
        name="to_8_bits",
    )
    return _normal(found, bits, sums.kind)


def _sums(sums: Sums) -> tuple:
    """The operands of a product: array, scales of its rows [R, T'] and channels, bias."""
    scale = None if sums.row_scale is None else sums.row_scale[..., 0]
    return sums.array, scale, sums.channel_scale, sums.bias


def _vectors(given: Vectors) -> tuple[Array, Array]:
    """The operands of vectors: those of all layers [L, R, places, D], and the layer that counts."""
    array = given.array if given.layer is not None else given.array[None]
    return array, one_number(given.layer)


def _normal(found: dict[str, Array], bits: Bits8 | None, dtype) -> Array | Rows8:
    if bits is None:
        return found["normal"]
    return Rows8(found["normal"], found["scale"][..., None], dtype)


def _launch(
    body: Callable,
    given: tuple,
    results: dict[str, jax.ShapeDtypeStruct],
    bits: Bits8 | None,
    kinds: Sequence,
    cost: pl.CostEstimate,
    *,
    interpret,
    name: str,
) -> dict[str, Array]:
    """The results by name, after `body(bits, given, results, row, tile, first token)` for all
    tiles. With `bits` scales of rows [R, T'] are among them, T' >= T. kinds: types of what is
    read."""
    rows, tokens, width = results["normal"].shape
    takes = f"rows of the residual stream whose width is a multiple of {LANES * WARPS}"
    require(width % (LANES * WARPS) == 0, f"Mosaic takes {takes}, not {width}")
    many = tokens // WARPS if width <= NARROW else 0  # tiles of four tokens, then of single ones
    count = many + tokens - WARPS * many
    mosaic.check_simulator(interpret)
    for kind in kinds:
        takes = f"Mosaic adds and normalises {', '.join(NAMES)}, not {kind.name}"
        require(kind.name in (*NAMES, "int32"), takes)
    if bits is not None:
        whole = -(-tokens // TILE) * TILE
        results = results | {"scale": jax.ShapeDtypeStruct((rows, whole), jnp.float32)}

    def kernel(given, *refs: Ref):
        row, number = jax.lax.axis_index("row"), jax.lax.axis_index("tile")
        out = dict(zip(results, refs, strict=True))
        run = partial(body, bits, given, out, row)
        if many:
            pl.when(number < many)(lambda: run(Tile(WARPS, width), number * WARPS))
        if count > many:
            first = number + (WARPS - 1) * many
            pl.when(number >= many)(lambda: run(Tile(0, width), first))

    params = plgpu.CompilerParams(
        approx_math=True, lowering_semantics=mosaic.LANES, reduction_scratch_bytes=MEETING
    )
    found = pl.kernel(
        kernel,
        out_type=tuple(results.values()),
        mesh=plgpu.Mesh(grid=(rows, count), grid_names=("row", "tile")),
        compiler_params=params,
        cost_estimate=cost,
        interpret=mosaic.simulator(interpret),
        name=name,
    )(given)
    return dict(zip(results, found, strict=True))


# --- tiles ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """`rows` rows of `width` numbers in the registers of a warpgroup: four, one of each warp; or 0:
    one that the warps share, whose sums are scalars."""

    rows: int
    width: int

    @property
    def layout(self):
        threads = LANES if self.rows else LANES * WARPS
        side = next(n for n in WIDTHS if self.width % (threads * n) == 0)
        if not self.rows:
            return plgpu.Layout.WG_STRIDED((self.width,), vec_size=side)
        tiling = plgpu.Tiling(((self.rows, LANES * side), (side,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def _place(self, ref: Ref, row, first) -> Ref:
        return ref.at[row, pl.ds(first, self.rows) if self.rows else first]

    def load(self, ref: Ref, row, first) -> Array:
        """A tile of [R, T, D] in float32."""
        found = mosaic.load(self._place(ref, row, first), self.layout, plain=True)
        return found.astype(jnp.float32)

    def columns(self, ref: Ref) -> Array:
        """A vector [D], repeated in every row, in float32."""
        layout = self.layout.reduce(0) if self.rows else self.layout
        return self.spread(mosaic.load(ref, layout, plain=True).astype(jnp.float32), 1)

    def numbers(self, ref: Ref, row, first) -> Array:
        """A number of every row from [R, T], repeated along it."""
        if not self.rows:
            return ref[row, first]
        here = self._place(ref, row, first)
        return self.spread(mosaic.load(here, self.layout.reduce(1), plain=True))

    def spread(self, x: Array, axis: int = 0) -> Array:
        """A number of every row, repeated along it; axis 1: of every column, repeated in it."""
        if not self.rows:
            return x
        found = jax.lax.broadcast_in_dim(x, (self.rows, self.width), [axis])
        return plgpu.layout_cast(found, self.layout)

    def put(self, ref: Ref, row, first, x: Array) -> None:
        """Store a tile in [R, T, D], or numbers of rows in [R, T]."""
        if x.ndim:
            mosaic.store(self._place(ref, row, first), x)
        else:
            ref[row, first] = x


# --- kernels --------------------------------------------------------------------------------------


def _add_and_normalize(
    place: int | None, norm: Norm, bits, given, out: dict[str, Ref], row, tile: Tile, first
) -> None:
    stream, added, (vectors, layer) = given
    x = tile.load(stream, row, first)
    if added is not None:
        sums, (gates, gates_layer) = added
        gate = _of_row(gates, gates_layer, row).at[place]
        x += _finished(tile, sums, row, first) * tile.columns(gate)
        # what is normalised is what later layers read
        rounded = x.astype(out["stream"].dtype)
        tile.put(out["stream"], row, first, rounded)
        x = rounded.astype(jnp.float32)
    x -= tile.spread(x.sum(axis=-1) * (1 / tile.width))
    variance = (x * x).sum(axis=-1) * (1 / tile.width)
    x *= tile.spread(jax.lax.rsqrt(variance + norm.eps))
    vectors = _of_row(vectors, layer, row)
    x = x * (1 + tile.columns(vectors.at[norm.scale])) + tile.columns(vectors.at[norm.shift])
    _put(tile, bits, out, row, first, x)


def _of_row(vectors: Ref, layer: Ref, row) -> Ref:
    """Vectors [places, D] of a row, or those that all rows share."""
    return vectors.at[layer[0], row if vectors.shape[1] > 1 else 0]


def _to_8_bits(activation, bits, sums, out: dict[str, Ref], row, tile: Tile, first) -> None:
    x = _finished(tile, sums, row, first)
    _put(tile, bits, out, row, first, activation(x) if activation else x)


def _finished(tile: Tile, sums: tuple, row, first) -> Array:
    """`Sums.finished`, in float32."""
    array, row_scale, channel_scale, bias = sums
    x = tile.load(array, row, first)
    if row_scale is not None:
        x *= tile.numbers(row_scale, row, first)
        x *= tile.columns(channel_scale)
    return x if bias is None else x + tile.columns(bias)


def _put(tile: Tile, bits: Bits8 | None, out: dict[str, Ref], row, first, x: Array) -> None:
    """Store a result, with the scales of its rows if it goes into 8 bits."""
    if bits is not None:
        most = jnp.maximum(jnp.abs(x).max(axis=-1), TINY)
        tile.put(out["scale"], row, first, most * (1 / bits.largest))
        x *= tile.spread(bits.largest / most)
        if bits.dtype == jnp.int8:
            # to the nearest: the conversion cuts off what is behind the point
            x = jnp.where(x < 0, x - 0.5, x + 0.5).astype(jnp.int32)
    tile.put(out["normal"], row, first, x.astype(out["normal"].dtype))
