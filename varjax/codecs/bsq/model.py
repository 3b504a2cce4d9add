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

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, UInt8

from varjax.codecs.autoencoder import Decoder, Encoder, ImageCodec
from varjax.codecs.bsq.config import PRESETS, BSQConfig
from varjax.codecs.maps import flatten_maps, resize_area, resize_bilinear
from varjax.errors import UserError
from varjax.schedule import Schedule

__all__ = ["BSQVAE", "PRESETS", "BSQConfig"]


class BSQVAE(ImageCodec):
    """Encoder and decoder; the quantiser has no parameters."""

    def __init__(self, config: BSQConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config.encoder, rngs=rngs)
        self.decoder = Decoder(config.decoder, rngs=rngs)

    # --- what generation asks of a codec ---

    def codes(self, bits: UInt8[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Code vectors of drawn bits. A token that stands for several codes has all their
        values."""
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
    if h.shape[1:3] != schedule.final_map:
        raise UserError(
            f"a latent map of {h.shape[1]} x {h.shape[2]} positions does not fit schedule"
            f" {schedule}: its last map has {schedule.final_map[0]} x {schedule.final_map[1]}"
        )
    rest = h.astype(jnp.float32)
    for size in schedule.maps:
        pooled = resize_area(rest, size)
        yield pooled
        rest = rest - resize_bilinear(codes(pooled > 0, h.shape[-1]), schedule.final_map)
