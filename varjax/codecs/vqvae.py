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

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.codecs.autoencoder import Decoder, Encoder, ImageCodec, conv
from varjax.codecs.codes import flatten_maps, nearest
from varjax.codecs.levels import Levels
from varjax.core.maps import HIGHEST, resize_area, resize_bicubic
from varjax.core.sequence import Schedule

SIDES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)


@dataclass(frozen=True, kw_only=True)
class VQVAEConfig(Levels):
    """Shape of the image codec; `UserError` when a size is impossible. Field names are the
    published ones, `schedule` replaces `patch_nums`.
    """

    what = "VQVAE"
    ignored = ("L", "note", "dropout", "test_mode")

    vocab_size: int = 4096
    z_channels: int = 32
    ch: int = 160
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    in_channels: int = 3
    using_sa: bool = True  # attention after every block of the coarsest level
    using_mid_sa: bool = True  # attention between the two middle blocks
    quant_conv_ks: int = 3
    quant_resi: float = 0.5  # phi(x) = (1 - r) x + r conv(x); 0 switches phi off
    share_quant_resi: int = 4  # 0: one phi per scale, 1: one phi, n: n phis shared by all scales
    default_qresi_counts: int = 0  # with share_quant_resi 0: how many phis, 0 = as many as scales
    using_znorm: bool = False  # nearest code by angle instead of distance
    group_norm_groups: int = 32
    group_norm_eps: float = 1e-6
    beta: float = 0.25  # training: weight of the commitment loss
    schedule: Schedule = Schedule.square(SIDES_256)

    def __post_init__(self):
        self.check_levels(
            share_quant_resi=(0, 1024),
            default_qresi_counts=(0, 1024),
            quant_conv_ks=(1, 63),
            quant_resi=(-math.inf, math.inf),
        )
        if self.quant_conv_ks % 2 == 0:
            raise self.wrong(f"quant_conv_ks is {self.quant_conv_ks}, it must be odd (1, 3, ...)")
        final = self.schedule.final_map
        if any(h > final[0] or w > final[1] for h, w in self.schedule.maps):
            raise self.wrong(f"schedule {self.schedule}: the last map must be the largest")

    @property
    def attended_levels(self) -> tuple[int, ...]:
        return super().attended_levels if self.using_sa else ()

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the images in pixels."""
        return tuple(side * self.downsample for side in self.schedule.final_map)

    @property
    def num_phi(self) -> int:
        """The number of phi convolutions; 0 when `quant_resi` is 0."""
        if abs(self.quant_resi) <= 1e-6:
            return 0
        return self.share_quant_resi or self.default_qresi_counts or self.schedule.num_scales

    @classmethod
    def from_published(cls, values: Mapping) -> "VQVAEConfig":
        """Reads published names; `patch_nums` (or `v_patch_nums`) holds ints or (h, w) pairs.
        `UserError` for unknown names, and if the two differ."""
        found = cls.arguments(values, patch_nums=object, v_patch_nums=object)
        maps = [found.pop(name) for name in ("patch_nums", "v_patch_nums") if name in found]
        if len(maps) == 2 and maps[0] != maps[1]:
            raise cls.wrong("patch_nums and v_patch_nums differ: give one of them")
        if maps:
            found["schedule"] = cls.read_schedule(maps[0])
        return cls(**found)


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

    # --- images to tokens ---

    def steps(self, f: Float[Array, "B P Q C"]) -> Iterator[tuple[Array, Array, Array]]:
        """Per scale: tokens [B, t_k], the pooled residual [B, h, w, C] that they stand for, and the
        part [B, P, Q, C] of the map that they explain.

        Gradients reach the codes and phi through the last one, never `f`.
        """
        rest = jax.lax.stop_gradient(f).astype(jnp.float32)
        for scale, size in enumerate(self.config.schedule.maps):
            pooled = resize_area(rest, size)
            tokens = nearest(pooled, self.codebook(), by_angle=self.config.using_znorm)
            part = self.phi(resize_bicubic(self.codebook()[tokens], f.shape[1:3]), scale)
            rest = rest - jax.lax.stop_gradient(part)
            yield tokens.reshape(len(f), -1), pooled, part

    # --- tokens to maps ---

    def code_maps(self, tokens: Int[Array, "B L"]) -> Float[Array, "K B P Q C"]:
        """Running sums: entry k is the latent map after scales 0..k; the last one is decoded."""
        schedule = self.config.schedule
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
        steps = self.quantizer.steps(self.encode(images))
        return jnp.concatenate([tokens for tokens, _, _ in steps], axis=1)

    def tokens_to_images(self, tokens: Int[Array, "B L"]) -> Float[Array, "B H W 3"]:
        return self.decode(self.quantizer.code_maps(tokens)[-1])
