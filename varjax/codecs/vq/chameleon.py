"""Chameleon's image tokenizer, which Lumina-mGPT decodes with (Chameleon Team 2024, arXiv
2405.09818, section 2.1; Gafni et al. 2022, arXiv 2203.13131): VQGAN's network with 8192 codes of
256 channels, 16 pixels per token.

It differs from LlamaGen's tokenizer in three things: codes have any length, levels have attention
only where the configuration says so (the released one: nowhere), and names are VQGAN's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from varjax.codecs.levels import CodebookConfig
from varjax.codecs.vq.model import VQ

# Of the published `ddconfig`: they do not change the function computed.
IGNORED_NAMES = frozenset(("dropout",))
# {name: the only value of it that is supported}
FIXED = {"double_z": False, "in_channels": 3, "out_ch": 3}


@dataclass(frozen=True, kw_only=True)
class ChameleonVQConfig(CodebookConfig):
    """Shape of the codec; field names are the published ones.

    n_embed, embed_dim: number and width of the codes.
    resolution, attn_resolutions: pixels of the training pictures' side, and those sides of a
      level's map, in pictures of that size, that have attention after every block.
    has_encoder: see `CodebookConfig`. The released encoder is not needed for generation.
    """

    what = "ChameleonVQ"

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
        values = dict(values)
        inner = values.pop("ddconfig", {})
        if not isinstance(inner, Mapping):
            raise cls.wrong(f"ddconfig is {inner!r:.60}, it must hold names and values")
        types = dict.fromkeys(FIXED, object)
        ignored = IGNORED_NAMES | {"lossconfig", "ckpt_path", "note"}
        found = cls.arguments({**values, **inner}, ignored, **types)
        for name, value in FIXED.items():
            if (given := found.pop(name, value)) != value:
                raise cls.wrong(f"{name} is {given!r:.60}; only {value} is supported")
        return cls(**found)

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


class ChameleonVQ(VQ):
    """Codes `embedding` [V, C], decoder and, with `config.has_encoder`, encoder."""
