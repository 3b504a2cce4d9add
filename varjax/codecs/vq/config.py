"""Configuration of LlamaGen's image tokenizer, which Janus-Pro shares, readable and writable in
published argument names; and what codecs with one codebook have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from varjax.codecs.levels import Levels
from varjax.nn import published

GROUPS = 32  # of the normalisation
# Published arguments and notes that do not change the function computed.
IGNORED_NAMES = frozenset(
    "note dropout_p codebook_show_usage commit_loss_beta entropy_loss_ratio".split()
)
ALIASES = {  # the constructor's name: ours
    "codebook_l2_norm": "l2_norm",
    "encoder_ch_mult": "ch_mult",
    "decoder_ch_mult": "ch_mult",
}


class CodebookConfig(Levels):
    """Base of the configurations of `varjax.codecs.vq.model.VQ`, with fields or properties of these
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

    def sizes(self) -> dict:
        return {
            "image_channels": 3,
            "group_choices": (GROUPS,),
            "attended_levels": (len(self.ch_mult) - 1,),
            "attend_middle": True,
        }


@dataclass(frozen=True, kw_only=True)
class VQConfig(CodebookConfig):
    """Shape of the image codec; `UserError` when a size is impossible. A picture's map may have any
    height and width, which are given with every call. Fields: see `CodebookConfig`."""

    what = "VQ"

    codebook_size: int = 16384
    codebook_embed_dim: int = 8
    l2_norm: bool = True
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2  # per level of the encoder; the decoder has one more
    z_channels: int = 256  # between the encoder and the codes
    has_encoder: bool = True

    def __post_init__(self):
        self.check_levels(GROUPS)

    @classmethod
    def from_published(cls, values: Mapping) -> "VQConfig":
        """Reads published names: the constructor's, or the shorter ones of this class (`ALIASES`).
        `UserError` for unknown names and for an encoder and decoder of different widths."""
        found = cls.arguments(
            values,
            IGNORED_NAMES,
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
