"""All settings of a training run: a frozen dataclass whose fields are the flags of the command."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from varjax.codecs.vqvae.model import VQVAEConfig
from varjax.errors import UserError, choose
from varjax.models.var.transformer import VARConfig
from varjax.schedule import Schedule
from varjax.training.optimizer import OptimizerSettings
from varjax.training.var_trainer import VARTraining
from varjax.training.vqvae_trainer import VQVAETraining

DTYPES = ("float32", "bfloat16")


def _flag(default, text: str, **more):
    """A field with its help text; `stage` says whose settings it belongs to (default: both)."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of both stages. `UserError` if a value is impossible or two do not fit."""

    data: str = _flag("", "folder or .npz file of pictures")
    image_size: int = _flag(64, "side of the pictures in pixels")
    val_fraction: float = _flag(0.05, "part held out where the data has no validation set")
    max_images: int = _flag(0, "use only so many training pictures; 0 = all")
    max_validation: int = _flag(512, "use at most so many validation pictures")
    patch_nums: tuple[int, ...] = _flag((1, 2, 3, 4, 6, 8), "sides of the token maps")
    seed: int = _flag(0, "seed of weights, order of pictures, dropped labels")
    dtype: str = _flag("float32", "type of the large products: float32 or bfloat16")

    vocab_size: int = _flag(512, "codes in the codebook")
    z_channels: int = _flag(16, "channels of a code")
    ch: int = _flag(64, "channels of the codec's first level, a multiple of norm_groups")
    ch_mult: tuple[int, ...] = _flag((1, 1, 2, 2), "channels of the codec's levels in units of ch")
    num_res_blocks: int = _flag(2, "residual blocks per level of the codec")
    norm_groups: int = _flag(32, "groups of the codec's normalisation")
    vqvae_steps: int = _flag(3400, "training steps of the codec")
    vqvae_batch_size: int = _flag(16, "pictures per step of the codec")
    vqvae_lr: float = _flag(6e-4, "peak learning rate of the codec")
    autoencoder_steps: int = _flag(250, "first steps of the codec, without quantiser")
    reseed_every: int = _flag(100, "steps between moves of seldom used codes")

    depth: int = _flag(4, "layers of the transformer", stage="var")
    width: int = _flag(256, "width of the transformer", stage="var")
    heads: int = _flag(4, "attention heads", stage="var")
    shared_aln: bool = _flag(True, "one modulation for all layers: smaller", stage="var")
    label_drop: float = _flag(0.1, "how often the label is dropped", stage="var")
    var_steps: int = _flag(2600, "training steps of the transformer", stage="var")
    var_batch_size: int = _flag(32, "pictures per step of the transformer", stage="var")
    var_lr: float = _flag(1.5e-3, "peak learning rate of the transformer", stage="var")
    weight_decay: float = _flag(0.05, "weight decay of the transformer", stage="var")

    def __post_init__(self):
        choose("dtype", self.dtype, DTYPES)
        if not self.data:
            raise UserError("--data is required: a folder or an .npz file of pictures")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"--val_fraction={self.val_fraction} given: it must be between 0 and 1")
        if self.max_images < 0:
            raise UserError(f"--max_images={self.max_images} given: it must be at least 0")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"--seed={self.seed} given: choose 0 to {2**31 - 1}")
        if self.vocab_size < 2:
            raise UserError(f"--vocab_size={self.vocab_size} given: at least 2 codes are needed")
        sides = self.patch_nums
        if (
            not sides
            or min(sides) < 1
            or any(b <= a for a, b in zip(sides, sides[1:], strict=False))
        ):
            raise UserError(
                f"--patch_nums={_listed(sides)} given: sides must increase, from 1 or more"
            )
        size = self.codec.image_size[0]
        if size != self.image_size:
            raise UserError(
                f"--image_size={self.image_size} given, but --patch_nums ends at {sides[-1]} and"
                f" --ch_mult has {len(self.ch_mult)} levels, which makes {size} pixels"
                f" (last side times {self.codec.downsample})"
            )
        for build in (lambda: self.transformer(1), lambda: self.vqvae, lambda: self.var):
            build()  # each checks its own values

    @property
    def schedule(self) -> Schedule:
        return Schedule.square(self.patch_nums)

    @property
    def codec(self) -> VQVAEConfig:
        return VQVAEConfig(
            vocab_size=self.vocab_size,
            z_channels=self.z_channels,
            ch=self.ch,
            ch_mult=self.ch_mult,
            num_res_blocks=self.num_res_blocks,
            group_norm_groups=self.norm_groups,
            schedule=self.schedule,
        )

    def transformer(self, num_classes: int) -> VARConfig:
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

    @property
    def vqvae(self) -> VQVAETraining:
        adam = OptimizerSettings(
            steps=self.vqvae_steps,
            lr=self.vqvae_lr,
            b2=0.99,
            clip=1.0,
            warm_up=20,
            flat_until=0.5,
            ema=0.995,
        )
        return VQVAETraining(
            optimizer=adam,
            batch_size=self.vqvae_batch_size,
            autoencoder_steps=self.autoencoder_steps,
            reseed_every=self.reseed_every,
            dtype=self.dtype,
            seed=self.seed,
            max_validation=self.max_validation,
        )

    @property
    def var(self) -> VARTraining:
        adam = OptimizerSettings(
            steps=self.var_steps,
            lr=self.var_lr,
            b2=0.95,
            weight_decay=self.weight_decay,
            clip=2.0,
            warm_up=min(150, self.var_steps // 10),
            ema=0.998,
        )
        return VARTraining(
            optimizer=adam,
            batch_size=self.var_batch_size,
            dtype=self.dtype,
            seed=self.seed,
            max_validation=self.max_validation,
        )

    def check_pictures(self, num_pictures: int, stages) -> None:
        """`UserError` where a step of one of the `stages` takes more than all training pictures."""
        for stage in stages:
            size = getattr(self, f"{stage}_batch_size")
            if size > num_pictures:
                raise UserError(
                    f"--{stage}_batch_size={size} given, but there are {num_pictures} training"
                    f" pictures: choose at most {num_pictures}"
                )

    def of_stage(self, stage: str) -> dict:
        """{name: JSON value} of the settings that decide the result of `stage`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if stage == "vqvae":
            values = {f.name: values[f.name] for f in fields(self) if "stage" not in f.metadata}
        values["data"] = str(Path(self.data).absolute())
        return json.loads(json.dumps(values))


def _listed(values) -> str:
    return ",".join(str(v) for v in values)
