"""Queries, keys and values of a scale as one matrix product leaves them, with what has still to be
done to them: bias, L2 norm, learned multiplier, rotation.

Kernels read the product where it lies and finish it as they read, so that memory never holds a
transpose or a normalised copy of the queries. The methods here define what is correct. The norms
that come before a product are here, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Q, K, V = range(3)  # places in the third axis of the product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projection:
    """Unfinished queries, keys and values.

    qkv: the product, heads side by side; its third axis holds Q, K, V, or queries alone where they
      see stored keys only.
    q_bias, v_bias: added first; keys have no bias.
    rotation: cosines and sines of every token, float32; numbers 2 j and 2 j + 1 of queries and keys
      are turned by the angle of their pair.
    multiplier: float32. If given, queries and keys are scaled to unit length, and queries are
      multiplied by it.
    scale: static, the factor of queries where there is no multiplier.
    row_scale, channel_scale: float32, of a product in 8 bits, given together; all numbers are
      multiplied by both before anything else. Rows of `row_scale` may go on behind the last token.
    layer: if given, biases [L, N, H] and multiplier [L, N] hold all layers, and `layer` is the one
      that counts. Kernels read them where they lie.
    """

    qkv: Float[Array, "R T parts N H"]
    q_bias: Float[Array, "*layers N H"] | None = None
    v_bias: Float[Array, "*layers N H"] | None = None
    rotation: tuple[Float[Array, "T H"], Float[Array, "T H"]] | None = None
    multiplier: Float[Array, "*layers N"] | None = None
    scale: float = field(default=1.0, metadata=dict(static=True))
    layer: Int[Array, ""] | None = None
    row_scale: Float[Array, "R _ 1"] | None = None
    channel_scale: Float[Array, "parts N H"] | None = None

    @classmethod
    def of(cls, q, k, v) -> "Projection":
        """A projection of finished queries, keys and values [R, N, T, H]."""
        return cls(jnp.stack([a.transpose(0, 2, 1, 3) for a in (q, k, v)], axis=2))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(rows, heads, tokens, head size)."""
        rows, tokens, _, heads, size = self.qkv.shape
        return rows, heads, tokens, size

    @property
    def dtype(self):
        return self.qkv.dtype

    def sliced(self) -> "Projection":
        """The same projection with the biases and the multiplier of its layer alone."""
        if self.layer is None:
            return self
        vectors = self.q_bias, self.v_bias, self.multiplier
        q_bias, v_bias, multiplier = jax.tree.map(lambda a: a[self.layer], vectors)
        return replace(self, layer=None, q_bias=q_bias, v_bias=v_bias, multiplier=multiplier)

    def multiplied(self) -> "Projection":
        """The same projection without scales: the product is multiplied by them, and rounded."""
        if self.row_scale is None:
            return self
        rows = self.row_scale[:, : self.qkv.shape[1], :, None, None]
        qkv = self.qkv.astype(jnp.float32) * rows * self.channel_scale
        return replace(self, qkv=qkv.astype(self.dtype), row_scale=None, channel_scale=None)

    def queries(self) -> Float[Array, "R N T H"]:
        """Finished queries, which carry the attention scale. They are computed in float32 and
        rounded once."""
        here = self.sliced()
        # rounding between the steps would make kernels differ, which do all of them in registers
        q = here._plain(Q, None).astype(jnp.float32)
        if here.q_bias is not None:
            q += here.q_bias[:, None].astype(jnp.float32)
        norm = None if here.multiplier is None else length(q)
        multiplier = None if norm is None else here.multiplier[:, None, None]
        if self.rotation is None:
            q = q * self.scale if norm is None else q / norm * multiplier
        else:  # a rotation keeps lengths, so one factor after it does for norm and multiplier
            q = rotate(q, *self.rotation) * (self.scale if norm is None else multiplier / norm)
        return q.astype(self.dtype)

    def keys(self) -> Float[Array, "R N T H"]:
        """Finished keys, as they are stored."""
        k = self._plain(K, None)
        if self.rotation is not None:  # norm and rotation in float32, rounded once
            factor = 1 if self.multiplier is None else length(k)
            return (rotate(k, *self.rotation) / factor).astype(self.dtype)
        k = k if self.multiplier is None else l2_normalize(k)
        return k.astype(self.dtype)

    def values(self) -> Float[Array, "R N T H"]:
        """Finished values, as they are stored."""
        # the bias is added in the type of the projection, as a layer of the model would add it
        return self._plain(V, self.sliced().v_bias).astype(self.dtype)

    def raw_queries(self) -> Float[Array, "R N T H"]:
        """Queries without bias, norm, multiplier, scale or rotation."""
        return self._plain(Q, None).astype(self.dtype)

    def _plain(self, part: int, bias) -> Float[Array, "R N T H"]:
        """With scales and bias. Scales make it float32, to be rounded once."""
        found = self.qkv[:, :, part].transpose(0, 2, 1, 3)
        if self.row_scale is not None:
            rows = self.row_scale[:, None, : found.shape[2]]
            found = found.astype(jnp.float32) * rows * self.channel_scale[part][:, None]
        return found if bias is None else found + bias[:, None]


def finished(projection: Projection, parts: Sequence[int]) -> Float[Array, "R T C"]:
    """Finished parts (`Q`, `K`, `V`), side by side: C = parts * N * H."""
    ways = {Q: projection.queries, K: projection.keys, V: projection.values}
    each = [ways[part]().transpose(0, 2, 1, 3) for part in parts]
    rows, tokens = each[0].shape[:2]
    return jnp.concatenate([a.reshape(rows, tokens, -1) for a in each], axis=-1)


def layer_norm(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """Layer normalisation without learned scale or shift. Statistics are float32; the result has
    the type of `x`."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


def modulate(x, scale, shift):
    """AdaLN: x * (1 + scale) + shift with per-row vectors [R, D] over x [R, T, D]."""
    return x * (1 + scale[:, None]) + shift[:, None]


def l2_normalize(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Scale the last axis to unit length in float32. Lengths below 1e-12 count as 1e-12, as in
    torch."""
    return (x.astype(jnp.float32) / length(x)).astype(x.dtype)


def length(x: Float[Array, "... H"]) -> Float[Array, "... 1"]:
    """Euclidean length of the last axis, float32, at least 1e-12."""
    norm = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1, keepdims=True))
    return jnp.maximum(norm, 1e-12)


def rotate(
    x: Float[Array, "R N T H"], cos: Float[Array, "T H"], sin: Float[Array, "T H"]
) -> Float[Array, "R N T H"]:
    """Rotary embedding, float32: numbers 2 j and 2 j + 1 are turned by the angle of their pair."""
    turned = jax.lax.platform_dependent(x, tpu=quarter_turn_by_product, default=quarter_turn)
    return x.astype(jnp.float32) * cos + turned.astype(jnp.float32) * sin


def quarter_turn(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Turn every pair (a, b) of neighbours into (-b, a)."""
    even = jnp.arange(x.shape[-1]) % 2 == 0
    return jnp.where(even, -jnp.roll(x, -1, axis=-1), jnp.roll(x, 1, axis=-1))


def quarter_turn_by_product(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """`quarter_turn` as a product with a matrix of zeros and ones, which is exact. It is for TPUs,
    where a roll writes the number that it cuts off to memory, one row for each."""
    matrix = jnp.asarray(quarter_turn_matrix(x.shape[-1]), x.dtype)
    # the default precision would round float32 factors to bfloat16
    return jnp.einsum("...h,hk->...k", x, matrix, precision=jax.lax.Precision.HIGHEST)


def quarter_turn_matrix(size: int) -> np.ndarray:
    """float32 [size, size]: x @ matrix is `quarter_turn(x)`."""
    matrix = np.zeros((size, size), np.float32)
    matrix[np.arange(1, size, 2), np.arange(0, size, 2)] = -1
    matrix[np.arange(0, size, 2), np.arange(1, size, 2)] = 1
    return matrix
