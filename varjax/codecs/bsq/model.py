"""The binary spherical VAE of Infinity: images to bits and back (arXiv 2412.04431, 2406.07548).

    encode              images in [-1, 1] -> latent map
    quantizer           latent map <-> bits of all scales (`varjax.codecs.bsq.quantizer`)
    decode              sum of codes -> images in [-1, 1]

A schedule is always that of the latent maps: for a transformer with patchify it has twice the sides
of the transformer's.
"""

from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from varjax.codecs.autoencoder import Decoder, Encoder, ImageCodec
from varjax.codecs.bsq import quantizer
from varjax.codecs.bsq.config import PRESETS, BSQConfig
from varjax.errors import UserError
from varjax.schedule import Schedule

__all__ = ["BSQVAE", "PRESETS", "BSQConfig"]


class BSQVAE(ImageCodec):
    """Encoder and decoder; the quantiser has no parameters.

    B images of H x W pixels, P x Q latent positions of C bits, L positions of all scales.
    """

    def __init__(self, config: BSQConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config.encoder, rngs=rngs)
        self.decoder = Decoder(config.decoder, rngs=rngs)

    def encoding(self) -> tuple[nnx.Module, ...]:
        return (self.encoder,)

    def decoding(self) -> tuple[nnx.Module, ...]:
        return (self.decoder,)

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

    # --- both together ---

    def images_to_bits(
        self, images: Float[Array, "B H W 3"], schedule: Schedule
    ) -> UInt8[Array, "B L C"]:
        """Bits of all scales, coarse to fine, each map row-major."""
        return quantizer.features_to_bits(self.encode(images), schedule)

    def bits_to_images(
        self, bits: UInt8[Array, "B L C"], schedule: Schedule
    ) -> Float[Array, "B H W 3"]:
        if bits.shape[-1] != self.config.codebook_dim:
            raise UserError(
                f"bits of shape {bits.shape} given, the tokenizer has {self.config.codebook_dim}"
                " bits per position"
            )
        return self.decode(quantizer.code_maps(bits, schedule)[-1])

    def reconstruct(
        self, images: Float[Array, "B H W 3"], schedule: Schedule
    ) -> Float[Array, "B H W 3"]:
        """Images after a round trip through their bits."""
        return self.bits_to_images(self.images_to_bits(images, schedule), schedule)
