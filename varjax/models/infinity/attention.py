"""Rotary embedding and attention over the text, as Infinity has them.

Letters: R rows, T tokens, M text tokens (padded), N heads, H head size.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from varjax.engine.segments import map_in_chunks

SCORE_BYTES = 2**28  # scores of cross attention that may exist at once


def rotate(
    x: Float[Array, "R N T H"], cos: Float[Array, "T H"], sin: Float[Array, "T H"]
) -> Float[Array, "R N T H"]:
    """Rotary embedding, float32: numbers 2 j and 2 j + 1 are turned by the angle of their pair."""
    turned = jax.lax.platform_dependent(x, tpu=quarter_turn_by_product, default=quarter_turn)
    return x.astype(jnp.float32) * cos + turned.astype(jnp.float32) * sin


def quarter_turn(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Every pair (a, b) of neighbours as (-b, a)."""
    even = jnp.arange(x.shape[-1]) % 2 == 0
    return jnp.where(even, -jnp.roll(x, -1, axis=-1), jnp.roll(x, 1, axis=-1))


def quarter_turn_by_product(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """The same as a product with a matrix of zeros and ones, which is exact. TPUs keep what a roll
    cuts off in memory, each number in a row of its own."""
    size = x.shape[-1]
    matrix = np.zeros((size, size), np.float32)
    matrix[np.arange(1, size, 2), np.arange(0, size, 2)] = -1
    matrix[np.arange(0, size, 2), np.arange(1, size, 2)] = 1
    return jnp.einsum(
        "...h,hk->...k", x, jnp.asarray(matrix, x.dtype), precision=jax.lax.Precision.HIGHEST
    )


def attend_text(
    q: Float[Array, "R N T H"],
    k: Float[Array, "R N M H"],
    v: Float[Array, "R N M H"],
    visible: Bool[Array, "R M"],
) -> Float[Array, "R N T H"]:
    """Attention over text of every row's own length, a few rows at a time where scores are large;
    softmax in float32."""
    per_row = 2 * 4 * q.shape[1] * q.shape[2] * k.shape[2]

    def some(index) -> Any:
        scores = jnp.einsum(
            "rnth,rnmh->rntm", q[index], k[index], preferred_element_type=jnp.float32
        )
        scores = scores * q.shape[-1] ** -0.5
        scores = jnp.where(visible[index][:, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("rntm,rnmh->rnth", weights, v[index])

    return map_in_chunks(some, q.shape[0], SCORE_BYTES // per_row)
