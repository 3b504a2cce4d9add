"""Ranks on TPU (Mosaic). See `api.rank`.

Tiling. Rows lie side by side in lanes, and a head's slots below each other. So one slot of 128 rows
is one line, every line of a register can be compared with it, and no sum crosses lanes. A grid step
serves a head of up to `ROWS` rows, 128 of them at a time and `OWN` of their slots: their counts
stay in registers while all other slots pass by. What is outside of `among` is made larger than
everything first.

Work: 4 to 14 vector operations per pair of slots, four of them in an instruction, on 1,024 pairs at
once. HBM traffic: each operand once, and the counts. XLA keeps arrays of decisions in this order,
too, where it can choose.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import estimates
from pallas_kernels.shared.tpu_operands import LANES, rounded

ROWS = 4 * LANES  # of a grid step, at most
OWN = 64  # slots: with score, tie, part and counts they take half of the registers
AHEAD = 8  # others that are loaded together: a register's lines
ARRAYS = 13  # of a grid step: operands and counts twice, and what is compared with
BYTES = 12 * 2**20  # of vector memory, which they may take
MOST = 1536  # slots: of more, 128 rows do not fit
LAST = jnp.iinfo(jnp.int32).max  # not below anything


def rank(score, tie, among, part, *, interpret):
    """See `api.rank`."""
    if tie.shape[-1] > MOST:
        raise NotImplementedError(
            f"ranks on TPU are for up to {MOST} slots, not {tie.shape[-1]}: use "
            f"implementation='reference'"
        )
    given = {"tie": tie, "among": among.astype(jnp.int32)}
    if score is not None:
        # 32 bits hold all scores that are allowed exactly, so comparisons are the same
        exact = jnp.int32 if jnp.issubdtype(score.dtype, jnp.integer) else jnp.float32
        given["score"] = score.astype(exact)
    if part is not None:
        given["part"] = part.astype(jnp.int32)
    rows, heads, slots = tie.shape
    # as many rows in a grid step as fit into vector memory, in whole registers
    fits = BYTES // (4 * ARRAYS * rounded(slots, AHEAD)) // LANES * LANES
    wide = min(ROWS, fits, rounded(rows, LANES))
    spec = pl.BlockSpec((None, slots, wide), lambda head, part: (head, 0, part))
    others = rounded(slots, AHEAD), wide
    found = pl.pallas_call(
        _rank_heads,
        grid=(heads, pl.cdiv(rows, wide)),
        in_specs=[{name: spec for name in given}],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((heads, slots, rows), jnp.int32),
        scratch_shapes=[{n: pltpu.VMEM(others, a.dtype) for n, a in given.items() if n != "among"}],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=estimates.rank(tie, score, part),
        interpret=interpret,
        name="rank",
    )({name: array.transpose(1, 2, 0) for name, array in given.items()})
    return found.transpose(2, 0, 1)


def _rank_heads(given, found, others):
    slots = found.shape[0]

    def lanes(number, _):
        here = pl.ds(pl.multiple_of(number * LANES, LANES), LANES)
        # All slots of 128 rows go to where they are compared with. Slots outside of `among`, and
        # those behind the last one, become larger than everything.
        among = given["among"][:, here] != 0
        for name, other in others.items():
            values = given[name][:, here]
            if name != "part":  # its other values are never reached: their tie is too large
                largest = jnp.inf if values.dtype == jnp.float32 else LAST
                behind = other.shape[0] - slots
                if behind:
                    filling = jnp.full((behind, LANES), largest, other.dtype)
                    other[pl.ds(slots, behind), here] = filling
                values = jnp.where(among, values, jnp.asarray(largest, values.dtype))
            other[pl.ds(0, slots), here] = values
        for first in range(0, slots, OWN):
            own = pl.ds(first, min(OWN, slots - first))
            found[own, here] = _count({n: given[n][own, here] for n in others}, others, here)
        return 0

    jax.lax.fori_loop(0, found.shape[1] // LANES, lanes, 0)


def _count(own, others, here):
    """For every own slot [K', 128] the number of others that come before it."""

    def add(number, total):
        some = pl.ds(pl.multiple_of(number * AHEAD, AHEAD), AHEAD)
        some = {name: other[some, here] for name, other in others.items()}
        for i in range(AHEAD):
            other = {name: values[i : i + 1] for name, values in some.items()}
            below = other["tie"] < own["tie"]
            if "score" in own:
                below = (other["score"] < own["score"]) | ((other["score"] == own["score"]) & below)
            if "part" in own:
                below &= other["part"] == own["part"]
            total = total + jnp.where(below, 1, 0)
        return total

    steps = others["tie"].shape[0] // AHEAD
    return jax.lax.fori_loop(0, steps, add, jnp.zeros(own["tie"].shape, jnp.int32))
