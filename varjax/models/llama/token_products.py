"""The layers of a decoder for one token of every row, as four products that do what comes before
and after them: see `pallas_kernels.token_products`.

Letters: R rows, N heads of keys and values, Q query heads, H head size, D width.
"""

import math
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels import token_products
from pallas_kernels.token_attention import QuerySum
from pallas_kernels.token_products import Angles, RMSNorm, TokenStream
from varjax.core.layers import Linear
from varjax.core.next_token import TokenLayers
from varjax.fast import quantized
from varjax.fast.arrange import Turned

NORMS = ("attention_norm", "feed_forward_norm")
Weights = tuple[nnx.Module, Int[Array, ""]]  # of a layer, and its number


class TokenProducts(TokenLayers):
    """The products of a `varjax.models.llama.decoder.LlamaDecoder`. implementation: of them."""

    def __init__(self, transformer: nnx.Module, implementation: str | None):
        super().__init__(transformer)
        self.how = {"implementation": implementation}
        first, second = (getattr(transformer.blocks, name)[...] for name in NORMS)
        # of each layer's first norm, of the one behind all layers, of each layer's second
        self.norms = jnp.concatenate([first, transformer.norm[...][None], second])

    def start(
        self, x: Float[Array, "R 1 D"], rotation: tuple[Array, Array]
    ) -> tuple[TokenStream, Angles]:
        norm, eps = RMSNorm(self.norms, jnp.int32(0)), self.transformer.config.norm_eps
        stream = token_products.start(x[:, 0], norm, eps, self.transformer.dtype, **self.how)
        return stream, angles_of(self.transformer, rotation)

    def weights(self, index: int) -> Weights:
        return super().weights(index), jnp.int32(index)

    def project(
        self,
        weights: Weights,
        rotation: Angles,
        x: TokenStream,
        rows: int,
        total: Callable[[], QuerySum | None],
    ) -> tuple[tuple[Array, Array, Array], Array | None]:
        matrix, size = _matrix(weights[0].qkv), self.transformer.config.head_dim
        found, total = token_products.project(x, matrix, rotation, total(), **self.how)
        # a kernel gives whole tiles of rows
        heads = tuple(a[:rows].reshape(rows, -1, size) for a in found)
        return heads, None if total is None else total.reshape(heads[0].shape)

    def rest(
        self, weights: Weights, x: TokenStream, attended: Float[Array, "R Q H"]
    ) -> TokenStream:
        (block, layer), depth = weights, self.transformer.config.depth
        between, behind = (RMSNorm(x.norm.weights, layer + i) for i in (depth + 1, 1))
        matrices = [_matrix(linear) for linear in (block.proj, block.gate_up, block.down)]
        branch = attended.reshape(len(attended), -1)
        x = token_products.add(x, branch, matrices[0], between, **self.how)
        gated = token_products.gate(x, matrices[1], **self.how)
        return token_products.add(x, gated, matrices[2], behind, **self.how)

    def settled(self, x: TokenStream, rows: int) -> Float[Array, "R 1 D"]:
        return x.x[:rows, None]


def where_they_fit(transformer: nnx.Module, implementation: str | None) -> TokenLayers:
    """The products of a decoder; XLA's layers where there is no kernel, or where it does not fit
    the model. A kernel that was named and does not fit is warned about."""
    if not token_products.has_kernel(implementation):
        return TokenLayers(transformer)
    config = transformer.config
    one = jnp.zeros((1, config.head_dim))  # shapes alone matter
    kernel = transformer.blocks.qkv.kernel.get_value()  # several, where layers are apart
    if config.norm_after or config.norm_shards:
        reason = "its layers normalise queries and keys, or what a branch gives"
    elif transformer.model_axis is not None:
        reason = "its weights are divided over devices"
    elif any(map(quantized.is_one, jax.tree.leaves(kernel, is_leaf=quantized.is_one))):
        reason = "its weights are in 8 bits"
    else:
        dtype, angles = transformer.dtype, angles_of(transformer, (one, one))
        reason = token_products.why_not(implementation, dtype, config.hidden_dim, angles)
    if reason is None:
        return TokenProducts(transformer, implementation)
    if implementation is not None:
        warnings.warn(f"the layer's products are XLA's: {reason}", stacklevel=2)
    return TokenLayers(transformer)


def angles_of(transformer: nnx.Module, rotation: tuple[Array, Array]) -> Angles:
    """A rotation as products take it."""
    config, size = transformer.config, transformer.config.head_dim
    cos, sin = (a.reshape(-1, size) for a in rotation)
    keys = config.num_heads * size
    queries, scale = config.queries_per_head * keys, 1 / math.sqrt(size)
    return Angles(cos, sin, queries, keys, scale, transformer.halves)


def _matrix(linear: Linear) -> Float[Array, "D_in D_out"]:
    kernel = linear.kernel.get_value()
    # CPUs, which simulate the kernels, have matrices the other way round
    return kernel.array.T if isinstance(kernel, Turned) else kernel
