"""Plain JAX choice of tokens: the definition of correct. The TPU kernel runs `filter_logits`, too,
on the rows that it holds."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sample(logits, noise, *, tau, strength, top_k: int, top_p: float):
    """See `api.sample`."""
    logits = filter_logits(guided(logits, tau, strength), top_k, top_p)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def guided(
    logits: Float[Array, "R ..."],
    tau: Float[Array, ""] | None = None,
    strength: Float[Array, "..."] | None = None,
) -> Float[Array, "B ..."]:
    """Logits with temperature and guidance, each where it is given. With guidance the first half of
    the rows are conditional, the second half unconditional."""
    # Divided before it is split, so that a compiler that fuses both always rounds in the same way.
    logits = logits if tau is None else logits / tau
    return combined(jnp.split(logits, 1 if strength is None else 2), None, strength)


def combined(
    rows: Iterable[Float[Array, "..."]],
    tau: Float[Array, ""] | None,
    strength: Float[Array, "..."] | None,
) -> Float[Array, "..."]:
    """`guided` logits from conditional and unconditional rows; without guidance from one."""
    rows = [row if tau is None else row / tau for row in rows]
    if strength is None:
        return rows[0]
    cond, uncond = rows
    return (1 + strength) * cond - strength * uncond


def filter_logits(logits: Float[Array, "... V"], top_k: int, top_p: float) -> Float[Array, "... V"]:
    """Set logits that top-k, then top-p, rejects to -inf. The largest logit always survives. Equal
    logits survive or go together. `top_k` and `top_p` are static; 0 is off.

    Top-k keeps the k largest. Top-p rejects the smallest logits whose probabilities add up to at
    most 1 - p. Both look for a threshold, bit by bit, instead of sorting. Sorting takes several
    arrays of the size of the logits, and TPU compilers take long to compile it for every shape.
    """
    if 0 < top_k < logits.shape[-1]:
        # integers in the order of the numbers: every threshold between two numbers can be tried
        order = ordered(logits)
        shape = (*order.shape[:-1], 1)
        threshold = largest(lambda t: (order >= t).sum(-1, keepdims=True) >= top_k, shape)
        logits = jnp.where(order < threshold, -jnp.inf, logits)
    if 0 < top_p < 1:
        p = jax.nn.softmax(logits, axis=-1)
        logits = jnp.where(_unlikely(logits, p, 1 - top_p), -jnp.inf, logits)
    return logits


def first_largest(x: Float[Array, "... V"]) -> Int[Array, "... 1"]:
    """The place of the largest number, the first of equal ones, as `argmax` finds it. Comparisons
    define it on every chip. If numbers are NaN the result is still a place in the row."""
    number = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    # asked for "smaller", not "equal", which may hold for no number if there is NaN
    smaller = x < x.max(-1, keepdims=True)
    return jnp.where(smaller, x.shape[-1] - 1, number).min(-1, keepdims=True)


def _unlikely(logits: Float[Array, "... V"], p: Float[Array, "... V"], most: float) -> Array:
    """Whether top-p rejects a logit: the least likely tokens are rejected while their probabilities
    sum to at most `most`."""
    below = logits < logits.max(-1, keepdims=True)  # the largest logit is never rejected
    if logits.shape[-1] == 2:  # the smaller one of two goes or stays, and nothing is added up
        return below & (p <= most)
    order, shape = ordered(logits), (*logits.shape[:-1], 1)
    last = largest(lambda t: jnp.where(order <= t, p, 0).sum(-1, keepdims=True) <= most, shape)
    return below & (order <= last)


def ordered(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """int32 numbers that compare as the float32 numbers do; zeros of both signs become equal."""
    # negative floats are ordered by magnitude: all bits but the sign are flipped
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def largest(holds, shape: tuple[int, ...]) -> Int[Array, "..."]:
    """The largest int32 of each row for which `holds` is true. `holds` is true up to some number
    and false beyond it; 32 steps find the number bit by bit."""

    def step(i, found):
        raised = found + (jnp.int32(1) << (31 - i))  # the first one wraps from the lowest to 0
        return jnp.where(holds(raised), raised, found)

    return jax.lax.fori_loop(0, 32, step, jnp.full(shape, jnp.iinfo(jnp.int32).min))
