"""The multi-scale VQVAE: images to tokens and back (Tian et al. 2024, arXiv 2404.02905).

    encode          images in [-1, 1] -> latent map
    quantizer       latent map <-> tokens of all scales (`varjax.codecs.vqvae.quantizer`)
    decode          quantised latent map -> images in [-1, 1]

An encoder in bfloat16 changes about one token in eight.
"""

from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.codecs.autoencoder import Decoder, Encoder, ImageCodec, conv
from varjax.codecs.vqvae.config import VQVAEConfig
from varjax.codecs.vqvae.quantizer import Quantizer
from varjax.sampling import smooth_codes

__all__ = ["VQVAE", "VQVAEConfig"]


class VQVAE(ImageCodec):
    """Encoder, quantiser, decoder. B images of H x W pixels, P x Q latent positions, L tokens."""

    def __init__(self, config: VQVAEConfig, *, rngs: nnx.Rngs):
        self.config = config
        channels, size = config.z_channels, config.quant_conv_ks
        self.encoder = Encoder(config.encoder, rngs=rngs)
        self.quant_conv = conv(channels, channels, size, rngs)
        self.quantizer = Quantizer(config, rngs=rngs)
        self.post_quant_conv = conv(channels, channels, size, rngs)
        self.decoder = Decoder(config.decoder, rngs=rngs)

    def encoding(self) -> tuple[nnx.Module, ...]:
        return self.encoder, self.quant_conv

    def decoding(self) -> tuple[nnx.Module, ...]:
        return self.post_quant_conv, self.decoder

    # --- what generation asks of a codec ---

    def codes(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T C"]:
        """Code vectors of drawn tokens, float32."""
        return self.quantizer.lookup(tokens)

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
        """The latent map with the codes of a scale, enlarged to it, added through phi."""
        return code_map + self.quantizer.phi(enlarged, scale)

    # --- both together ---

    def images_to_tokens(self, images: Float[Array, "B H W 3"]) -> Int[Array, "B L"]:
        """Tokens of all scales, coarse to fine, each map row-major."""
        return self.quantizer.features_to_tokens(self.encode(images))

    def tokens_to_images(self, tokens: Int[Array, "B L"]) -> Float[Array, "B H W 3"]:
        return self.decode(self.quantizer.code_maps(tokens)[-1])

    def reconstruct(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B H W 3"]:
        """Images after a round trip through their tokens."""
        return self.tokens_to_images(self.images_to_tokens(images))
