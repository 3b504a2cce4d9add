"""Shared by configurations whose codec halves the map after every level except the coarsest, and
by those that have one codebook."""

from dataclasses import replace
from operator import attrgetter

from varjax.codecs.autoencoder import LARGEST_BLOCKS, LARGEST_LEVELS, CoderSizes
from varjax.storage import published


class Levels(published.Configuration):
    """Base of such configurations.

    ch: width of the encoder's first convolution.
    ch_mult: widths of the levels in units of `ch`.
    z_channels: width of the map between encoder and codes.
    num_res_blocks: residual blocks per level of the encoder; the decoder has one more.
    """

    ch: int
    ch_mult: tuple[int, ...]
    num_res_blocks: int
    z_channels: int
    in_channels = 3
    group_norm_groups, group_norm_eps = 32, 1e-6
    using_mid_sa = True  # attention between the two middle blocks

    def check_levels(self, **limits: tuple[float, float]) -> None:
        """Raises `UserError` for impossible levels and numbers. limits: see `check_numbers`."""
        self.check_numbers(num_res_blocks=(1, LARGEST_BLOCKS), **limits)
        if not 1 <= len(self.ch_mult) <= LARGEST_LEVELS or min(self.ch_mult) < 1:
            raise self.wrong(
                f"ch_mult is {list(self.ch_mult)[:12]}, {len(self.ch_mult)} levels: it needs 1 to"
                f" {LARGEST_LEVELS} levels, each at least 1"
            )
        self.check_size("ch * ch_mult", self.ch * max(self.ch_mult))
        groups = self.group_norm_groups
        self.check_multiple("ch", self.ch, groups, "the normalisation groups, ")

    @property
    def downsample(self) -> int:
        """Pixels per latent position along each axis."""
        return 2 ** (len(self.ch_mult) - 1)

    @property
    def attended_levels(self) -> tuple[int, ...]:
        """Levels with attention after every block; 0 is the finest one."""
        return (len(self.ch_mult) - 1,)

    @property
    def encoder(self) -> CoderSizes:
        widths = tuple(self.ch * m for m in self.ch_mult)
        return CoderSizes(
            image_channels=self.in_channels,
            latent_channels=self.z_channels,
            base=self.ch,
            widths=widths,
            num_blocks=self.num_res_blocks,
            num_resamplings=len(widths) - 1,
            group_choices=(self.group_norm_groups,),
            epsilon=self.group_norm_eps,
            attended_levels=self.attended_levels,
            attend_middle=self.using_mid_sa,
        )

    @property
    def decoder(self) -> CoderSizes:
        return replace(self.encoder, num_blocks=self.num_res_blocks + 1)


class CodebookConfig(Levels):
    """Base of the configurations of `varjax.codecs.vq.VQ`, with fields or properties of these
    names.

    codebook_size, codebook_embed_dim: number and width of the codes.
    l2_norm: codes and features have unit length.
    has_encoder: whether pictures can be turned into tokens. Generation only decodes.
    """

    codebook_size: int
    codebook_embed_dim: int
    l2_norm: bool
    has_encoder: bool
    code_channels = property(attrgetter("codebook_embed_dim"))  # of the latent map of codes
    vocab_size = property(attrgetter("codebook_size"))  # as transformers call it
