"""Presets of `experiments.train`: settings that follow from the number of pictures and the device,
and from nothing else, so that a run is resumed by its own command."""

from typing import NamedTuple

from experiments.training.settings import FAMILIES
from varjax.core.errors import UserError, choose


class Preset(NamedTuple):
    """Sizes for `least` or more pictures, of which some are held out.

    steps: {stage: (fewest steps, passes over all pictures, most steps)}.
    every: steps from one checkpoint, validation and sheet to the next.
    both, var: further settings, of both families and of VAR.
    """

    least: int
    steps: dict[str, tuple[int, int, int]]
    every: int
    both: dict
    var: dict


PRESETS = {
    # for CPUs: what it takes is in docs/lab/training.md
    "tiny": Preset(
        least=20,
        steps={"vqvae": (300, 24, 1200), "var": (300, 24, 1200)},
        both={
            **{"ch": 32, "num_res_blocks": 1, "vqvae_batch_size": 16, "vqvae_lr": 1e-3},
            **{"autoencoder_steps": 80, "reseed_every": 40, "depth": 4, "var_batch_size": 16},
            **{"log_every": 10, "vocab_size": 512, "shifts": 0},
        },
        var={"ch": 16, "ch_mult": (1, 2, 4, 4), "norm_groups": 8},
        every=100,
    ),
    "small": Preset(
        least=1000,
        steps={"vqvae": (2000, 4, 6000), "var": (2000, 8, 6000)},
        both={"shifts": 4, "vqvae_batch_size": 16, "var_batch_size": 32},
        var={},
        every=200,
    ),
    "base": Preset(
        least=10_000,
        steps={"vqvae": (10_000, 20, 60_000), "var": (10_000, 40, 60_000)},
        both={
            **{"image_size": 128, "ch": 128, "ch_mult": (1, 1, 2, 2), "vocab_size": 4096},
            **{"vqvae_batch_size": 64, "vqvae_lr": 3e-4, "autoencoder_steps": 1000},
            **{"depth": 8, "width": 512, "heads": 8, "var_batch_size": 128, "var_lr": 5e-4},
            **{"reseed_every": 200, "shifts": 0},
        },
        var={"patch_nums": (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)},
        every=1000,
    ),
}


def preset(name: str, family: str, pictures: int, platform: str) -> dict:
    """Return {setting: value} of a preset; `UserError` if there are too few pictures for it.

    platform: "cpu", "gpu" or "tpu". Only CPUs run the large products in float32.
    """
    chosen = PRESETS[choose("preset", name, PRESETS)]
    if pictures < chosen.least:
        fitting = [other for other, one in PRESETS.items() if one.least <= pictures]
        advice = f"choose preset={fitting[-1]}" if fitting else "give more pictures"
        raise UserError(
            f"preset={name} is for {chosen.least} pictures or more, and there are {pictures}:"
            f" {advice}"
        )
    found = FAMILIES[choose("model family", family, FAMILIES)] | chosen.both
    found |= chosen.var if family == "var" else {}
    found |= dict.fromkeys(("checkpoint_every", "validate_every", "sample_every"), chosen.every)
    for stage, (fewest, passes, most) in chosen.steps.items():
        steps = passes * pictures // found[f"{stage}_batch_size"]
        found[f"{stage}_steps"] = min(max(steps, fewest), most)
    return found | {"dtype": "float32" if platform == "cpu" else "bfloat16"}
