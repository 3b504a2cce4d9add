"""Work on a batch a few images at a time, where all at once would take too much memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LOGITS_BYTES = 2**30  # logits, and what sampling from them takes, that may exist at once
ARRAYS_PER_LOGIT = 6  # both rows of guidance, guided, filtered, ordered or probabilities, noise


def images_at_once(tokens: int, logits_per_token: int) -> int:
    """How many images are sampled at once."""
    return max(1, LOGITS_BYTES // (ARRAYS_PER_LOGIT * tokens * logits_per_token * 4))


def map_in_chunks(function: Callable[[Any], Any], images: int, at_once: int) -> Any:
    """`function(index)` for all images, at most `at_once` in a call.

    Args:
      function: takes an index of the image axis (int32 [n], or a slice if one call does it) and
        returns arrays with a leading image axis. The last chunk may repeat the last image.

    Returns:
      The results of all images, in order.
    """
    chunks = -(-images // max(1, at_once))
    if chunks == 1:
        return function(slice(None))
    size = -(-images // chunks)  # equal chunks: the fewest that keep to the limit, none half empty
    # the last chunk repeats the last image instead of leaving a hole: every image is computed alike
    index = jnp.minimum(jnp.arange(chunks * size), images - 1).reshape(chunks, size)
    parts = jax.lax.map(function, index)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:images], parts)
