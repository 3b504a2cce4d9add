"""All settings of a training run: a frozen dataclass with a field for every flag of the command."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path

from varjax.codecs.vq.config import VQConfig
from varjax.codecs.vqvae.config import VQVAEConfig
from varjax.errors import UserError, choose
from varjax.models.llamagen.config import LlamaGenConfig
from varjax.models.var.config import VARConfig
from varjax.schedule import Schedule
from varjax.training.data import LOADERS

DTYPES = ("float32", "bfloat16")
MOST_STEPS = 10**9  # the optimiser's count is an int32
MOST_SHIFTS = 24  # moves by up to two pixels along both axes
BOTH, SECOND, CLASSIFIER = ("vqvae", "var"), ("var",), ("classifier",)
ALL = BOTH + CLASSIFIER

# {family that can be trained: its defaults that differ from those of the fields}
FAMILIES = {
    "var": {},
    "llamagen": {
        "vocab_size": 1024,
        "z_channels": 8,
        "ch_mult": (1, 1, 1),
        "num_res_blocks": 1,
        "depth": 5,
        "shifts": 4,
        "var_lr": 1e-3,
    },
}


def _flag(
    default: str | int | float | bool | tuple[int, ...],
    text: str,
    stages: tuple[str, ...] = BOTH,
    least: int | None = None,
    most: int | None = None,
    only: str | None = None,
):
    """Return a field with its help text and the values that it may have.

    stages: the training stages whose result it decides.
    only: the one family that has it; None: all families have it.
    """
    described = {"help": text, "stages": stages, "least": least, "most": most, "family": only}
    return field(default=default, metadata=described)


def _interval(default: int, what: str):
    return _flag(default, f"steps from one {what} to the next", stages=(), least=1)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of all stages. `UserError` if a value is impossible or two of them do not fit."""

    start = None  # a checkpoint that the run begins with (`fine_tuning.FineTuning`)

    # the last step logs, validates and saves in any case
    log_every: int = _interval(20, "log line")
    checkpoint_every: int = _interval(200, "checkpoint")
    validate_every: int = _interval(500, "validation")

    family: str = _flag("var", "what is trained: var (VQVAE, VAR) or llamagen (VQ, LlamaGen)")
    data: str = _flag("", "folder or .npz file of pictures", ALL)
    image_size: int = _flag(64, "side of the pictures in pixels", ALL)
    val_fraction: float = _flag(0.05, "part held out where the data has no validation set", ALL)
    max_images: int = _flag(0, "use only so many training pictures; 0 = all", ALL, 0)
    loader: str = _flag(
        "auto",
        "where training pictures are kept: memory; grain (in a folder of pictures, and decoded"
        " while steps run); auto: memory, unless they would take more than half of it",
        (),
    )
    shifts: int = _flag(
        0, "copies of every training picture, moved by up to two pixels", BOTH, 0, MOST_SHIFTS
    )
    max_validation: int = _flag(512, "use at most so many validation pictures", ALL, 1)
    patch_nums: tuple[int, ...] = _flag((1, 2, 3, 4, 6, 8), "sides of the token maps", only="var")
    accumulate: int = _flag(
        1, "parts of a step that run one after the other, which takes less memory", (), least=1
    )
    remat: bool = _flag(False, "compute the transformer's layers twice, to store less", ())
    seed: int = _flag(0, "seed of weights, order of pictures, dropped labels", ALL, 0, 2**31 - 1)
    dtype: str = _flag("float32", "type of the large products: float32 or bfloat16")
    save_dtype: str = _flag("float32", "type of the finished weights: float32 or bfloat16", ())

    vocab_size: int = _flag(512, "codes in the codebook", BOTH, 2)
    z_channels: int = _flag(16, "channels of a code")
    ch: int = _flag(64, "channels of the codec's first level, a multiple of norm_groups")
    ch_mult: tuple[int, ...] = _flag((1, 1, 2, 2), "channels of the codec's levels in units of ch")
    num_res_blocks: int = _flag(2, "residual blocks per level of the codec")
    norm_groups: int = _flag(32, "groups of the codec's normalisation", only="var")
    vqvae_steps: int = _flag(3400, "training steps of the codec", BOTH, 1, MOST_STEPS)
    vqvae_batch_size: int = _flag(16, "pictures per step of the codec", BOTH, 1)
    vqvae_lr: float = _flag(6e-4, "peak learning rate of the codec")
    autoencoder_steps: int = _flag(250, "first steps of the codec, without quantiser")
    reseed_every: int = _flag(100, "steps between moves of seldom used codes", BOTH, 1)

    depth: int = _flag(4, "layers of the transformer", SECOND)
    width: int = _flag(256, "width of the transformer", SECOND)
    heads: int = _flag(4, "attention heads", SECOND)
    shared_aln: bool = _flag(True, "one modulation for all layers: smaller", SECOND, only="var")
    dropout: float = _flag(0.1, "share of a branch's numbers left out", SECOND, only="llamagen")
    label_drop: float = _flag(0.1, "how often the label is dropped", SECOND)
    var_steps: int = _flag(2600, "training steps of the transformer", SECOND, 1, MOST_STEPS)
    var_batch_size: int = _flag(32, "pictures per step of the transformer", SECOND, 1)
    var_lr: float = _flag(1.5e-3, "peak learning rate of the transformer", SECOND)
    weight_decay: float = _flag(0.05, "weight decay of the transformer", SECOND)

    classifier_steps: int = _flag(
        2000, "training steps of the classifier", CLASSIFIER, 1, MOST_STEPS
    )
    classifier_batch_size: int = _flag(64, "pictures per step of the classifier", CLASSIFIER, 1)
    classifier_lr: float = _flag(3e-3, "peak learning rate of the classifier", CLASSIFIER)

    def __post_init__(self):
        choose("model family", self.family, FAMILIES)
        choose("dtype", self.dtype, DTYPES)
        choose("save_dtype", self.save_dtype, DTYPES)
        choose("loader", self.loader, LOADERS)
        if not self.data:
            raise UserError("data is required: a folder or an .npz file of pictures")
        for given, fits, allowed in self._conditions():
            if not fits:
                raise UserError(f"{given} given: {allowed}")
        for name in ("checkpoint_every", "validate_every"):
            if getattr(self, name) % self.log_every:  # a resumed log line would average other steps
                raise UserError(
                    f"{name}={getattr(self, name)} must be a multiple of log_every={self.log_every}"
                )
        self._check_family()
        self._check_image_size()
        self.transformer(1)  # checks its own values
        if not 0 <= self.autoencoder_steps < self.vqvae_steps:
            raise UserError(
                f"VQVAE training: {self.autoencoder_steps} autoencoder steps of"
                f" {self.vqvae_steps} steps: the quantiser would never be trained"
            )

    @classmethod
    def for_family(cls, family: str = "var", **given) -> "TrainingSettings":
        """Return settings with the family's own defaults for what is not given."""
        values = FAMILIES[choose("model family", family, FAMILIES)] | given
        return cls(family=family, **values)

    def _check_family(self) -> None:
        """Refuse settings that belong to another family."""
        for f in fields(self):
            family, value = f.metadata["family"], getattr(self, f.name)
            if family not in (None, self.family) and value != f.default:
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise UserError(
                    f"{f.name}={shown} is for family={family} only: leave it out with"
                    f" family={self.family}"
                )

    def _check_image_size(self) -> None:
        """Refuse a size that the codec's levels cannot make."""
        size, unit = self.image_size, self.codec.downsample
        if self.family == "llamagen":
            if size < 1 or size % unit:
                raise UserError(
                    f"image_size={size} given, but ch_mult has {len(self.ch_mult)} levels: choose a"
                    f" multiple of {unit}"
                )
        elif size != self.codec.image_size[0]:
            raise UserError(
                f"image_size={size} given, but patch_nums ends at {self.patch_nums[-1]} and ch_mult"
                f" has {len(self.ch_mult)} levels, which makes {self.codec.image_size[0]} pixels"
                f" (last side times {unit})"
            )

    def _conditions(self) -> Iterator[tuple[str, bool, str]]:
        """Yield (what is given, whether it is allowed, what is allowed) for single values."""
        for f in fields(self):
            value, (least, most) = getattr(self, f.name), (f.metadata["least"], f.metadata["most"])
            if most is not None:
                yield f"{f.name}={value}", least <= value <= most, f"choose {least} to {most}"
            elif least is not None:
                yield f"{f.name}={value}", value >= least, f"it must be at least {least}"
        sides, decay = self.patch_nums, self.weight_decay
        listed = ",".join(map(str, sides))
        increasing = bool(sides) and sides[0] >= 1 and all(a < b for a, b in pairwise(sides))
        part = 0 < self.val_fraction < 1
        yield f"val_fraction={self.val_fraction}", part, "it must be between 0 and 1"
        yield f"dropout={self.dropout}", 0 <= self.dropout < 1, "it must be in [0, 1)"
        yield f"patch_nums={listed}", increasing, "sides must increase, from 1 or more"
        for name in ("vqvae_lr", "var_lr", "classifier_lr"):
            rate = getattr(self, name)
            fits = rate > 0 and math.isfinite(rate)
            yield f"{name}={rate}", fits, "it must be positive and finite"
        fits = decay >= 0 and math.isfinite(decay)
        yield f"weight_decay={decay}", fits, "it must be at least 0 and finite"

    @property
    def schedule(self) -> Schedule:
        return Schedule.square(self.patch_nums)

    @property
    def codec(self) -> VQVAEConfig | VQConfig:
        """The configuration of the codec that is trained."""
        if self.family == "llamagen":
            return VQConfig(
                codebook_size=self.vocab_size,
                codebook_embed_dim=self.z_channels,
                ch=self.ch,
                ch_mult=self.ch_mult,
                num_res_blocks=self.num_res_blocks,
                z_channels=self.ch * (self.ch_mult or (1,))[-1],
            )
        return VQVAEConfig(
            vocab_size=self.vocab_size,
            z_channels=self.z_channels,
            ch=self.ch,
            ch_mult=self.ch_mult,
            num_res_blocks=self.num_res_blocks,
            group_norm_groups=self.norm_groups,
            schedule=self.schedule,
        )

    def transformer(self, num_classes: int) -> VARConfig | LlamaGenConfig:
        """Return the configuration of the transformer that is trained."""
        if self.family == "llamagen":
            return LlamaGenConfig(
                num_classes=num_classes,
                n_layer=self.depth,
                dim=self.width,
                n_head=self.heads,
                multiple_of=64,
                vocab_size=self.vocab_size,
                block_size=(self.image_size // self.codec.downsample) ** 2,
                class_dropout_prob=self.label_drop,
            )
        return VARConfig(
            num_classes=num_classes,
            depth=self.depth,
            embed_dim=self.width,
            num_heads=self.heads,
            shared_aln=self.shared_aln,
            schedule=self.schedule,
            vocab_size=self.vocab_size,
            z_channels=self.z_channels,
            cond_drop_rate=self.label_drop,
        )

    def check_pictures(self, num_pictures: int, stages: Iterable[str]) -> None:
        """`UserError` if a step of one of the stages takes more than all training pictures."""
        for stage in stages:
            size = getattr(self, f"{stage}_batch_size")
            if size > num_pictures:
                raise UserError(
                    f"{stage}_batch_size={size} given, but there are {num_pictures} training"
                    f" pictures: choose at most {num_pictures}"
                )

    def deciding(self, stage: str) -> dict:
        """Return {name: JSON value} for the settings that decide the result of a stage."""
        own = [f for f in fields(self) if f.metadata["family"] in (None, self.family)]
        names = [f.name for f in own if stage in f.metadata["stages"]]
        values = {name: getattr(self, name) for name in names}
        values["data"] = str(Path(self.data).absolute())
        return json.loads(json.dumps(values))
