"""The binary spherical VAE of Infinity: images to bits and back (arXiv 2412.04431, 2406.07548).

    encode              images in [-1, 1] -> latent map
    features_to_bits    latent map -> bits of all scales (`varjax.codecs.bsq_quantizer`)
    code_maps           bits -> running sums of codes
    decode              sum of codes -> images in [-1, 1]

Images are channels last. Both networks run in float32, with full-precision products on accelerators
too, unless another `dtype` is asked for. A schedule is always that of the latent maps: for a
transformer with patchify it has twice the sides of the transformer's.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from varjax.codecs.autoencoder import Decoder, Encoder, cast, check_images, full_precision
from varjax.codecs.bsq import quantizer
from varjax.codecs.bsq.config import PRESETS, BSQConfig
from varjax.codecs.bsq.quantizer import codes
from varjax.errors import UserError
from varjax.schedule import Schedule

__all__ = ["BSQVAE", "PRESETS", "BSQConfig", "codes"]


class BSQVAE(nnx.Module):
    """Encoder and decoder; the quantiser has no parameters.

    B images of H x W pixels, P x Q latent positions of C bits, L positions of all scales.
    """

    def __init__(self, config: BSQConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config.encoder, rngs=rngs)
        self.decoder = Decoder(config.decoder, rngs=rngs)

    def encode(self, images: Float[Array, "B H W 3"], dtype=jnp.float32) -> Float[Array, "B P Q C"]:
        """Latent map before quantisation, float32. `images` in [-1, 1].

        Raises:
          UserError: if height or width is not a multiple of `config.downsample`.
        """
        check_images(images, self.config.downsample)
        with full_precision(dtype):
            return cast(self.encoder, dtype)(images.astype(dtype)).astype(jnp.float32)

    def decode(
        self, code_map: Float[Array, "B P Q C"], clip: bool = True, dtype=jnp.float32
    ) -> Float[Array, "B H W 3"]:
        """Images of a sum of codes, float32; clipped to [-1, 1] unless `clip` is False."""
        with full_precision(dtype):
            images = cast(self.decoder, dtype)(code_map.astype(dtype)).astype(jnp.float32)
        return jnp.clip(images, -1, 1) if clip else images

    # --- what generation asks of a codec ---

    def codes(self, bits: UInt8[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Code vectors of drawn bits: a token of several codes has all of theirs."""
        return quantizer.codes(bits, self.config.codebook_dim)

    def accumulate(
        self,
        code_map: Float[Array, "B P Q C"],
        enlarged: Float[Array, "B P Q C"],
        scale: Int[Array, ""],
    ) -> Float[Array, "B P Q C"]:
        """The latent map with the codes of a scale, enlarged to it, added."""
        return code_map + enlarged

    # --- the quantiser ---

    def features_to_bits(
        self, h: Float[Array, "B P Q C"], schedule: Schedule
    ) -> UInt8[Array, "B L C"]:
        """Bits of all scales, coarse to fine, each map row-major."""
        return quantizer.features_to_bits(h, schedule)

    def code_maps(
        self, bits: UInt8[Array, "B L C"], schedule: Schedule
    ) -> list[Float[Array, "B P Q C"]]:
        """Running sums of codes; the last one is decoded."""
        self._check_width(bits)
        return quantizer.code_maps(bits, schedule)

    def teacher_inputs(
        self, bits: UInt8[Array, "B L C"], schedule: Schedule, patch: int = 1
    ) -> Float[Array, "B M {patch}**2*C"]:
        """What the transformer sees at scales 1..K-1; see `bsq_quantizer.teacher_inputs`."""
        self._check_width(bits)
        return quantizer.teacher_inputs(bits, schedule, patch)

    def _check_width(self, bits: UInt8[Array, "B L C"]) -> None:
        if bits.shape[-1] != self.config.codebook_dim:
            raise UserError(
                f"bits of shape {bits.shape} given, the tokenizer has {self.config.codebook_dim}"
                " bits per position"
            )

    # --- both together ---

    def images_to_bits(
        self, images: Float[Array, "B H W 3"], schedule: Schedule
    ) -> UInt8[Array, "B L C"]:
        return self.features_to_bits(self.encode(images), schedule)

    def bits_to_images(
        self, bits: UInt8[Array, "B L C"], schedule: Schedule
    ) -> Float[Array, "B H W 3"]:
        return self.decode(self.code_maps(bits, schedule)[-1])

    def reconstruct(
        self, images: Float[Array, "B H W 3"], schedule: Schedule
    ) -> Float[Array, "B H W 3"]:
        """Images after a round trip through their bits."""
        return self.bits_to_images(self.images_to_bits(images, schedule), schedule)
