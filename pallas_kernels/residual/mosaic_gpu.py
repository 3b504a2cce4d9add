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

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import estimates
from pallas_kernels import mosaic_operands as mosaic
from pallas_kernels.refs import Operand, Ref
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

LANES, WARPS = 32, 4  # threads of a warp, warps of a warpgroup
NARROW = 2560  # numbers of a row that a warp holds, 80 of a thread
WIDTHS = (8, 4, 2, 1)  # numbers that lie side by side in a thread
MEETING = 4 * LANES * WARPS  # bytes of shared memory through which warps join a sum
NAMES = ("float32", "bfloat16", "float16")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """The operands, inside the kernel references. None where there is nothing.

    stream, sums: [R, T, D]. row_scale: [R, T] or longer rows. channel_scale, bias: [D].
    gates, vectors: [L, R, places, D], with the layer that counts as int32 [1].
    """

    stream: Operand = None
    sums: Operand = None
    row_scale: Operand = None
    channel_scale: Operand = None
    bias: Operand = None
    gates: Operand = None
    gates_layer: Operand = None
    vectors: Operand = None
    vectors_layer: Operand = None
    gate: int = field(default=0, metadata=dict(static=True))

    @classmethod
    def of(cls, stream, sums: Sums | None, branch: Branch | None, norm: Norm | None) -> "Given":
        found = {"stream": stream}
        if sums is not None:
            scale = None if sums.row_scale is None else sums.row_scale[..., 0]
            found |= {"sums": sums.array, "row_scale": scale, "bias": sums.bias}
            found |= {"channel_scale": sums.channel_scale}
        if branch is not None:
            found |= _vectors("gates", branch.gates) | {"gate": branch.place}
        if norm is not None:
            found |= _vectors("vectors", norm.vectors)
        return cls(**found)


def _vectors(name: str, given: Vectors) -> dict[str, Array]:
    array = given.array if given.layer is not None else given.array[None]
    return {name: array, f"{name}_layer": mosaic.number(given.layer)}


@dataclass(frozen=True)
class Results:
    """References to what is written; None where there is nothing. scale: [R, T'], T' >= T."""

    normal: Ref
    stream: Ref | None = None
    scale: Ref | None = None


# --- tiles ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """`rows` rows of `width` numbers in the registers of a warpgroup: four, one of each warp, or
    one, of which each warp has all."""

    rows: int
    width: int

    @property
    def layout(self):
        side = _side_by_side(self.width, LANES)
        tiling = plgpu.Tiling(((self.rows, LANES * side), (side,)))
        warps = -3 if self.rows == WARPS else plgpu.Replicated(WARPS)
        return plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=(-2,), vector_dim=-1)

    def load(self, ref: Ref, row, first) -> Array:
        """A tile of [R, T, D] in float32."""
        here = ref.at[row, pl.ds(first, self.rows)]
        return mosaic.load(here, self.layout, plain=True).astype(jnp.float32)

    def columns(self, ref: Ref) -> Array:
        """A vector [D], repeated in every row, in float32."""
        found = mosaic.load(ref, self.layout.reduce(0), plain=True)
        return self._spread(found.astype(jnp.float32), 1)

    def numbers(self, ref: Ref, row, first) -> Array:
        """A number of every row from [R, T]."""
        here = ref.at[row, pl.ds(first, self.rows)]
        return mosaic.load(here, self.layout.reduce(1), plain=True)

    def across(self, numbers: Array) -> Array:
        """A number of every row, repeated along it."""
        return self._spread(numbers, 0)

    def _spread(self, x: Array, axis: int) -> Array:
        found = jax.lax.broadcast_in_dim(x, (self.rows, self.width), [axis])
        return plgpu.layout_cast(found, self.layout)

    def total(self, x: Array) -> Array:
        return x.sum(axis=1)

    def most(self, x: Array) -> Array:
        return x.max(axis=1)

    def put(self, ref: Ref, row, first, x: Array) -> None:
        """Store a tile in [R, T, D], or numbers of rows in [R, T]."""
        mosaic.store(ref.at[row, pl.ds(first, self.rows)], x)


@dataclass(frozen=True)
class Line:
    """One row of `width` numbers, shared by the warps of a warpgroup. Numbers of rows are scalars.
    The methods are those of `Tile`."""

    width: int
    rows: int = 1

    @property
    def layout(self):
        side = _side_by_side(self.width, LANES * WARPS)
        return plgpu.Layout.WG_STRIDED((self.width,), vec_size=side)

    def load(self, ref: Ref, row, first) -> Array:
        return self.columns(ref.at[row, first])

    def columns(self, ref: Ref) -> Array:
        return mosaic.load(ref, self.layout, plain=True).astype(jnp.float32)

    def numbers(self, ref: Ref, row, first) -> Array:
        return ref[row, first]

    def across(self, numbers: Array) -> Array:
        return numbers

    def total(self, x: Array) -> Array:
        return x.sum()

    def most(self, x: Array) -> Array:
        return x.max()

    def put(self, ref: Ref, row, first, x: Array) -> None:
        if x.ndim:
            mosaic.store(ref.at[row, first], x)
        else:
            ref[row, first] = x


def _side_by_side(width: int, threads: int) -> int:
    return next(n for n in WIDTHS if width % (threads * n) == 0)


@dataclass(frozen=True)
class Tiles:
    """The tiles of each row of the batch, in order: those of four tokens, then single ones."""

    fours: Tile | None
    single: Tile | Line
    tokens: int

    @classmethod
    def of(cls, tokens: int, width: int, scales: bool) -> "Tiles":
        """scales: whether a scale of each row is written."""
        narrow = width <= NARROW and width % (2 * LANES) == 0
        whole = width % (LANES * WARPS) == 0
        # a warp of `Tile` cannot store the one number of its row
        if not whole and (not narrow or scales):
            raise NotImplementedError(
                f"Mosaic takes rows of the residual stream whose width is a multiple of "
                f"{LANES * WARPS}, not {width}: use implementation='reference' "
                f"(--attention=reference)"
            )
        fours = Tile(WARPS, width) if narrow and tokens >= WARPS else None
        return cls(fours, Line(width) if whole else Tile(1, width), tokens)

    @property
    def whole(self) -> int:
        """How many have four tokens."""
        return self.tokens // WARPS if self.fours else 0

    @property
    def count(self) -> int:
        return self.whole + self.tokens - WARPS * self.whole

    def run(self, number, body: Callable) -> None:
        """Call `body(tile, its first token)` for the tile with this number."""
        if self.fours:
            pl.when(number < self.whole)(lambda: body(self.fours, number * WARPS))
        if self.count > self.whole:
            first = number + (WARPS - 1) * self.whole
            pl.when(number >= self.whole)(lambda: body(self.single, first))


# --- operations -----------------------------------------------------------------------------------


def add_and_normalize(stream, branch: Branch | None, norm: Norm, *, interpret):
    """See `api.add_and_normalize`."""
    tiles = Tiles.of(*stream.shape[1:], scales=norm.bits is not None)
    sums = None if branch is None else branch.sums
    _check(interpret, stream, sums)
    kind = jnp.dtype(norm.dtype)
    written = norm.bits.dtype if norm.bits else kind
    results = {"normal": jax.ShapeDtypeStruct(stream.shape, written)}
    if branch is not None:
        results["stream"] = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
    found = _launch(
        partial(_add_and_normalize, norm.scale, norm.shift, norm.eps),
        Given.of(stream, sums, branch, norm),
        results,
        tiles,
        norm.bits,
        estimates.add_and_normalize(stream, sums, written),
        interpret=interpret,
        name="add_and_normalize",
    )
    return _result(found, norm.bits, kind), found.get("stream", stream)


def to_8_bits(sums: Sums, bits: Bits8, activation: Activation | None, *, interpret):
    """See `api.to_8_bits`."""
    shape = sums.array.shape
    tiles = Tiles.of(*shape[1:], scales=True)
    _check(interpret, None, sums)
    found = _launch(
        partial(_to_8_bits, activation),
        Given.of(None, sums, None, None),
        {"normal": jax.ShapeDtypeStruct(shape, bits.dtype)},
        tiles,
        bits,
        estimates.to_8_bits(sums, activation is not None),
        interpret=interpret,
        name="to_8_bits",
    )
    return _result(found, bits, sums.kind)


def _result(found: dict[str, Array], bits: Bits8 | None, dtype) -> Array | Rows8:
    if bits is None:
        return found["normal"]
    return Rows8(found["normal"], found["scale"][..., None], dtype)


def _check(interpret, stream, sums: Sums | None) -> None:
    """Raise `NotImplementedError` for what the kernels cannot take."""
    mosaic.check_simulator(interpret)
    kinds = [a.dtype.name for a in (stream, sums and sums.array) if a is not None]
    for kind in kinds:
        if kind not in (*NAMES, "int32"):
            raise NotImplementedError(
                f"Mosaic adds and normalises {', '.join(NAMES)}, not {kind}: use "
                f"implementation='reference' (--attention=reference)"
            )


def _launch(
    body: Callable,
    given: Given,
    results: dict[str, jax.ShapeDtypeStruct],
    tiles: Tiles,
    bits: Bits8 | None,
    cost: pl.CostEstimate,
    *,
    interpret,
    name: str,
) -> dict[str, Array]:
    """The results by name, after `body(bits, given, results, tile, row, first token)` for all
    tiles."""
    rows, tokens, _ = results["normal"].shape
    if bits is not None:
        whole = -(-tokens // TILE) * TILE
        results = results | {"scale": jax.ShapeDtypeStruct((rows, whole), jnp.float32)}

    def kernel(given: Given, *refs: Ref):
        row, number = jax.lax.axis_index("row"), jax.lax.axis_index("tile")
        out = Results(**dict(zip(results, refs, strict=True)))
        tiles.run(number, lambda tile, first: body(bits, given, out, tile, row, first))

    params = plgpu.CompilerParams(
        approx_math=True, lowering_semantics=mosaic.LANES, reduction_scratch_bytes=MEETING
    )
    found = pl.kernel(
        kernel,
        out_type=tuple(results.values()),
        mesh=plgpu.Mesh(grid=(rows, tiles.count), grid_names=("row", "tile")),
        compiler_params=params,
        cost_estimate=cost,
        interpret=mosaic.simulator(interpret),
        name=name,
    )(given)
    return dict(zip(results, found, strict=True))


# --- kernels --------------------------------------------------------------------------------------


def _add_and_normalize(
    scale: int, shift: int, eps: float, bits, given: Given, out: Results, tile, row, first
) -> None:
    x = tile.load(given.stream, row, first)
    if given.sums is not None:
        gate = given.gates.at[given.gates_layer[0], row, given.gate]
        x += _finished(tile, given, row, first) * tile.columns(gate)
        # what is normalised is what later layers read
        rounded = x.astype(out.stream.dtype)
        tile.put(out.stream, row, first, rounded)
        x = rounded.astype(jnp.float32)
    x -= tile.across(tile.total(x) * (1 / tile.width))
    variance = tile.total(x * x) * (1 / tile.width)
    x *= tile.across(jax.lax.rsqrt(variance + eps))
    vectors = given.vectors.at[given.vectors_layer[0], row]
    x = x * (1 + tile.columns(vectors.at[scale])) + tile.columns(vectors.at[shift])
    _put(tile, bits, out, row, first, x)


def _to_8_bits(activation, bits, given: Given, out: Results, tile, row, first) -> None:
    x = _finished(tile, given, row, first)
    _put(tile, bits, out, row, first, activation(x) if activation else x)


def _finished(tile, given: Given, row, first) -> Array:
    """`Sums.finished`, in float32."""
    x = tile.load(given.sums, row, first)
    if given.row_scale is not None:
        x *= tile.across(tile.numbers(given.row_scale, row, first))
        x *= tile.columns(given.channel_scale)
    return x if given.bias is None else x + tile.columns(given.bias)


def _put(tile, bits: Bits8 | None, out: Results, row, first, x: Array) -> None:
    """Store a result, with the scales of its rows if it goes into 8 bits."""
    if bits is not None:
        most = jnp.maximum(tile.most(jnp.abs(x)), TINY)
        tile.put(out.scale, row, first, most * (1 / bits.largest))
        x *= tile.across(bits.largest / most)
        if bits.dtype == jnp.int8:
            # to the nearest: the conversion cuts off what is behind the point
            x = jnp.where(x < 0, x - 0.5, x + 0.5).astype(jnp.int32)
    tile.put(out.normal, row, first, x.astype(out.normal.dtype))
