"""Token attention on TPU (Mosaic). See `api.attend`.

Tiling. A grid step serves all heads of some rows, or some heads of one row (`tpu_slots.steps`).
Pallas fetches their part of the pool in one piece while the last step's is in use. The scores of a
row are one matrix [N, C], heads by slots, which is how positions and sums are stored. So all heads
have one softmax together. Where G query heads share keys and values the matrix has G lines for each
head (`tpu_row.Lines`).

The matrix unit takes as long for one query as for many. So a head's slots are multiplied with the
queries of all heads of the row, and the head's own row of the product is kept. The unit has time
for this: for 128 slots of 64 columns in bfloat16 a v5e needs 60 cycles to read them from memory,
and its unit 16. Keys and values lie side by side in a slot. They are not taken apart where a half
is no whole number of lanes: queries have zeros where values are, and of the weighted sums the last
half is kept.

Slots that are not visible have weight 0, which gives 0 unless they hold NaN or infinity. A row
whose result is not finite is computed again from finite numbers. The token that is served may be
stored on the way (`tpu_call`), and a `Probe` be scored where one is asked for. Where none is, grid
steps share a block of the scores, so that next to nothing is written.

Traffic, with b bytes per element: R N C 2 H b for the pool, read once (2 H padded to 128, C to a
tile of 8, 16 or 32), R N 8 2 H b to store a token (int8: 32), and per slot 4 bytes for positions,
8 for sums, 8 for an int8 pool's scales.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import estimates
from pallas_kernels.cache_write.reference import quantize
from pallas_kernels.refs import one_number
from pallas_kernels.shared import tpu_slots
from pallas_kernels.shared.tpu_operands import pools
from pallas_kernels.token_attention import reference, tpu_call, tpu_row, tpu_scores, tpu_used
from pallas_kernels.token_attention.operands import NewToken, kernel_operands, visible
from pallas_kernels.token_attention.tpu_call import Operands, Prefetched, Results

MOST_BYTES = 2**22  # of the pool in a grid step; there twice, in 16 MiB of vector memory
# read number by number, so they need no place in vector registers
IN_SCALAR_MEMORY = ("newest", "reach", "first_bias", "mass_weight")


def attend(query, slots, *, interpret, most_bytes: int = MOST_BYTES, piece: int | None = None):
    """See `api.attend`.

    Args:
      most_bytes: of the pool in a grid step.
      piece: slots that are fetched at once where only the first slots are in use; None takes those
        of `tpu_used.slots_of_piece`.
    """
    out, slots = _run(query, slots, None, most_bytes, piece, interpret)
    return out, slots.mass


def store_and_attend(
    query, slots, token, *, interpret, most_bytes: int = MOST_BYTES, piece: int | None = None
):
    """See `api.store_and_attend`; other arguments as in `attend`. For an int8 pool XLA makes whole
    numbers, and stores their scales."""
    if slots.scale is not None:
        (k, k_scale), (v, v_scale) = quantize(token.k), quantize(token.v)
        # one number per head: XLA writes it in place, and the kernel reads the slot's new scales
        scale = jnp.stack([k_scale, v_scale], axis=-1)[:, :, None]
        slots = replace(slots, scale=reference.store_scales(scale, token.slot, slots.scale))
        token = NewToken(k, v, token.slot)
    return _run(query, slots, token, most_bytes, piece, interpret)


def scores_on_the_way(slots) -> bool:
    """Whether `store_and_attend` scores a probe itself."""
    return True


def _run(query, slots, token, most_bytes: int, piece: int | None, interpret):
    """The output, and the slots with the new masses, the scores of a probe and the token, unless
    there is none."""
    rows, heads, count, _ = slots.pool.shape
    together, some = tpu_slots.steps(slots.pool, "token attention takes", most_bytes)
    numbers, given = _operands(query, slots, token, interpret)
    piece = piece or tpu_used.slots_of_piece(slots.pool, some)
    # a kernel with sums, or whose positions hide slots, goes through all slots of a head at once
    cut = slots.used is not None and slots.mass is None and query.newest is None and piece < count
    cut = cut and query.probe is None
    tile = tpu_call.tile_of(slots.pool, piece if cut else count, interpret)
    # the compiler schedules by this estimate: it knows nothing of what a kernel does
    cost = estimates.attend_token(query, slots, 0 if token is None else tile)
    stored = None if token is None else slots.pool
    results = Results(query.q, slots.mass, stored, given.slots.scores)
    launch = partial(tpu_call.launch, tile=tile, cost=cost, interpret=interpret)
    if cut:
        numbers = numbers._replace(used=one_number(slots.used))
        found = tpu_used.attend(launch, numbers, given, results, some, piece)
    else:
        found = launch(
            partial(_attend_rows, some, slots.group_size(query.q)),
            numbers,
            given,
            results,
            grid=(rows // together, heads // some),
            step=(together, some),
            spec=partial(_spec, rows=together, heads=some),
        )
    pool = slots.pool if token is None else found.pool
    scores = slots.scores if query.probe is None else found.scores
    return found.out, replace(slots, pool=pool, mass=found.mass, scores=scores)


def _operands(query, slots, token, interpret) -> tuple[Prefetched, Operands]:
    """Operands of the kernel; slots in use belong to the kernel that is cut."""
    held = replace(slots, pool=pools(slots.pool, None, interpret)[0], used=None)
    wanted = None if query.probe is None else one_number(query.probe.wanted)
    query, held = kernel_operands(query, held, "TPU token attention", groups=True)
    if token is None:
        return Prefetched(wanted=wanted), Operands(query, held, None)
    numbers = Prefetched(one_number(token.slot), wanted=wanted)
    return numbers, Operands(query, held, token._replace(slot=None))


def _spec(name: str, array, result: bool = False, *, rows: int, heads: int) -> pl.BlockSpec:
    """The part of an operand or result in grid step (r, n): single numbers lie in scalar memory; a
    pool gives its rows and heads, everything else the rows with all heads, or all there is."""
    if name in IN_SCALAR_MEMORY:
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    if name == "scores" and not result:  # replaced, so what is there is not fetched
        return pl.BlockSpec(memory_space=pl.ANY)
    if name in ("total", "scores"):
        # where nobody wants a probe all grid steps have the first place: it is fetched once, and
        # what is there, anything at all, written once by each core
        return pl.BlockSpec(
            (rows, *array.shape[1:]),
            lambda r, n, numbers: (jnp.where(numbers.wanted[0] != 0, r, 0), 0, 0),
        )
    if name == "pool":
        return pl.BlockSpec((rows, heads, *array.shape[2:]), lambda r, n, *_: (r, n, 0, 0))
    # axes of lines and lanes are whole: blocks of them would have to be multiples of (8, 128)
    shared, rest = len(array) == 1, array.shape[1:]
    return pl.BlockSpec(
        (1 if shared else rows, *rest), lambda r, n, *_: (0 if shared else r, *[0] * len(rest))
    )


def _attend_rows(
    some: int, group: int, numbers: Prefetched, given: Operands, results: Results, rows_ref=None
):
    pool = given.slots.pool
    # the interpreter knows program numbers here, but not inside of the loop
    begin, first = pl.program_id(0) * len(pool), pl.program_id(1) * some

    def row(i, _):
        if given.token is not None:
            # into the slots that are here, before anything is computed from them
            tpu_call.put_beside(i, given.token, rows_ref)
            tpu_call.put(rows_ref, first, numbers.slot[0], pool.at[i], results.pool.at[i])
        if results.scores is not None:
            probe = partial(_probe_row, i, first, some, given, results)
            pl.when(numbers.wanted[0] != 0)(probe)
        _attend_row(i, begin + i, first, some, group, given, results)
        return 0

    jax.lax.fori_loop(0, len(pool), row, 0)


def _attend_row(i, row, first, some: int, group: int, given: Operands, results: Results) -> None:
    """Attend for row i of the grid step, which is number `row` of all: for `some` heads from number
    `first` on, each of `group` query heads."""
    query, slots = given.query, given.slots
    queries = tpu_row.padded(query.q[i], slots.pool.shape[-1])
    shape = len(queries), slots.pool.shape[2]
    lines, heads = tpu_row.Lines.of(len(queries), group), len(queries) // group
    mine = [lines.head(first + j) for j in range(some)]
    # lines of heads that are not here hold 0 and are left out at the end
    scores = tpu_row.scores(queries, mine, slots.pool.at[i])
    if slots.scale is not None:
        # a product of the finished scores, so whole numbers enter the matrix unit
        scores *= lines.spread(slots.scale[i, 0])
    if query.first_bias is not None:
        scores += jnp.where(tpu_row.iota(shape, 1) == 0, query.first_bias[row], 0.0)
    seen = jnp.broadcast_to(_visible(i, row, lines, given), shape)
    scores = jnp.where(seen, scores, -jnp.inf)
    # every head sees a slot, so no maximum is -inf
    weights = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    factors = weights
    if slots.scale is not None:
        # the scale of an empty slot may be NaN, and its weight of 0 would become NaN
        factors = jnp.where(seen, weights * lines.spread(slots.scale[i, 1]), 0.0)
    size = results.out.shape[-1]
    width = tpu_row.columns(size, slots.pool.shape[-1])
    out = tpu_row.mean(factors, mine, slots.pool.at[i], queries.dtype, width)
    whole = some == heads

    def put(ref, lines, new) -> None:
        # grid steps that serve other heads of the row write other lines of the same result
        ref[i] = new if whole else jnp.where(lines.between(first, first + some), new, ref[i])

    put(results.out, lines, out[:, -size:].astype(queries.dtype))
    if results.mass is not None:
        # a group's queries read the same slots, so they count in the same sums
        sums = slots.mass[i] + query.mass_weight[0] * lines.gathered(weights)
        put(results.mass, lines if group == 1 else tpu_row.Lines.of(heads, 1), sums)


def _probe_row(i, first, some: int, given: Operands, results: Results) -> None:
    """Score the probe of row i of the grid step: `some` heads from number `first` on."""
    slots, probe = given.slots, given.query.probe
    for j in range(some):
        line = pl.ds(first + j, 1)
        factor = None if slots.scale is None else slots.scale[i, 0, line]
        keys = slots.pool[i, j, :, : probe.total.shape[-1]]
        # divided here: outside, one more array would be written for every token
        found = tpu_scores.of_head(probe.total[i, line] / probe.count, keys, factor, exact=True)
        results.scores[i, line] = found


def _visible(i, row, lines: tpu_row.Lines, given: Operands):
    """Mask of the slots that are seen [G N, C]; [1, C] where all heads see the same."""
    (query, slots, _), reach, newest = given, None, None
    position = lines.spread(slots.position[i if len(slots.position) > 1 else 0])
    if query.newest is not None:
        newest = query.newest[0]
        if slots.reach is not None:
            reach = jnp.zeros_like(lines.number)
            for head in range(slots.reach.shape[1]):  # from scalar memory into a column
                reach = jnp.where(lines.head(head), slots.reach[row, head], reach)
    return visible(position, newest, reach, query.protected)
