"""How far the predictions of two runs are apart: Kullback-Leibler divergence of their logits.

Letters: B images, L tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from varjax.errors import UserError

AnyArray = Array | np.ndarray


@jax.jit
def _divergence(reference, other):
    p, q = (jax.nn.log_softmax(x.astype(jnp.float32), axis=-1) for x in (reference, other))
    terms = jnp.where(jnp.isneginf(p), 0.0, jnp.exp(p) * (p - q))
    return jnp.maximum(terms.sum(-1), 0.0)


def kl_divergence(
    reference: Float[AnyArray, "*tokens V"], other: Float[AnyArray, "*tokens V"]
) -> Float[Array, "*tokens"]:
    """KL(softmax(reference) || softmax(other)) of every token, in nats; never negative.

    Comparable only where both runs saw the same tokens before, that is with forced tokens. Outcomes
    that the reference rules out (logit -inf) contribute nothing.

    Raises:
      UserError: shapes differ, or there is no vocabulary axis.
    """
    if reference.shape != other.shape or not reference.ndim or not reference.shape[-1]:
        raise UserError(
            f"logits of shape {reference.shape} and {other.shape} cannot be compared: both must "
            f"be [..., tokens, vocabulary]"
        )
    return _divergence(reference, other)


def token_kl(
    reference: Float[AnyArray, "B L V"], other: Float[AnyArray, "B L V"]
) -> Float[Array, "B L"]:
    """`kl_divergence` of a batch, one image at a time: temporaries are those of a single image."""
    if reference.shape != other.shape or reference.ndim != 3:
        raise UserError(
            f"logits of shape {reference.shape} and {other.shape} cannot be compared: both must "
            f"be [images, tokens, vocabulary]"
        )
    pairs = zip(reference, other, strict=True)
    return jnp.stack([kl_divergence(jnp.asarray(a), jnp.asarray(b)) for a, b in pairs])


def image_kl(
    reference: Float[AnyArray, "B L *bits V"], other: Float[AnyArray, "B L *bits V"]
) -> Float[np.ndarray, " B"]:
    """Token-mean KL of each image in nats. A token of several bits counts their sum."""
    images, tokens, *_, choices = other.shape
    flat = (a.reshape(images, -1, choices) for a in (reference, other))
    found = np.asarray(token_kl(*flat))
    return found.reshape(images, tokens, -1).sum(-1).mean(1)
