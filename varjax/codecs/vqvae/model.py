"""The multi-scale VQVAE: images to tokens and back (Tian et al. 2024, arXiv 2404.02905).

    encode          images in [-1, 1] -> latent map
    quantizer       latent map <-> tokens of all scales: one map of code indices per scale
    decode          quantised latent map -> images in [-1, 1]

Scale k of the quantiser pools what is still unexplained of the latent map to its own size, picks
the nearest code for every position, enlarges the codes to the full map, passes them through a small
convolution phi and subtracts the result. The sum over scales is the quantised latent map.
Everything runs in float32 with full-precision products, because a single different code early on
changes every later one. An encoder in bfloat16 changes about one token in eight.

Letters: B images of H x W pixels, K scales, L tokens of all scales, P x Q the final map, C
channels, V codes.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.codecs.autoencoder import Decoder, Encoder, ImageCodec, conv
from varjax.codecs.maps import HIGHEST, flatten_maps, nearest, resize_area, resize_bicubic
from varjax.codecs.vqvae.config import VQVAEConfig
from varjax.errors import UserError
from varjax.sampling import smooth_codes

__all__ = ["VQVAE", "Quantizer", "VQVAEConfig"]


def phi_index(num_scales: int, count: int) -> np.ndarray:
    """int32 [K]: which of `count` phi convolutions each scale uses.

    Scale k sits at k / (K - 1) in [0, 1] and takes the phi with the nearest tick. Ticks are evenly
    spaced; the original places them differently for exactly four phis, and so do we.
    """
    margin = 1 / 3 / count if count == 4 else 1 / 2 / count
    ticks = np.linspace(margin, 1 - margin, count)
    where = [k / max(num_scales - 1, 1) for k in range(num_scales)]
    return np.array([np.argmin(np.abs(ticks - position)) for position in where], np.int32)


class Quantizer(nnx.Module):
    """Codes `embedding` [V, C] and stacked phis `phi_kernel` [n, 3, 3, C, C], `phi_bias` [n, C].

    The phi parameters are None when `config.quant_resi` is 0.
    """

    def __init__(self, config: VQVAEConfig, *, rngs: nnx.Rngs):
        self.config = config
        vocabulary, channels, count = config.vocab_size, config.z_channels, config.num_phi
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (vocabulary, channels)))
        # training starts with phi(x) = x: convolutions that return their input
        centre = jnp.zeros((3, 3, 1, 1)).at[1, 1].set(1) * jnp.eye(channels)
        self.phi_kernel = nnx.Param(jnp.tile(centre, (count, 1, 1, 1, 1))) if count else None
        self.phi_bias = nnx.Param(jnp.zeros((count, channels))) if count else None

    # --- the pieces that generation uses ---

    def codebook(self) -> Float[Array, "V C"]:
        """All code vectors, float32."""
        return self.embedding[...].astype(jnp.float32)

    def phi(
        self, h: Float[Array, "B P Q C"], scale: int | Int[Array, ""]
    ) -> Float[Array, "B P Q C"]:
        """(1 - r) h + r conv(h), float32, for `scale` given as a Python int or a traced index."""
        config = self.config
        h = h.astype(jnp.float32)
        if not config.num_phi:
            return h
        index = phi_index(config.schedule.num_scales, config.num_phi)
        index = index[scale] if isinstance(scale, int) else jnp.asarray(index)[scale]
        ratio = abs(config.quant_resi)
        kernel, bias = (p[...][index].astype(jnp.float32) for p in (self.phi_kernel, self.phi_bias))
        layout = ("NHWC", "HWIO", "NHWC")
        convolved = jax.lax.conv_general_dilated(
            h, kernel, (1, 1), "SAME", dimension_numbers=layout, precision=HIGHEST
        )
        return h * (1 - ratio) + (convolved + bias) * ratio

    def nearest(self, z: Float[Array, "... C"]) -> Int[Array, "..."]:
        """Index of the nearest code: smallest distance, or largest cosine with `using_znorm`."""
        return nearest(z, self.codebook(), by_angle=self.config.using_znorm)

    # --- images to tokens ---

    def features_to_tokens(self, f: Float[Array, "B P Q C"]) -> Int[Array, "B L"]:
        """Tokens of all scales, coarse to fine, each map row-major."""
        return jnp.concatenate([tokens for tokens, _, _ in self.steps(f)], axis=1)

    def steps(self, f: Float[Array, "B P Q C"]) -> Iterator[tuple[Array, Array, Array]]:
        """Per scale: tokens [B, t_k], the pooled residual [B, h, w, C] that they stand for, and the
        part [B, P, Q, C] of the map that they explain.

        Gradients reach the codes and phi through the last one, never `f`.
        """
        if f.shape[1:] != (*self.config.schedule.final_map, self.config.z_channels):
            raise UserError(
                f"a latent map of shape {f.shape[1:]} does not fit schedule"
                f" {self.config.schedule} with {self.config.z_channels} channels:"
                f" images of {self.config.image_size} pixels are needed"
            )
        rest = jax.lax.stop_gradient(f).astype(jnp.float32)
        for scale, size in enumerate(self.config.schedule.maps):
            pooled = resize_area(rest, size)
            tokens = self.nearest(pooled)
            part = self.phi(resize_bicubic(self.codebook()[tokens], f.shape[1:3]), scale)
            rest = rest - jax.lax.stop_gradient(part)
            yield tokens.reshape(len(f), -1), pooled, part

    # --- tokens to maps ---

    def code_maps(self, tokens: Int[Array, "B L"]) -> Float[Array, "K B P Q C"]:
        """Running sums: entry k is the latent map after scales 0..k; the last one is decoded."""
        schedule = self.config.schedule
        if tokens.shape[1] != schedule.total_tokens:
            raise UserError(
                f"{tokens.shape[1]} tokens per image given, schedule {schedule} has"
                f" {schedule.total_tokens}"
            )
        total = jnp.zeros((len(tokens), *schedule.final_map, self.config.z_channels), jnp.float32)
        totals = []
        for scale, (height, width) in enumerate(schedule.maps):
            part = tokens[:, schedule.starts[scale] : schedule.ends[scale]]
            codes = self.codebook()[part.reshape(-1, height, width)]
            total = total + self.phi(resize_bicubic(codes, schedule.final_map), scale)
            totals.append(total)
        return jnp.stack(totals)

    def teacher_inputs(self, tokens: Int[Array, "B L"]) -> Float[Array, "B M C"]:
        """Inputs of the transformer at scales 1..K-1, M = L - t_0 positions: the running sum pooled
        to each next size."""
        maps = self.config.schedule.maps
        totals = self.code_maps(tokens)[:-1]
        inputs = [resize_area(t, size) for t, size in zip(totals, maps[1:], strict=True)]
        empty = jnp.zeros((len(tokens), 0, 1, self.config.z_channels), jnp.float32)
        return flatten_maps([empty, *inputs])

    # --- training ---

    def quantize(self, f: Float[Array, "B P Q C"]):
        """Quantised map, tokens [B, L] and loss of a training step.

        The map passes gradients straight through to `f`. The loss is the mean over scales of
        beta |f - sg(sum_k)|^2 + |sg(f) - sum_k|^2, where sum_k is the running sum (mean over
        elements).
        """
        fixed = jax.lax.stop_gradient(f)
        total, loss, tokens = jnp.zeros_like(f), 0.0, []
        for found, _, part in self.steps(f):
            total = total + part
            commitment = jnp.square(f - jax.lax.stop_gradient(total)).mean()
            loss = loss + self.config.beta * commitment + jnp.square(fixed - total).mean()
            tokens.append(found)
        straight = f + jax.lax.stop_gradient(total - f)
        return straight, jnp.concatenate(tokens, axis=1), loss / len(tokens)


class VQVAE(ImageCodec):
    """Encoder, quantiser, decoder."""

    def __init__(self, config: VQVAEConfig, *, rngs: nnx.Rngs):
        self.config = config
        channels, size = config.z_channels, config.quant_conv_ks
        self.encoder = Encoder(config.encoder, rngs=rngs)
        self.quant_conv = conv(channels, channels, size, rngs)
        self.quantizer = Quantizer(config, rngs=rngs)
        self.post_quant_conv = conv(channels, channels, size, rngs)
        self.decoder = Decoder(config.decoder, rngs=rngs)

    # --- what generation asks of a codec ---

    def codes(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T C"]:
        """Code vectors of drawn tokens, float32."""
        return self.quantizer.codebook()[tokens]

    def smooth_codes(
        self, filtered: Float[Array, "B T V"], keys: Array, ratio: Float[Array, ""]
    ) -> Float[Array, "B T C"]:
        """Mixtures of codes instead of drawn ones (`Sampling.more_smooth`)."""
        return smooth_codes(filtered, keys, ratio, self.quantizer.codebook())

    def accumulate(
        self,
        code_map: Float[Array, "B P Q C"],
        enlarged: Float[Array, "B P Q C"],
        scale: Int[Array, ""],
    ) -> Float[Array, "B P Q C"]:
        """Adds phi of the codes of a scale, already enlarged to the latent map, to the map."""
        return code_map + self.quantizer.phi(enlarged, scale)

    # --- what training asks of a codec ---

    def unquantized(self, f: Float[Array, "B P Q C"]) -> Float[Array, "B P Q C"]:
        """The map that is decoded as long as training has no quantiser."""
        return f

    def quantize(self, f: Float[Array, "B P Q C"]):
        """Quantised map, tokens and loss; see `Quantizer.quantize`."""
        return self.quantizer.quantize(f)

    def vectors(self, f: Float[Array, "B P Q C"]) -> Float[Array, "B L C"]:
        """The vectors that codes have to stand for; unused codes are re-seeded with them."""
        return flatten_maps([pooled for _, pooled, _ in self.quantizer.steps(f)])

    def first_vectors(self, f: Float[Array, "B P Q C"]) -> Float[Array, "B L C"]:
        """The vectors that the first codes have to stand for: as if every vector were a code."""
        rest, found = f.astype(jnp.float32), []
        for scale, size in enumerate(self.config.schedule.maps):
            pooled = resize_area(rest, size)
            rest = rest - self.quantizer.phi(resize_bicubic(pooled, f.shape[1:3]), scale)
            found.append(pooled)
        return flatten_maps(found)

    # --- both together ---

    def images_to_tokens(self, images: Float[Array, "B H W 3"]) -> Int[Array, "B L"]:
        """Tokens of all scales, coarse to fine, each map row-major."""
        return self.quantizer.features_to_tokens(self.encode(images))

    def tokens_to_images(self, tokens: Int[Array, "B L"]) -> Float[Array, "B H W 3"]:
        return self.decode(self.quantizer.code_maps(tokens)[-1])
