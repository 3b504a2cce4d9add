"""The multi-scale VQVAE: images to tokens and back (Tian et al. 2024, arXiv 2404.02905).

    encode          images in [-1, 1] -> latent map
    quantizer       latent map <-> tokens of all scales (`varjax.codecs.quantizer`)
    decode          quantised latent map -> images in [-1, 1]

Images are channels last. Both networks run in float32, with full-precision products on accelerators
too, unless another `dtype` is asked for: an encoder in bfloat16 changes about one token in eight.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.codecs.autoencoder import (
    Decoder,
    Encoder,
    Layout,
    cast,
    check_images,
    conv,
    full_precision,
)
from varjax.codecs.vqvae.config import VQVAEConfig
from varjax.codecs.vqvae.quantizer import Quantizer
from varjax.sampling import smooth_codes

__all__ = ["VQVAE", "VQVAEConfig", "cast"]


class VQVAE(nnx.Module):
    """Encoder, quantiser, decoder. B images of H x W pixels, P x Q latent positions, L tokens."""

    def __init__(self, config: VQVAEConfig, *, rngs: nnx.Rngs):
        self.config = config
        channels, size = config.z_channels, config.quant_conv_ks
        self.encoder = Encoder(_layout(config, config.num_res_blocks), rngs=rngs)
        self.quant_conv = conv(channels, channels, size, rngs)
        self.quantizer = Quantizer(config, rngs=rngs)
        self.post_quant_conv = conv(channels, channels, size, rngs)
        self.decoder = Decoder(_layout(config, config.num_res_blocks + 1), rngs=rngs)

    def encode(self, images: Float[Array, "B H W 3"], dtype=jnp.float32) -> Float[Array, "B P Q C"]:
        """Latent map before quantisation, float32. `images` in [-1, 1].

        Raises:
          UserError: if height or width is not a multiple of `config.downsample`.
        """
        check_images(images, self.config.downsample)
        encoder, quant_conv = cast((self.encoder, self.quant_conv), dtype)
        with full_precision(dtype):
            return quant_conv(encoder(images.astype(dtype))).astype(jnp.float32)

    def decode(
        self, f_hat: Float[Array, "B P Q C"], clip: bool = True, dtype=jnp.float32
    ) -> Float[Array, "B H W 3"]:
        """Images of a quantised latent map, float32; clipped to [-1, 1] unless `clip` is False."""
        post_quant_conv, decoder = cast((self.post_quant_conv, self.decoder), dtype)
        with full_precision(dtype):
            images = decoder(post_quant_conv(f_hat.astype(dtype))).astype(jnp.float32)
        return jnp.clip(images, -1, 1) if clip else images

    # --- what generation asks of a codec ---

    def codes(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T C"]:
        """Code vectors of drawn tokens, float32."""
        return self.quantizer.lookup(tokens)

    def smooth_codes(
        self, filtered: Float[Array, "B T V"], keys: Array, ratio: Float[Array, ""]
    ) -> Float[Array, "B T C"]:
        """Mixtures of codes instead of drawn ones (`Sampling.more_smooth`)."""
        codebook = self.quantizer.embedding[...].astype(jnp.float32)
        return smooth_codes(filtered, keys, ratio, codebook)

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


def _layout(config: VQVAEConfig, num_blocks: int) -> Layout:
    """Sizes of the encoder or, with one more block per level, the decoder."""
    return Layout(
        image_channels=config.in_channels,
        latent_channels=config.z_channels,
        base=config.ch,
        widths=tuple(config.ch * m for m in config.ch_mult),
        num_blocks=num_blocks,
        num_resamplings=len(config.ch_mult) - 1,
        group_choices=(config.group_norm_groups,),
        epsilon=config.group_norm_eps,
        attend_coarsest=config.using_sa,
        attend_middle=config.using_mid_sa,
    )
