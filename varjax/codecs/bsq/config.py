"""Configuration of the binary spherical VAE, readable and writable in published argument names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from varjax.codecs.autoencoder import LARGEST_BLOCKS, LARGEST_LEVELS, CoderSizes
from varjax.nn import published

GROUP_CHOICES = (32, 24)  # normalisation groups: the first that divides a level's channels
IGNORED_NAMES = ("note",)  # do not change the function computed


@dataclass(frozen=True, kw_only=True)
class BSQConfig(published.Configuration):
    """Shape of the image codec, in the published names; `UserError` when a size is impossible. It
    has no schedule: the transformer's maps are given with every call.
    """

    what = "BSQ-VAE"

    codebook_dim: int = 32  # bits per latent position
    base_ch: int = 128
    encoder_ch_mult: tuple[int, ...] = (1, 2, 4, 4, 4)
    decoder_ch_mult: tuple[int, ...] = (1, 2, 4, 4, 4)
    num_res_blocks: int = 2  # per level of the encoder; the decoder has one more
    patch_size: int = 16  # pixels per latent position along each axis
    image_channels: int = 3
    cnn_attention: str = "no"
    downsample = property(attrgetter("patch_size"))

    def __post_init__(self):
        limits = {"codebook_dim": 256, "num_res_blocks": LARGEST_BLOCKS, "patch_size": 512}
        self.check_numbers(**{name: (1, most) for name, most in limits.items()})
        if self.patch_size & (self.patch_size - 1):
            raise self.wrong(
                f"patch_size is {self.patch_size}, it must be a power of two (8 or 16)"
            )
        if self.cnn_attention != "no":
            raise self.wrong(
                f'cnn_attention is {self.cnn_attention!r:.40}; only "no" is supported, as in the'
                " released tokenizers"
            )
        least = self.num_resamplings + 1
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
    def num_resamplings(self) -> int:
        """Halvings of the encoder, doublings of the decoder."""
        return self.patch_size.bit_length() - 1

    @property
    def encoder(self) -> CoderSizes:
        return CoderSizes(
            image_channels=self.image_channels,
            latent_channels=self.codebook_dim,
            base=self.base_ch,
            widths=tuple(self.base_ch * m for m in self.encoder_ch_mult),
            num_blocks=self.num_res_blocks,
            num_resamplings=self.num_resamplings,
            group_choices=GROUP_CHOICES,
        )

    @property
    def decoder(self) -> CoderSizes:
        widths = tuple(self.base_ch * m for m in self.decoder_ch_mult)
        return replace(self.encoder, widths=widths, num_blocks=self.num_res_blocks + 1)

    @classmethod
    def from_published(cls, values: Mapping) -> "BSQConfig":
        """Reads published names. `UserError` for an unknown name lists the known ones."""
        return cls(**cls.arguments(values, IGNORED_NAMES, cnn_attention=object))


# The released tokenizers, by bits per transformer token: 56 bits are 2x2 positions of 14.
LEVELS_P8 = (1, 2, 4, 4)
PRESETS = {f"bsq-d{bits}": BSQConfig(codebook_dim=bits) for bits in (16, 24, 32, 64)}
PRESETS["bsq-d56"] = BSQConfig(
    codebook_dim=14, encoder_ch_mult=LEVELS_P8, decoder_ch_mult=LEVELS_P8, patch_size=8
)
