"""Products of one token on Hopper GPUs with Pallas' Mosaic GPU backend. See `api`.

Tiling. A program of one warpgroup makes a tile of 64 or 128 rows and `PIECE` columns (gates: of
gates and of values; heads that are turned by halves: of a head). It goes through the input width in
steps of `STEP`, whose rows and weights are copied into one of `Tiles.stages` places in shared
memory, as many steps ahead. Products of a step run while the next one is waited for.

What comes after a product is done in its registers. No kernel reads a whole row before it begins:
the norm is a factor per row, made of the sums of squares that `add` leaves for each of its tiles.
Rows stay in their rows throughout, so those beyond the last real one may hold anything.

Traffic, with b bytes per element: weights once; rows once for every tile of columns and weights
once for every tile of rows, which caches deliver. `add` reads and writes the stream, 8 R D.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import estimates, target
from pallas_kernels.implementations import require
from pallas_kernels.refs import one_number
from pallas_kernels.shared import mosaic_operands as mosaic
from pallas_kernels.shared.mosaic_products import LAYOUT, PER_COLUMN, PER_ROW, ROWS, across, down
from pallas_kernels.token_attention.operands import QuerySum
from pallas_kernels.token_products.operands import PIECE, Angles, TokenStream

STEP = 64  # of the input width
STAGES = 6  # steps in shared memory, at most
SWIZZLE = 128  # bytes
DTYPES = ("bfloat16", "float16")
HALVES = (16, 32, 64, 128)  # sizes of heads: several to a tile, or one
CAPABILITIES = ("9.0", None)  # None: no GPU, as in the simulator
MOST_WIDE = 128 * PIECE  # width of a stream: sums of squares are copied at once, up to 32 KiB


def start(x, norm, eps: float, dtype, *, interpret) -> TokenStream:
    """See `api.start`. Rows become whole tiles."""
    x = mosaic.padded(x, 0, ROWS)
    rows, width = x.shape
    check(dtype, {"width": width}, interpret)
    squares = jnp.square(x).reshape(rows, -1, PIECE).sum(-1).T
    scaled = (x * norm.weights[norm.number].astype(jnp.float32)).astype(dtype)
    return TokenStream(x, norm, scaled, squares, eps)


def project(stream: TokenStream, weights, angles: Angles, total: QuerySum | None, *, interpret):
    """See `api.project`."""
    rows, columns = len(stream.x), weights.shape[1]
    widths = {"width": len(weights), "queries": angles.queries, "keys": angles.keys}
    check(weights.dtype, widths, interpret, angles)
    # within a tile every number has the one that it is turned with
    tiles = Tiles.of(weights, rows, columns, max(PIECE, angles.halves * angles.head_dim))
    shapes = [(rows, n) for n in (angles.queries, angles.keys, angles.keys)]
    turning = _Turning.of(angles, rows, tiles, weights.dtype, total)
    # memory for the matrix of a rotation, and a barrier that says that it is there
    turn = mosaic.tile((tiles.columns, tiles.columns), weights.dtype, SWIZZLE), plgpu.Barrier()
    sums = None if total is None else jax.new_ref(mosaic.padded(total.total, 0, ROWS))
    out = _launch(
        partial(_project, tiles, stream.eps),
        (stream.scaled, weights, stream.squares, turning, sums),
        [jax.ShapeDtypeStruct(shape, weights.dtype) for shape in shapes],
        [_squares(stream, tiles), tiles.memory(weights.dtype, 2), turn],
        tiles,
        estimates.token_product(stream.scaled, weights, shapes, summed=sums is not None),
        interpret,
        "token_project",
    )
    return tuple(out), None if sums is None else jax.freeze(sums)[: len(total.total)]


def gate(stream: TokenStream, weights, *, interpret):
    """See `api.gate`."""
    rows, columns = len(stream.x), weights.shape[1] // 2
    check(weights.dtype, {"width": len(weights), "gates": columns}, interpret)
    tiles = Tiles.of(weights, rows, columns, PIECE, products=2)
    (out,) = _launch(
        partial(_gate, tiles, stream.eps),
        (stream.scaled, weights, stream.squares),
        [jax.ShapeDtypeStruct((rows, columns), weights.dtype)],
        [_squares(stream, tiles), tiles.memory(weights.dtype, 1)],
        tiles,
        estimates.token_product(stream.scaled, weights, [(rows, columns)]),
        interpret,
        "token_gate",
    )
    return out


def add(stream: TokenStream, branch, weights, norm, *, interpret) -> TokenStream:
    """See `api.add`."""
    (rows, width), dtype = stream.x.shape, weights.dtype
    branch = mosaic.padded(branch.astype(dtype), 0, ROWS)
    check(dtype, {"width": width, "branch": len(weights)}, interpret)
    tiles = Tiles.of(weights, rows, width, PIECE)
    shapes = (rows, width), (rows, width), (width // PIECE, rows)
    x, scaled, squares = _launch(
        partial(_add, tiles),
        (branch, weights, stream.x, norm._replace(number=one_number(norm.number))),
        [
            jax.ShapeDtypeStruct(s, t)
            for s, t in zip(shapes, (jnp.float32, dtype) * 2, strict=False)
        ],
        [
            (tiles.memory(jnp.float32, 1), plgpu.Barrier()),
            tiles.memory(dtype, 1),
            plgpu.SMEM((tiles.rows,), jnp.float32),
        ],
        tiles,
        estimates.token_product(branch, weights, shapes[:1], streams=1),
        interpret,
        "token_add",
    )
    return TokenStream(x, norm, scaled, squares, stream.eps)


def check(dtype, widths: dict[str, int], interpret, angles: Angles | None = None) -> None:
    """Raise `NotImplementedError` for what the kernels cannot take."""
    kind, sizes = jnp.dtype(dtype).name, " or ".join(map(str, HALVES))
    whole = not any(n % PIECE for n in widths.values()) and widths["width"] <= MOST_WIDE
    turned = angles is None or not angles.halves or angles.head_dim in HALVES
    for right, takes in (
        (kind in DTYPES, f"{' and '.join(DTYPES)}, not {kind}"),
        (whole, f"multiples of {PIECE} columns, a width of up to {MOST_WIDE}, not {widths}"),
        (
            target.capability() in CAPABILITIES,
            f"GPUs of compute capability 9.0, not {target.capability()}",
        ),
        (
            turned,
            f"heads of {sizes} that are turned by halves, not of {angles and angles.head_dim}",
        ),
    ):
        require(right, f"Mosaic products of one token take {takes}")
    mosaic.check_simulator(interpret)


@dataclass(frozen=True)
class Tiles:
    """Tiling of a product [R, K] x [K, C].

    rows, columns: of a tile.
    products: how many a program makes: of columns, and of those half of the weights further.
    steps: of the input width.
    stages: of them in shared memory.
    grid: tiles of columns, and of rows.
    """

    rows: int
    columns: int
    products: int
    steps: int
    stages: int
    grid: tuple[int, int]

    @classmethod
    def of(cls, weights, rows: int, columns: int, each: int, products: int = 1) -> "Tiles":
        """For so many rows and columns, `each` columns to a tile."""
        cores = mosaic.CORES["9.0"]
        tall, steps, lines = 2 * ROWS, len(weights) // STEP, columns // each
        # higher tiles read weights less often, if there are programs for most multiprocessors
        busy = lines * rows // tall > 2 * cores // 3
        high = tall if rows % tall == 0 and busy and each == PIECE else ROWS
        stages = min(steps, STAGES if products == 1 else STAGES - 2)
        return cls(high, each, products, steps, stages, (lines, rows // high))

    def memory(self, dtype, count: int) -> Sequence:
        """Shared memory for tiles of the result."""
        return [mosaic.tile((self.rows, self.columns), dtype, SWIZZLE) for _ in range(count)]

    @property
    def place(self) -> tuple:
        """(first column of the program's tile, first row, the rows)."""
        column, row = jax.lax.axis_index("column"), jax.lax.axis_index("row")
        return column * self.columns, pl.ds(row * self.rows, self.rows)

    def multiply(self, x, weights, then: Callable[..., None]) -> None:
        """Call `then` with the program's products, float32 in `LAYOUT`."""
        column, row = jax.lax.axis_index("column"), jax.lax.axis_index("row")

        def step(_, rows, *weights):
            for total, these in zip(totals, weights, strict=True):
                plgpu.wgmma(total, rows, these)
            plgpu.wgmma_wait(len(weights))  # those of the step before have been read

        def block(shape, place, dtype):
            lines = SWIZZLE // jnp.dtype(dtype).itemsize
            pieces = plgpu.TilingTransform((8, lines)), plgpu.SwizzleTransform(SWIZZLE)
            # a step's place is taken again once the products of the step after it are started
            late = min(1, self.stages - 1)
            return plgpu.BlockSpec(shape, place, transforms=pieces, delay_release=late)

        def run(*refs):
            nonlocal totals
            totals = refs
            plgpu.emit_pipeline(
                step,
                grid=(self.steps,),
                in_specs=[block((self.rows, STEP), lambda k: (row, k), x.dtype)]
                + [
                    block((STEP, self.columns), lambda k, i=i: (k, column + i), weights.dtype)
                    for i in range(0, self.products * self.grid[0], self.grid[0])
                ],
                max_concurrent_steps=self.stages,
            )(x, *[weights] * self.products)
            plgpu.wgmma_wait(0)
            then(*[total[...] for total in totals])

        totals = ()
        shape = self.rows, self.columns
        pl.run_scoped(run, *[plgpu.ACC(shape, jnp.float32)] * self.products)


def _launch(body, operands, results, scratch, tiles: Tiles, cost, interpret, name: str):
    lines, rows = tiles.grid
    return pl.kernel(
        lambda *refs: pl.run_scoped(partial(body, *refs), *scratch),
        out_type=tuple(results),
        mesh=plgpu.Mesh(grid=(lines, rows), grid_names=("column", "row")),
        compiler_params=mosaic.PARAMS,
        cost_estimate=cost,
        interpret=mosaic.simulator(interpret),
        name=name,
    )(*operands)


def _squares(stream: TokenStream, tiles: Tiles) -> Sequence:
    """Shared memory for the sums of squares of a tile's rows, and a barrier."""
    return plgpu.SMEM((len(stream.squares), tiles.rows), jnp.float32), plgpu.Barrier()


def _factor(eps: float, memory) -> Array:
    """The factor of every row that normalises it."""
    sums, arrived = memory
    plgpu.barrier_wait(arrived)
    pieces, rows = sums.shape
    total = jax.lax.fori_loop(
        0,
        pieces,
        lambda piece, total: total + mosaic.load(sums.at[piece], PER_ROW, plain=True),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), PER_ROW),
    )
    return jax.lax.rsqrt(total / (pieces * PIECE) + eps)


def _gate(tiles: Tiles, eps: float, x, weights, squares, out, memory, result):
    column, rows = tiles.place
    plgpu.copy_gmem_to_smem(squares.at[:, rows], *memory)

    def then(gates, values):
        factor = _factor(eps, memory)
        gates, values = (a * across(factor, a.shape) for a in (gates, values))
        gated = gates / (1 + jnp.exp(-gates)) * values
        result[0][...] = gated.astype(result[0].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result[0], out.at[rows, pl.ds(column, tiles.columns)])
        plgpu.wait_smem_to_gmem(0)

    tiles.multiply(x, weights, then)


def _add(tiles: Tiles, branch, weights, x, norm, new, scaled, squares, stream, result, sums):
    column, rows = tiles.place
    columns = pl.ds(column, tiles.columns)
    (memory,), arrived = stream
    plgpu.copy_gmem_to_smem(x.at[rows, columns], memory, arrived)

    def then(product):
        plgpu.barrier_wait(arrived)
        total = mosaic.load(memory, LAYOUT) + product
        memory[...] = total
        factors = mosaic.load(
            norm.weights.at[norm.number[0], columns], PER_COLUMN, plain=True
        ).astype(jnp.float32)
        result[0][...] = (total * down(factors, total.shape)).astype(scaled.dtype)
        mosaic.store(sums, (total * total).sum(axis=1))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory, new.at[rows, columns])
        plgpu.copy_smem_to_gmem(result[0], scaled.at[rows, columns])
        plgpu.copy_smem_to_gmem(sums, squares.at[jax.lax.axis_index("column"), rows])
        plgpu.wait_smem_to_gmem(0)

    tiles.multiply(branch, weights, then)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Turning:
    """`Angles` and what is done with queries, as operands, and inside the kernel as references.

    cos, sin: [rows or 1, A]; angles of a column are those of its number modulo A.
    turn: `Angles.turn` of a tile's columns.
    adding: float32 [1] each, `QuerySum.keep` and `weight`; None: queries are not added up.
    """

    cos: Array
    sin: Array
    turn: Array
    adding: tuple[Array, Array] | None
    angles: Angles

    @classmethod
    def of(cls, angles: Angles, rows: int, tiles: Tiles, dtype, total) -> "_Turning":
        size = angles.head_dim
        copies = math.lcm(size, tiles.columns) // size
        cos, sin = (jnp.tile(a, (1, copies)) for a in (angles.cos, angles.sin))
        if len(cos) > 1:
            cos, sin = (mosaic.padded(a, 0, rows) for a in (cos, sin))
        # one by one: stacked, they would take a kernel of their own
        numbers = () if total is None else (total.keep, total.weight)
        adding = tuple(a.reshape(1) for a in numbers) or None
        turn = jnp.asarray(angles.turn(tiles.columns), dtype)
        return cls(cos, sin, turn, adding, angles)

    def angle(self, of, rows, column, shape):
        """Cosines or sines of a tile."""
        columns = pl.ds(jax.lax.rem(column, of.shape[1]), shape[1])
        if len(of.shape) and of.shape[0] > 1:
            return mosaic.load(of.at[rows, columns], LAYOUT, plain=True)
        return down(mosaic.load(of.at[0, columns], PER_COLUMN, plain=True), shape)


def _project(tiles: Tiles, eps: float, x, weights, squares, turning: _Turning, sums, *refs):
    q, k, v, memory, (tile, result), (turn, turned) = refs
    (column, rows), angles, shape = tiles.place, turning.angles, (tiles.rows, tiles.columns)
    values = angles.queries + angles.keys  # the first column of them
    plgpu.copy_gmem_to_smem(squares.at[:, rows], *memory)
    plgpu.copy_gmem_to_smem(turning.turn, turn, turned)

    def then(product):
        # rounded before the rotation, as the product alone would leave it
        rounded = (product * across(_factor(eps, memory), shape)).astype(tile.dtype)
        tile[...] = rounded
        plgpu.commit_smem()
        plgpu.barrier_wait(turned)
        pl.when(column >= values)(lambda: put(tile, v, column - values))
        pl.when(column < values)(lambda: turn_and_put(rounded.astype(jnp.float32)))
        plgpu.wait_smem_to_gmem(0)

    def turn_and_put(plain):
        def multiply(total):
            plgpu.wgmma(total, tile, turn)
            return total[...]

        found = plain * turning.angle(turning.cos, rows, column, shape)
        neighbours = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
        found += neighbours * turning.angle(turning.sin, rows, column, shape)
        found *= jnp.where(column < angles.queries, angles.scale, 1.0)
        result[...] = found.astype(result.dtype)
        plgpu.commit_smem()
        pl.when(column >= angles.queries)(lambda: put(result, k, column - angles.queries))

        @pl.when(column < angles.queries)
        def _():
            put(result, q, column)
            if sums is not None:
                # each number by the thread that has it
                place, (keep, weight) = sums.at[rows, pl.ds(column, tiles.columns)], turning.adding
                before = mosaic.load(place, LAYOUT, plain=True)
                before = jnp.where(keep[0] > 0, before, 0.0)
                new = mosaic.load(result, LAYOUT).astype(jnp.float32)
                mosaic.store(place, before + weight[0] * new)

    def put(memory, out, first):
        plgpu.copy_smem_to_gmem(memory, out.at[rows, pl.ds(first, tiles.columns)])

    tiles.multiply(x, weights, then)
