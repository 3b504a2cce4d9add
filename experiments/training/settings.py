"""All settings of a training run: a frozen dataclass with a field for every flag of the command."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path

from experiments.training.data import LOADERS
from varjax.codecs.vq import VQConfig
from varjax.codecs.vqvae import VQVAEConfig
from varjax.core.errors import UserError, choose
from varjax.core.sequence import Schedule
from varjax.models.llamagen import LlamaGenConfig
from varjax.models.var import VARConfig

DTYPES = ("float32", "bfloat16")
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

_NETS = {name: name for name in ("ch", "ch_mult", "num_res_blocks")}
# {family: fields of the configurations of codec and transformer, each with the setting that it is}
FIELDS = {
    "var": (
        _NETS
        | {"vocab_size": "vocab_size", "z_channels": "z_channels"}
        | {"group_norm_groups": "norm_groups"},
        {"depth": "depth", "embed_dim": "width", "num_heads": "heads", "shared_aln": "shared_aln"}
        | {"vocab_size": "vocab_size", "z_channels": "z_channels", "cond_drop_rate": "label_drop"},
    ),
    "llamagen": (
        _NETS | {"codebook_size": "vocab_size", "codebook_embed_dim": "z_channels"},
        {"n_layer": "depth", "dim": "width", "n_head": "heads"}
        | {"vocab_size": "vocab_size", "class_dropout_prob": "label_drop"},
    ),
}

# (whether a value may be, what is allowed)
Valid = tuple[Callable[[float], bool], str]
POSITIVE: Valid = (lambda rate: 0 < rate < math.inf, "it must be positive and finite")


def shown(value: object) -> str:
    """Write a value as flags do."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _least(least: int) -> Valid:
    return lambda value: value >= least, f"it must be at least {least}"


def _between(least: int, most: int) -> Valid:
    return lambda value: least <= value <= most, f"choose {least} to {most}"


STEPS = _between(1, 10**9)  # the optimiser's count is an int32


def _flag(
    default: str | int | float | bool | tuple[int, ...],
    text: str,
    stages: tuple[str, ...] = BOTH,
    valid: Valid | None = None,
    only: str | None = None,
):
    """Return a field with its help text and the values that it may have; None: all of its type.

    stages: the training stages whose result it decides.
    only: the one family that has it; None: all families have it.
    """
    described = {"help": text, "stages": stages, "valid": valid, "family": only}
    return field(default=default, metadata=described)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of all stages. `UserError` if a value is impossible or two of them do not fit."""

    start = None  # a checkpoint that the run begins with (`fine_tuning.FineTuning`)

    # the last step logs, validates and saves in any case
    log_every: int = _flag(20, "steps from one log line to the next", (), _least(1))
    checkpoint_every: int = _flag(200, "steps from one checkpoint to the next", (), _least(1))
    validate_every: int = _flag(500, "steps from one validation to the next", (), _least(1))

    sample_every: int = _flag(500, "steps from one sheet to the next; 0 = none", (), _least(0))

    family: str = _flag("var", "what is trained: var (VQVAE, VAR) or llamagen (VQ, LlamaGen)")
    data: str = _flag("", "folder or .npz file of pictures", ALL)
    image_size: int = _flag(64, "side of the pictures in pixels", ALL)
    val_fraction: float = _flag(
        0.05,
        "part held out where the data has no validation set",
        ALL,
        (lambda part: 0 < part < 1, "it must be between 0 and 1"),
    )
    max_images: int = _flag(0, "use only so many training pictures; 0 = all", ALL, _least(0))
    loader: str = _flag(
        "auto",
        "where training pictures are kept: memory; grain (in a folder of pictures, and decoded"
        " while steps run); auto: memory, unless they would take more than half of it",
        (),
    )
    shifts: int = _flag(
        0, "copies of every training picture, moved by up to two pixels", BOTH, _between(0, 24)
    )
    max_validation: int = _flag(512, "use at most so many validation pictures", ALL, _least(1))
    patch_nums: tuple[int, ...] = _flag(
        (1, 2, 3, 4, 6, 8),
        "sides of the token maps",
        valid=(
            lambda sides: 0 < min(sides, default=0) and all(a < b for a, b in pairwise(sides)),
            "sides must increase, from 1 or more",
        ),
        only="var",
    )
    accumulate: int = _flag(
        1, "parts of a step that run one after the other, which takes less memory", (), _least(1)
    )
    remat: bool = _flag(False, "compute the transformer's layers twice, to store less", ())
    seed: int = _flag(
        0, "seed of weights, order of pictures, dropped labels", ALL, _between(0, 2**31 - 1)
    )
    dtype: str = _flag("float32", "type of the large products: float32 or bfloat16")
    save_dtype: str = _flag("float32", "type of the finished weights: float32 or bfloat16", ())

    vocab_size: int = _flag(512, "codes in the codebook", BOTH, _least(2))
    z_channels: int = _flag(16, "channels of a code")
    ch: int = _flag(64, "channels of the codec's first level, a multiple of norm_groups")
    ch_mult: tuple[int, ...] = _flag((1, 1, 2, 2), "channels of the codec's levels in units of ch")
    num_res_blocks: int = _flag(2, "residual blocks per level of the codec")
    norm_groups: int = _flag(32, "groups of the codec's normalisation", only="var")
    vqvae_steps: int = _flag(3400, "training steps of the codec", BOTH, STEPS)
    vqvae_batch_size: int = _flag(16, "pictures per step of the codec", BOTH, _least(1))
    vqvae_lr: float = _flag(6e-4, "peak learning rate of the codec", BOTH, POSITIVE)
    autoencoder_steps: int = _flag(250, "first steps of the codec, without quantiser")
    reseed_every: int = _flag(100, "steps between moves of seldom used codes", BOTH, _least(1))

    depth: int = _flag(4, "layers of the transformer", SECOND)
    width: int = _flag(256, "width of the transformer", SECOND)
    heads: int = _flag(4, "attention heads", SECOND)
    shared_aln: bool = _flag(True, "one modulation for all layers: smaller", SECOND, only="var")
    dropout: float = _flag(
        0.1,
        "share of a branch's numbers left out",
        SECOND,
        (lambda share: 0 <= share < 1, "it must be in [0, 1)"),
        only="llamagen",
    )
    label_drop: float = _flag(0.1, "how often the label is dropped", SECOND)
    var_steps: int = _flag(2600, "training steps of the transformer", SECOND, STEPS)
    var_batch_size: int = _flag(32, "pictures per step of the transformer", SECOND, _least(1))
    var_lr: float = _flag(1.5e-3, "peak learning rate of the transformer", SECOND, POSITIVE)
    weight_decay: float = _flag(
        0.05,
        "weight decay of the transformer",
        SECOND,
        (lambda decay: 0 <= decay < math.inf, "it must be at least 0 and finite"),
    )

    classifier_steps: int = _flag(2000, "training steps of the classifier", CLASSIFIER, STEPS)
    classifier_batch_size: int = _flag(
        64, "pictures per step of the classifier", CLASSIFIER, _least(1)
    )
    classifier_lr: float = _flag(3e-3, "peak learning rate of the classifier", CLASSIFIER, POSITIVE)

    def __post_init__(self):
        choose("model family", self.family, FAMILIES)
        choose("dtype", self.dtype, DTYPES)
        choose("save_dtype", self.save_dtype, DTYPES)
        choose("loader", self.loader, LOADERS)
        if not self.data:
            raise UserError("data is required: a folder or an .npz file of pictures")
        for f in fields(self):
            value, valid, family = getattr(self, f.name), f.metadata["valid"], f.metadata["family"]
            if valid and not valid[0](value):
                raise UserError(f"{f.name}={shown(value)} given: {valid[1]}")
            if family not in (None, self.family) and value != f.default:
                raise UserError(
                    f"{f.name}={shown(value)} is for family={family} only: leave it out with"
                    f" family={self.family}"
                )
        for name in ("checkpoint_every", "validate_every", "sample_every"):
            if getattr(self, name) % self.log_every:  # a resumed log line would average other steps
                raise UserError(
                    f"{name}={getattr(self, name)} must be a multiple of log_every={self.log_every}"
                )
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

    @property
    def codec(self) -> VQVAEConfig | VQConfig:
        """The configuration of the codec that is trained."""
        own = {field: getattr(self, name) for field, name in FIELDS[self.family][0].items()}
        if self.family == "llamagen":
            return VQConfig(**own, z_channels=self.ch * (self.ch_mult or (1,))[-1])
        return VQVAEConfig(**own, schedule=Schedule.square(self.patch_nums))

    def transformer(self, num_classes: int) -> VARConfig | LlamaGenConfig:
        """Return the configuration of the transformer that is trained."""
        own = {field: getattr(self, name) for field, name in FIELDS[self.family][1].items()}
        own["num_classes"] = num_classes
        if self.family == "llamagen":
            side = self.image_size // self.codec.downsample
            return LlamaGenConfig(**own, multiple_of=64, block_size=side**2)
        return VARConfig(**own, schedule=Schedule.square(self.patch_nums))

    def deciding(self, stage: str) -> dict:
        """Return {name: JSON value} for the settings that decide the result of a stage."""
        own = [f for f in fields(self) if f.metadata["family"] in (None, self.family)]
        names = [f.name for f in own if stage in f.metadata["stages"]]
        values = {name: getattr(self, name) for name in names}
        values["data"] = str(Path(self.data).absolute())
        return json.loads(json.dumps(values))
