"""LlamaGen's image tokenizer: one map of codes per picture (Sun et al. 2024, arXiv 2406.06525,
section 2.1; the network is VQGAN's, Esser et al. 2021). Janus-Pro has the same; Lumina-mGPT decodes
with Chameleon's (`ChameleonVQConfig`).

    encode      images in [-1, 1] -> latent map, before quantisation
    nearest     latent map -> tokens
    code_map    tokens -> the map of their codes
    decode      map of codes -> images in [-1, 1]

VQ-16 has 16 pixels per token and axis, VQ-8 half as many. All of it runs in float32 with
full-precision products.

Letters: B images of H x W pixels, T tokens, h x w their map, C channels of a code, V codes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.projection import l2_normalize
from varjax.codecs.autoencoder import Decoder, Encoder, ImageCodec, dense
from varjax.codecs.codes import nearest
from varjax.codecs.levels import CodebookConfig
from varjax.storage import published

COMMITMENT = 0.25  # weight of this loss in training, as published
ALIASES = {  # the constructor's name: ours
    "codebook_l2_norm": "l2_norm",
    "encoder_ch_mult": "ch_mult",
    "decoder_ch_mult": "ch_mult",
}


@dataclass(frozen=True, kw_only=True)
class VQConfig(CodebookConfig):
    """Shape of the image codec; `UserError` when a size is impossible. A picture's map may have any
    height and width, which are given with every call. Fields: see `CodebookConfig`."""

    what = "VQ"
    ignored = "note dropout_p codebook_show_usage commit_loss_beta entropy_loss_ratio".split()

    codebook_size: int = 16384
    codebook_embed_dim: int = 8
    l2_norm: bool = True
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2  # per level of the encoder; the decoder has one more
    z_channels: int = 256  # between the encoder and the codes
    has_encoder: bool = True

    def __post_init__(self):
        self.check_levels()

    @classmethod
    def from_published(cls, values: Mapping) -> "VQConfig":
        """Reads published names: the constructor's, or the shorter ones of this class (`ALIASES`).
        `UserError` for unknown names and for an encoder and decoder of different widths."""
        found = cls.arguments(
            values,
            codebook_l2_norm=bool,
            encoder_ch_mult=published.INTEGERS,
            decoder_ch_mult=published.INTEGERS,
        )
        for alias, name in ALIASES.items():
            if alias in found and found.setdefault(name, found[alias]) != found.pop(alias):
                raise cls.wrong(
                    f"{alias} is {values[alias]!r:.60}, another name says {found[name]}"
                )
        return cls(**found)


class VQ(ImageCodec):
    """Encoder, codes `embedding` [V, C], decoder. Without `config.has_encoder` it only decodes, and
    `encode` raises `UserError`."""

    def __init__(self, config: CodebookConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape = config.codebook_size, config.codebook_embed_dim
        has = config.has_encoder
        self.encoder = Encoder(config.encoder, rngs=rngs) if has else None
        self.quant_conv = dense(config.z_channels, shape[1], rngs) if has else None
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape))
        self.post_quant_conv = dense(shape[1], config.z_channels, rngs)
        self.decoder = Decoder(config.decoder, rngs=rngs)

    def codebook(self) -> Float[Array, "V C"]:
        """All code vectors as they are decoded, float32."""
        codes = self.embedding[...].astype(jnp.float32)
        return l2_normalize(codes) if self.config.l2_norm else codes

    def nearest(self, z: Float[Array, "... C"]) -> Int[Array, "..."]:
        """Index of the nearest code, with `l2_norm` between unit vectors."""
        return nearest(z, self.embedding[...], by_angle=self.config.l2_norm)

    # --- what generation asks of a codec ---

    def codes(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T C"]:
        """Code vectors of drawn tokens, float32."""
        return self.codebook()[tokens]

    def code_map(self, tokens: Int[Array, "B T"], grid: tuple[int, int]) -> Float[Array, "B h w C"]:
        """The latent map that all tokens of a picture give; they lie row by row. grid: (h, w)."""
        return self.codes(tokens).reshape(len(tokens), *grid, -1)

    # --- what training asks of a codec ---

    def unquantized(self, f: Float[Array, "B h w C"]) -> Float[Array, "B h w C"]:
        """The map that is decoded as long as training has no quantiser."""
        return l2_normalize(f) if self.config.l2_norm else f

    def quantize(self, f: Float[Array, "B h w C"]):
        """Quantised map, tokens [B, T] and loss of a training step: COMMITMENT |f - sg(codes)|^2 +
        |sg(f) - codes|^2, mean over elements, of unit vectors with `l2_norm`.

        The map passes gradients straight through to `f`.
        """
        f, tokens = self.unquantized(f), self.nearest(f)
        codes, fixed = self.codebook()[tokens], jax.lax.stop_gradient(f)
        still = jax.lax.stop_gradient(codes)
        loss = COMMITMENT * jnp.square(f - still).mean() + jnp.square(fixed - codes).mean()
        return f + (still - fixed), tokens.reshape(len(f), -1), loss

    def vectors(self, f: Float[Array, "B h w C"]) -> Float[Array, "B T C"]:
        """The vectors that codes have to stand for."""
        return self.unquantized(f).reshape(len(f), -1, f.shape[-1])

    first_vectors = vectors  # whether or not there are codes

    # --- both together ---

    def images_to_tokens(self, images: Float[Array, "B H W 3"]) -> Int[Array, "B T"]:
        """Tokens of pictures, row by row."""
        return self.nearest(self.encode(images)).reshape(len(images), -1)

    def tokens_to_images(
        self, tokens: Int[Array, "B T"], grid: tuple[int, int] | None = None
    ) -> Float[Array, "B H W 3"]:
        """Pictures of all their tokens. grid: height and width of the map; None: it is a square."""
        grid = grid or (math.isqrt(tokens.shape[1]),) * 2
        return self.decode(self.code_map(tokens, grid))


@dataclass(frozen=True, kw_only=True)
class ChameleonVQConfig(CodebookConfig):
    """Shape of Chameleon's image tokenizer (Chameleon Team 2024, arXiv 2405.09818, section 2.1;
    Gafni et al. 2022, arXiv 2203.13131), in VQGAN's names. Codes have any length, and levels have
    attention only where the configuration says so (the released one: nowhere).

    n_embed, embed_dim: number and width of the codes.
    resolution, attn_resolutions: pixels of the training pictures' side, and those sides of a
      level's map, in pictures of that size, that have attention after every block.
    has_encoder: see `CodebookConfig`. The released encoder is not needed for generation.
    """

    what = "ChameleonVQ"
    ignored = ("dropout", "lossconfig", "ckpt_path", "note")
    fixed = {"double_z": False, "in_channels": 3, "out_ch": 3}

    n_embed: int = 8192
    embed_dim: int = 256
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2  # per level of the encoder; the decoder has one more
    z_channels: int = 256  # between the encoder and the codes
    resolution: int = 512
    attn_resolutions: tuple[int, ...] = ()
    has_encoder: bool = False
    l2_norm = False
    codebook_size = property(attrgetter("n_embed"))
    codebook_embed_dim = property(attrgetter("embed_dim"))

    def __post_init__(self):
        self.check_levels()
        if unknown := [n for n in self.attn_resolutions if n not in self._sides]:
            raise self.wrong(
                f"attn_resolutions has {unknown[:12]}, but levels of pictures of"
                f" {self.resolution} pixels have {self._sides}"
            )

    @classmethod
    def from_published(cls, values: Mapping) -> "ChameleonVQConfig":
        """Reads the layout of the published yaml file: `ddconfig`, `embed_dim`, `n_embed`; other
        entries of its `params` are ignored. The names of `ddconfig` may also stand beside it.
        `UserError` for unknown names, and for values that no released model has."""
        outer = {name: value for name, value in values.items() if name != "ddconfig"}
        return cls(**cls.arguments({**outer, **cls.inside(values, "ddconfig")}))

    def to_published(self) -> dict:
        """The layout of the published file: the inverse of `from_published`."""
        own = ("n_embed", "embed_dim", "has_encoder")
        values = super().to_published()
        inner = {k: v for k, v in values.items() if k not in own}
        return {"ddconfig": inner, **{name: values[name] for name in own}}

    @property
    def _sides(self) -> list[int]:
        """Sides of the levels' maps in training pictures, finest first."""
        return [self.resolution // 2**i for i in range(len(self.ch_mult))]

    @property
    def attended_levels(self) -> tuple[int, ...]:
        return tuple(i for i, side in enumerate(self._sides) if side in self.attn_resolutions)
