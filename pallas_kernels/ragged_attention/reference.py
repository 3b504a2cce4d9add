"""Plain JAX ragged attention: the definition of correct, runs on every platform.

Memory: the blocks of every head are gathered into a dense copy [R, N, P, 2 H], which is what the
kernels avoid. Slots outside the valid ranges may hold anything, NaN included; they are masked
before they meet arithmetic. Rows take turns where the scores of all rows would not fit a
processor's cache (`SCORES_BYTES`). Sums over queries run in chunks of `CHUNK`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.cache_write import reference as cache_write
from pallas_kernels.tables import BlockTable

# Scores of the rows that `attend` computes at once. Each is read and written several times: 16 rows
# of VAR's last scale took 146 to 158 ms on two cores when they were computed together or in two
# groups, 103 in pairs.
SCORES_BYTES = 2 << 20
CHUNK = 256  # queries whose attention weights are held at once by `attention_moments`
Results = TypeVar("Results")  # a tree of arrays with a leading axis of rows


def gather_slots(kv_pool, table: BlockTable, kv_scale):
    """Return K and V [R, N, P, H] of the listed blocks with invalid slots zeroed, and the mask [1
    or R, N, P]. With `kv_scale` the pool is int8 and the result float32."""
    rows, _, block_size, width = kv_pool.shape
    ids, mask = table.with_rows()[0], table.slot_mask(block_size)
    mask = mask if mask.ndim == 3 else mask[None]
    # explicit rows broadcast against a table shared by all rows, which is never repeated per row
    blocks = kv_pool[jnp.arange(rows)[:, None, None], ids]
    k, v = blocks[..., : width // 2], blocks[..., width // 2 :]
    if kv_scale is not None:  # a block's scales: those of all its keys, then those of its values
        scales = kv_scale[jnp.arange(rows)[:, None, None], ids][..., None]
        k = k.astype(jnp.float32) * scales[..., :block_size, :]
        v = v.astype(jnp.float32) * scales[..., block_size:, :]
    k, v = (a.reshape(rows, ids.shape[1], -1, width // 2) for a in (k, v))
    # Masked scores are not enough: a weight of 0 times a value of NaN is NaN.
    return jnp.where(mask[..., None], k, 0), jnp.where(mask[..., None], v, 0), mask


def _scores(
    q, k_old, mask, k_new, new_length
) -> tuple[Float[Array, "... Q P"], Float[Array, "... Q T"]]:
    """Masked float32 scores of stored keys and of own keys, with any number of leading axes."""
    # As in the kernels: factors in the type of the keys; sums, scores and softmax in float32.
    q = q.astype(k_new.dtype)
    old = jnp.einsum(
        "...th,...ph->...tp", q, k_old.astype(q.dtype), preferred_element_type=jnp.float32
    )
    new = jnp.einsum("...th,...sh->...ts", q, k_new, preferred_element_type=jnp.float32)
    # -inf has the weight 0 exactly. No row is -inf everywhere (its softmax would be NaN), because a
    # scale has at least one real token, whatever the table.
    old = jnp.where(mask[..., None, :], old, -jnp.inf)
    return old, jnp.where(jnp.arange(k_new.shape[-2]) < new_length, new, -jnp.inf)


def attention_scores(
    q: Float[Array, "R N Q H"],
    k_new: Float[Array, "R N T H"],
    new_length: Int[Array, ""] | int,
    kv_pool: Num[Array, "R blocks block_size KV"],
    table: BlockTable,
    *,
    kv_scale: Float[Array, "R blocks two_block_size"] | None = None,
) -> Float[Array, "R N Q PT"]:
    """Scores of a few queries before the softmax, float32, -inf where there is no key.

    The Q queries may be any of the scale's. Queries and own keys are finished. Columns are the P =
    M * block_size slots of the table in table order, then the T own tokens. They are
    computed so on every platform: policies that look through a window of queries need the scores
    themselves, so there is no memory for a kernel to save.
    """
    k_old, _, mask = gather_slots(kv_pool, table, kv_scale)
    return jnp.concatenate(_scores(q, k_old, mask, k_new, new_length), axis=-1)


def attend(projection, new_length, kv_pool, table, kv_scale, *, return_lse):
    """See `api.attend`."""
    q, k_new, v_new = projection.queries(), projection.keys(), projection.values()
    k_old, v_old, mask = gather_slots(kv_pool, table, kv_scale)
    mask = jnp.broadcast_to(mask, k_old.shape[:3])
    real = jnp.arange(v_new.shape[2]) < new_length
    v_new = jnp.where(real[:, None], v_new, 0)  # padding may hold anything, and 0 * NaN is NaN
    operands = (q, k_old, v_old, mask, k_new, v_new)
    attend_rows = jax.vmap(partial(_attend_row, new_length))
    rows, heads, tokens, _ = q.shape
    at_once = rows_at_once(heads, tokens, k_old.shape[2] + k_new.shape[2])
    if at_once >= rows:
        out, lse = attend_rows(*operands)
    else:
        place = q.transpose(0, 2, 1, 3).astype(v_new.dtype), q[..., 0].astype(jnp.float32)
        out, lse = in_turns(attend_rows, operands, place, at_once)
    return (out, lse) if return_lse else out


def in_turn(attend: Callable, write: Callable) -> Callable:
    """`api.store_and_attend` where storing is a kernel of its own, or XLA's, after attention."""

    def run(projection, new_length, kv_pool, table, writes, kv_scale, following=None, **options):
        given = (projection, new_length, kv_pool, table, kv_scale)
        out = attend(*given, return_lse=False, **options)
        # Which of the two comes first does not matter, as they share no slot. This way round XLA
        # updates the pool in place on all platforms.
        return out, *write(kv_pool, projection, writes, kv_scale, after=out, **options)

    return run


store_and_attend = in_turn(attend, cache_write.write)


def in_turns(
    function: Callable[..., Results], operands: Sequence[Array], place: Results, at_once: int
) -> Results:
    """`function(*operands)` of `at_once` rows at a time, where all of them together would take too
    much memory; the last turn may have fewer.

    Results take the place of `place`, arrays of their shapes and types, which should be computed
    from the operands. `lax.map` would begin with an empty result, which depends on nothing: XLA's
    GPU compiler makes those of all layers in one kernel, ahead of the first of them.
    """

    def replaced(i, out, number=at_once):
        some = (jax.lax.dynamic_slice_in_dim(a, i, number) for a in operands)
        return jax.tree.map(
            lambda new, a: jax.lax.dynamic_update_slice_in_dim(a, new.astype(a.dtype), i, 0),
            function(*some),
            out,
        )

    rows = len(operands[0])
    whole, rest = divmod(rows, at_once)
    out = jax.lax.fori_loop(0, whole, lambda i, out: replaced(i * at_once, out), place)
    return replaced(rows - rest, out, rest) if rest else out


def rows_at_once(heads: int, queries: int, keys: int) -> int:
    """Rows whose float32 scores take `SCORES_BYTES` at most, but never fewer than two."""
    return max(2, SCORES_BYTES // (4 * heads * queries * keys))


def _attend_row(new_length, q, k_old, v_old, mask, k_new, v_new):
    """Results [T, N, H] in the type of V and log-sum-exp [N, T] of one row."""
    scores = _scores(q, k_old, mask, k_new, new_length)
    # Stored and own keys stay apart, because putting them side by side is a pass over all scores.
    # The few results are divided by the sum of the weights, not the many weights.
    highest = jnp.maximum(*(part.max(-1, initial=-jnp.inf) for part in scores))
    weights = [jnp.exp(part - highest[..., None]) for part in scores]
    total = weights[0].sum(-1) + weights[1].sum(-1)
    out = sum(
        # rounded to the type of V before the product, as the kernels do
        jnp.einsum(
            "nts,nsh->nth",
            part.astype(v_new.dtype),
            v.astype(v_new.dtype),
            preferred_element_type=jnp.float32,
        )
        for part, v in zip(weights, (v_old, v_new), strict=True)
    )
    out = (out / total[..., None]).astype(v_new.dtype).transpose(1, 0, 2)
    return out, highest + jnp.log(total)


def attention_moments(projection, new_length, kv_pool, table, sums, kv_scale):
    """See `api.attention_moments`."""
    q, k_new = projection.queries(), projection.keys()
    k_old, _, mask = gather_slots(kv_pool, table, kv_scale)
    chunk = min(CHUNK, q.shape[2])

    def add(totals, inputs):
        some, weight, log_sum = inputs
        # exp(-inf) is 0: columns without a key need no mask of their own
        scores = jnp.concatenate(_scores(some, k_old, mask, k_new, new_length), axis=-1)
        p = jnp.exp(scores - log_sum[..., None])
        p = jnp.where(weight[:, None] != 0, p, 0)  # padded queries may be NaN; 0 * NaN is NaN
        powers = (p, p * p) if sums.squares else (p,)
        return tuple(
            s + jnp.einsum("t,rntk->rnk", weight, a) for s, a in zip(totals, powers, strict=True)
        ), None

    zero = jnp.zeros((*q.shape[:2], k_old.shape[2] + k_new.shape[2]), jnp.float32)
    # padded with zeros, and a query of weight 0 adds nothing
    chunks = (_chunks(q, 2, chunk), _chunks(sums.weights, 0, chunk), _chunks(sums.lse, 2, chunk))
    totals, _ = jax.lax.scan(add, (zero, zero) if sums.squares else (zero,), chunks)
    return totals[0], totals[1] if sums.squares else None


def _chunks(array: Array, axis: int, size: int) -> Array:
    """Cut an axis into pieces of `size`, zeros behind the end. The pieces are a new first axis."""
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, -array.shape[axis] % size)
    padded = jnp.pad(array, padding)
    shape = (*array.shape[:axis], -1, size, *array.shape[axis + 1 :])
    return jnp.moveaxis(padded.reshape(shape), axis, 0)


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Product inside the kernels for Triton and TPU, over axis contract[0] of a and contract[1] of
    b, with float32 sums. float32 factors are multiplied in full precision only where JAX's default
    for matrix products asks for it when the program is traced."""
    # The setting is read while tracing, so it is part of the compiled program. The precision is
    # always named, because None means the one that the user set for all products. Another than the
    # default does not compile for bfloat16, whose products are exact anyway.
    wanted = jax.config.jax_default_matmul_precision
    exact = a.dtype == jnp.float32 and wanted in ("highest", "float32")
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
