"""What a training step may see in place of a picture: it, mirrored, or moved by a few pixels.

A variant is a number: even ones are not mirrored, odd ones are; the half of it is a direction.

Letters: B pictures of S x S pixels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from varjax.training.data import to_float

DIRECTIONS = np.array([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)])  # down and right


def count(shift: int) -> int:
    """How many variants there are of a picture. shift: pixels; 0: it is not moved."""
    return 2 * (len(DIRECTIONS) if shift else 1)


def drawn(shift: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """int64 [batch_size]: the variants of a step, all of them equally often."""
    variants = flips(batch_size, seed, step).astype(int)
    if shift:
        moved = np.random.default_rng((seed, step, 2)).integers(len(DIRECTIONS), size=batch_size)
        variants += 2 * moved
    return variants


def flips(batch_size: int, seed: int, step: int) -> np.ndarray:
    """bool [batch_size]: which pictures of the step are mirrored, each with probability 1/2."""
    return np.random.default_rng((seed, step, 1)).random(batch_size) < 0.5


@functools.partial(jax.jit, static_argnums=2)
def pixels(
    images: UInt8[Array, "B S S 3"], variants: Int[Array, " B"], shift: int
) -> Float[Array, "B S S 3"]:
    """Variants of pictures in [-1, 1]; the border is repeated where they were moved away from."""
    if shift:
        moved = shift * jnp.asarray(DIRECTIONS)[variants // 2]
        places = (jnp.arange(images.shape[1]) - moved[..., None]).clip(0, images.shape[1] - 1)
        rows, columns = places[:, 0, :, None], places[:, 1, None, :]
        images = images[jnp.arange(len(images))[:, None, None], rows, columns]
    mirrored = (variants % 2 == 1)[:, None, None, None]
    # by table, so that every device and program has the same numbers
    return jnp.asarray(to_float(np.arange(256)))[jnp.where(mirrored, images[:, :, ::-1], images)]
