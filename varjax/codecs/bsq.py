"""The binary spherical VAE of Infinity: images to bits and back (arXiv 2412.04431, 2406.07548).

    encode              images in [-1, 1] -> latent map
    quantiser           latent map <-> bits of all scales: one per channel, position and scale
    decode              sum of codes -> images in [-1, 1]

Scale k of the quantiser pools what is still unexplained of the latent map to its own size and keeps
the signs. The code of these bits, a vector of length 1, is enlarged to the full map and subtracted.
Nothing here is learned. Everything runs in float32 with full-precision products, because a single
different bit early on changes later ones.

The quantiser shrinks by area means, the transformer's inputs are shrunk linearly: two different
resizings of nearly the same maps.

A schedule is always that of the latent maps. For a transformer with patchify its sides are twice as
long as in the transformer's own schedule.

Letters: B images of H x W pixels, L latent positions of all scales, P x Q the final map, C channels
(bits).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, UInt8

from varjax.codecs.autoencoder import (
    LARGEST_BLOCKS,
    LARGEST_LEVELS,
    CoderSizes,
    Decoder,
    Encoder,
    ImageCodec,
)
from varjax.codecs.codes import flatten_maps
from varjax.core.maps import resize_area, resize_bilinear
from varjax.core.sequence import Schedule
from varjax.storage import published

GROUP_CHOICES = (32, 24)  # normalisation groups: the first that divides a level's channels


@dataclass(frozen=True, kw_only=True)
class BSQConfig(published.Configuration):
    """Shape of the image codec, in the published names; `UserError` when a size is impossible. It
    has no schedule: the transformer's maps are given with every call.
    """

    what = "BSQ-VAE"
    ignored = ("note",)
    fixed = {"cnn_attention": "no"}

    codebook_dim: int = 32  # bits per latent position
    base_ch: int = 128
    encoder_ch_mult: tuple[int, ...] = (1, 2, 4, 4, 4)
    decoder_ch_mult: tuple[int, ...] = (1, 2, 4, 4, 4)
    num_res_blocks: int = 2  # per level of the encoder; the decoder has one more
    patch_size: int = 16  # pixels per latent position along each axis
    image_channels: int = 3
    downsample = property(attrgetter("patch_size"))

    def __post_init__(self):
        limits = {"codebook_dim": 256, "num_res_blocks": LARGEST_BLOCKS, "patch_size": 512}
        self.check_numbers(**{name: (1, most) for name, most in limits.items()})
        if self.patch_size & (self.patch_size - 1):
            raise self.wrong(
                f"patch_size is {self.patch_size}, it must be a power of two (8 or 16)"
            )
        least = self.patch_size.bit_length()  # a level more than halvings
        for name in ("encoder_ch_mult", "decoder_ch_mult"):
            multipliers = getattr(self, name)
            if not least <= len(multipliers) <= LARGEST_LEVELS or min(multipliers) < 1:
                raise self.wrong(
                    f"{name} is {list(multipliers)[:12]}: patch_size {self.patch_size} needs"
                    f" {least} to {LARGEST_LEVELS} levels, each at least 1"
                )
            self.check_size(f"base_ch * {name}", self.base_ch * max(multipliers))
            for width in {self.base_ch, *(self.base_ch * m for m in multipliers)}:
                if all(width % groups for groups in GROUP_CHOICES):
                    raise self.wrong(
                        f"a level has {width} channels, which neither 32 nor 24 normalisation"
                        " groups divide: choose base_ch as a multiple of 24 or 32"
                    )

    @property
    def encoder(self) -> CoderSizes:
        return CoderSizes(
            image_channels=self.image_channels,
            latent_channels=self.codebook_dim,
            base=self.base_ch,
            widths=tuple(self.base_ch * m for m in self.encoder_ch_mult),
            num_blocks=self.num_res_blocks,
            num_resamplings=self.patch_size.bit_length() - 1,
            group_choices=GROUP_CHOICES,
        )

    @property
    def decoder(self) -> CoderSizes:
        widths = tuple(self.base_ch * m for m in self.decoder_ch_mult)
        return replace(self.encoder, widths=widths, num_blocks=self.num_res_blocks + 1)

    def to_published(self) -> dict:
        """The published names, with the fixed ones."""
        return super().to_published() | self.fixed


# The released tokenizers, by bits per transformer token: 56 bits are 2x2 positions of 14.
LEVELS_P8 = (1, 2, 4, 4)
PRESETS = {f"bsq-d{bits}": BSQConfig(codebook_dim=bits) for bits in (16, 24, 32, 64)}
PRESETS["bsq-d56"] = BSQConfig(
    codebook_dim=14, encoder_ch_mult=LEVELS_P8, decoder_ch_mult=LEVELS_P8, patch_size=8
)


class BSQVAE(ImageCodec):
    """Encoder and decoder; the quantiser has no parameters."""

    def __init__(self, config: BSQConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config.encoder, rngs=rngs)
        self.decoder = Decoder(config.decoder, rngs=rngs)

    # --- what generation asks of a codec ---

    def codes(self, bits: UInt8[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Code vectors of drawn bits; a token of several codes has all their values."""
        return codes(bits, self.config.codebook_dim)

    def accumulate(
        self,
        code_map: Float[Array, "B P Q C"],
        enlarged: Float[Array, "B P Q C"],
        scale: Int[Array, ""],
    ) -> Float[Array, "B P Q C"]:
        """Adds the codes of a scale, already enlarged to the latent map, to the map."""
        return code_map + enlarged

    # --- both together ---

    def images_to_bits(
        self, images: Float[Array, "B H W 3"], schedule: Schedule
    ) -> UInt8[Array, "B L C"]:
        """Bits of all scales, coarse to fine, each map row-major."""
        rests = residuals(self.encode(images), schedule)
        return flatten_maps([(rest > 0).astype(jnp.uint8) for rest in rests])


# --- the quantiser --------------------------------------------------------------------------------


def codes(
    bits: Integer[Array, "*shape"] | Bool[Array, "*shape"], channels: int
) -> Float[Array, "*shape"]:
    """Code values of bits, (2 b - 1) / sqrt(channels): vectors of `channels` of them have length 1.

    `channels` is the latent width C, also for the 4 C bits of a patchified token.
    """
    return (2 * bits.astype(jnp.float32) - 1) / jnp.sqrt(jnp.float32(channels))


def residuals(h: Float[Array, "B P Q C"], schedule: Schedule) -> Iterator[Float[Array, "B p q C"]]:
    """Per scale, the pooled rest whose signs are the bits.

    The published quantiser normalises the rest first. That is left out: it cannot change a sign.
    """
    rest = h.astype(jnp.float32)
    for size in schedule.maps:
        pooled = resize_area(rest, size)
        yield pooled
        rest = rest - resize_bilinear(codes(pooled > 0, h.shape[-1]), schedule.final_map)
