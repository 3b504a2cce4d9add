"""Attention of image tokens over a text: signatures, documentation and dispatch.

Keys and values of the text are the same for every scale, so they lie finished in a pool of blocks.
The pool holds all layers. Kernels find the blocks of a layer themselves; nothing is cut out.
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
      second (KV = 2 H). For the reference a head's text is one block. For kernels it is cut into
      blocks of `BLOCK` tokens, with zeros behind its end.
    length: tokens of every row's text, at least 1; tokens behind them are not seen.
    layers: L, static.
    implementation: static, one of `implementations.NAMES`; None takes the best one for this
      platform. There is one kernel, for Hopper and Blackwell; other kernels' names run the
      reference.
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
        # rows first and K beside V, as in the pool of the cache, for which the kernel is made
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
    layer. Scores are scaled by H^-1/2, the softmax is float32.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    return implementations.run(text.implementation, MODULES, "attend_text", q, text, layer)
