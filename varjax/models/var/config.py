"""Configuration of the VAR transformer, in the published constructor's names, and its published
sizes."""

from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from varjax.errors import UserError, show
from varjax.nn import published
from varjax.sampling import Sampling
from varjax.schedule import Schedule

SIDES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
SIDES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)
# Published constructor arguments and notes that do not change the function computed.
IGNORED_NAMES = frozenset(
    "vae vae_local vae_kwargs L note drop_rate attn_drop_rate drop_path_rate flash_if_available"
    " fused_if_available".split()
)


@dataclass(frozen=True, kw_only=True)
class VARConfig(published.TransformerConfig):
    """Shape of a VAR transformer; field names follow the published constructor, `schedule` replaces
    `patch_nums`."""

    what = "VAR"
    condition: ClassVar[str] = "labels"  # what images are made of

    num_classes: int = 1000
    depth: int = 16
    embed_dim: int = 1024
    num_heads: int = 16
    mlp_ratio: float = 4.0
    norm_eps: float = 1e-6
    shared_aln: bool = False
    attn_l2_norm: bool = True
    schedule: Schedule = Schedule.square(SIDES_256)
    vocab_size: int = 4096
    z_channels: int = 32
    cond_drop_rate: float = 0.1  # training: how often the label is replaced by the null class
    logits_per_token = property(attrgetter("vocab_size"))
    null_label = property(attrgetter("num_classes"))  # the class embedding that is "no class"

    def __post_init__(self):
        self.check_numbers("mlp_ratio", depth=(1, published.LARGEST_DEPTH))
        self.check_size("embed_dim * mlp_ratio", self.hidden_dim)
        self.check_multiple("embed_dim", self.embed_dim, self.num_heads, "num_heads ")
        if not 0 <= self.cond_drop_rate < 1:
            raise self.wrong(f"cond_drop_rate {self.cond_drop_rate} is outside [0, 1)")

    @classmethod
    def preset(cls, depth: int, sides=SIDES_256, shared_aln: bool = False) -> "VARConfig":
        """Published sizes: width 64 * depth and as many heads as layers."""
        return cls(
            depth=depth,
            embed_dim=64 * depth,
            num_heads=depth,
            schedule=Schedule.square(sides),
            shared_aln=shared_aln,
        )

    @classmethod
    def from_published(cls, arguments) -> "VARConfig":
        """Reads the published constructor's names; `patch_nums` holds sides or [height, width].
        What is left out has the published default; hence `attn_l2_norm` is off unless given.
        `UserError` for an unknown name or a value of the wrong type."""
        found = cls.arguments(arguments, IGNORED_NAMES, patch_nums=object)
        found.setdefault("attn_l2_norm", False)
        schedule = cls.read_schedule(found.pop("patch_nums", SIDES_256))
        return cls(**found, schedule=schedule)

    @property
    def hidden_dim(self) -> int:
        return round(self.embed_dim * self.mlp_ratio)

    @property
    def code_map(self) -> tuple[int, int, int]:
        """Height, width and channels of the latent map."""
        return (*self.schedule.final_map, self.z_channels)

    def condition_bytes(self, rows: int, item_size: int, text_tokens: int | None = None) -> int:
        """Bytes that every layer holds of the condition while an image is drawn."""
        return self.depth * rows * 6 * self.embed_dim * item_size

    def check_sampling(self, sampling: Sampling) -> Sampling:
        sampling.check(self.schedule.num_scales, self.vocab_size).check_no_interval(self.what)
        if sampling.cfg_insertion_layer != (0,):
            raise UserError(
                f"cfg_insertion_layer={show(sampling.cfg_insertion_layer)}: VAR mixes its rows on "
                f"the logits only, which is 0"
            )
        return sampling

    def is_guided(self, sampling: Sampling) -> bool:
        """Whether unconditional rows have any weight: t = cfg * k / (K - 1) is not 0 everywhere."""
        return any(cfg != 0 for cfg in sampling.per_scale("cfg", self.schedule.num_scales))


PRESETS = {
    "var-d16": VARConfig.preset(16),
    "var-d20": VARConfig.preset(20),
    "var-d24": VARConfig.preset(24),
    "var-d30": VARConfig.preset(30),
    "var-d36": VARConfig.preset(36, SIDES_512, shared_aln=True),
}
