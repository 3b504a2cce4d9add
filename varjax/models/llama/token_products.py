"""The layers of a decoder for one token of every row, as four products that do what comes before
and after them: see `pallas_kernels.token_products`.

Letters: R rows, N heads of keys and values, Q query heads, H head size, D width.
"""

import math
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import token_products
from pallas_kernels.token_products import Angles, Norm, QuerySum, Stream
from varjax.models.llama.config import DecoderConfig
from varjax.nn import quantized
from varjax.nn.arrange import Turned
from varjax.nn.layers import Linear

NORMS = ("attention_norm", "feed_forward_norm")


@dataclass(frozen=True)
class TokenProducts:
    """The steps of a layer. implementation: of the products.

    halves: how heads are turned (`Angles.halves`).
    """

    config: DecoderConfig
    dtype: object
    implementation: str
    halves: bool

    @classmethod
    def where_they_fit(cls, transformer, implementation: str | None) -> "TokenProducts | None":
        """The products of a decoder; None where there is no kernel, or where it does not fit the
        model: the layer is then XLA's. A kernel that was named and does not fit is warned about."""
        if not token_products.has_kernel(implementation):
            return None
        config = transformer.config
        found = cls(config, transformer.dtype, implementation, transformer.halves)
        one = jnp.zeros((1, config.head_dim))  # shapes alone matter
        kernel = transformer.blocks.qkv.kernel.get_value()  # several, where layers are apart
        if config.norm_after or config.norm_shards:
            reason = "its layers normalise queries and keys, or what a branch gives"
        elif transformer.model_axis is not None:
            reason = "its weights are divided over devices"
        elif any(map(quantized.is_one, jax.tree.leaves(kernel, is_leaf=quantized.is_one))):
            reason = "its weights are in 8 bits"
        else:
            angles = found.angles((one, one))
            reason = token_products.why_not(implementation, found.dtype, config.hidden_dim, angles)
        if reason is None:
            return found
        if implementation is not None:
            warnings.warn(f"the layer's products are XLA's: {reason}", stacklevel=2)
        return None

    def angles(self, rotation: tuple[Array, Array]) -> Angles:
        """A rotation as products take it."""
        config, size = self.config, self.config.head_dim
        cos, sin = (a.reshape(-1, size) for a in rotation)
        keys = config.num_heads * size
        queries, scale = config.queries_per_head * keys, 1 / math.sqrt(size)
        return Angles(cos, sin, queries, keys, scale, self.halves)

    def norms(self, transformer) -> Float[Array, "norms D"]:
        """Weights of all norms: of each layer's first, of the one behind all layers, of each
        layer's second."""
        first, second = (getattr(transformer.blocks, name)[...] for name in NORMS)
        return jnp.concatenate([first, transformer.norm[...][None], second])

    def start(self, x: Float[Array, "R 1 D"], norms: Float[Array, "norms D"]) -> Stream:
        """The stream before the first layer, whose norm is the next one."""
        norm = Norm(norms, jnp.int32(0))
        how = {"implementation": self.implementation}
        return token_products.start(x[:, 0], norm, self.config.norm_eps, self.dtype, **how)

    def project(
        self, block, angles: Angles, stream: Stream, rows: int, total: QuerySum | None
    ) -> tuple[list[Array], Array | None]:
        """Finished queries [R, Q, H], keys and values [R, N, H], and the sum of queries [R, N, H].
        rows: those that are asked for, the first ones."""
        weights = _matrix(block.qkv)
        how = {"implementation": self.implementation}
        found, total = token_products.project(stream, weights, angles, total, **how)
        heads = [a[:rows].reshape(rows, -1, self.config.head_dim) for a in found]
        return heads, None if total is None else total.reshape(heads[0].shape)

    def rest(
        self, block, stream: Stream, attended: Float[Array, "R Q H"], layer: Int[Array, ""]
    ) -> Stream:
        """The stream after a layer. layer: its number."""
        norms = stream.norm.weights
        between, behind = (Norm(norms, layer + i) for i in (self.config.depth + 1, 1))
        weights = [_matrix(linear) for linear in (block.proj, block.gate_up, block.down)]
        how = {"implementation": self.implementation}
        branch = attended.reshape(len(attended), -1)
        stream = token_products.add(stream, branch, weights[0], between, **how)
        gated = token_products.gate(stream, weights[1], **how)
        return token_products.add(stream, gated, weights[2], behind, **how)


def _matrix(linear: Linear) -> Float[Array, "D_in D_out"]:
    kernel = linear.kernel.get_value()
    # CPUs, which simulate the kernels, have matrices the other way round
    return kernel.array.T if isinstance(kernel, Turned) else kernel
