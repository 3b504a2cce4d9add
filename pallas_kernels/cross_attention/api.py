"""Attention of image tokens over a text: signatures, documentation and dispatch.

Keys and values of the text are the same for every scale, so they lie finished in a pool of blocks,
those of all layers: kernels find a layer's blocks themselves, and no layer's are cut out.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import implementations

MODULES = implementations.modules_of(__package__, "mosaic")
BLOCK = 64  # tokens of a block that kernels read


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TextKeys:
    """Keys and values of the texts of all rows, in all layers.

    kv_pool: blocks, layer by layer, head by head; K in the first half of the last axis, V in the
      second (KV = 2 H). For the reference a head's text is one block; for kernels it is cut into
      blocks of `BLOCK` tokens, zeros behind its end.
    length: tokens of every row's text, at least 1; what comes after them is not seen.
    layers: L, static.
    implementation: static; one of `implementations.NAMES`, None takes the best one for this
      platform. There are the reference, and a kernel for Hopper and Blackwell: the reference runs
      for other kernels' names.
    """

    kv_pool: Float[Array, "R blocks block_size KV"]
    length: Int[Array, " R"]
    layers: int = field(metadata=dict(static=True))
    implementation: str | None = field(default=None, metadata=dict(static=True))

    @classmethod
    def of(
        cls,
        k: Float[Array, "L R N M H"],
        v: Float[Array, "L R N M H"],
        length: Int[Array, " R"],
        implementation: str | None = None,
    ) -> "TextKeys":
        layers, rows, _, block, size = k.shape
        both = jnp.moveaxis(jnp.concatenate([k, v], axis=-1), 1, 0)
        if implementations.first_choice(implementation, MODULES) != "reference":
            both = jnp.pad(both, ((0, 0),) * 3 + ((0, -block % BLOCK), (0, 0)))
            block = BLOCK
        pool = both.reshape(rows, -1, block, 2 * size)
        return cls(pool, length, layers, implementation)


def attend_text(
    q: Float[Array, "R T N H"], text: TextKeys, layer: Int[Array, ""] | int
) -> Float[Array, "R T N H"]:
    """Attention of finished queries over the text of their row, with the keys and values of a
    layer; scores are scaled by H^-1/2, softmax in float32.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    return implementations.run(text.implementation, MODULES, "attend_text", q, text, layer)
