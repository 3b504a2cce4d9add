"""Train an image codec and a class-conditional transformer on a folder of pictures.

    python -m experiments.train --preset=tiny --data=PICTURES --out=RUN
    python -m experiments.train --family=llamagen --data=PICTURES --out=RUN
    python -m experiments.run --checkpoint=RUN/model

`--family=var` trains a VQVAE and a VAR, `--family=llamagen` a VQ and a LlamaGen, which draws token
by token; stage `vqvae` is the codec of either, `var` the transformer.
`--init=CHECKPOINT` begins with the weights of a VAR or a LlamaGen instead of random ones.
`--data` is a folder with one sub-folder per class, an .npz file with `images` and `labels`, or a
folder with train.npz and val.npz. A run that was stopped continues from its last checkpoint when
the same command is given again. Progress goes to standard error, losses to RUN/STAGE/history.jsonl,
and the finished model to RUN/model. What to choose: docs/howto/train.md.
"""

import dataclasses
import shlex

import jax

from experiments import processes
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags, about
from experiments.flags.distributed import DistributedFlag
from experiments.generation import environment
from experiments.output import say
from experiments.training import data, fine_tuning, session
from experiments.training.mesh import TrainingMesh
from experiments.training.presets import PRESETS, preset
from experiments.training.settings import FAMILIES, TrainingSettings, shown
from varjax.core.errors import UserError
from varjax.generation import hosts

FLAGS = CommandFlags(
    "--preset=tiny --data=PICTURES --out=RUN", "data out preset family stage", compiles=True
)


STAGE = FLAGS.enum(
    "stage",
    "both",
    session.STAGES,
    "What to train: codec, transformer, or both; or, in a folder of its own, a classifier to judge "
    "samples with.",
)
INIT = FLAGS.string(
    "init",
    None,
    "Checkpoint to begin with: a folder, a converted published model's name, demo, "
    "demo-eight or demo-llamagen. Family and sizes are its own. Without --stage only its "
    "transformer is trained; defaults are then "
    f"{', '.join(f'--{n}={v}' for n, v in fine_tuning.DEFAULTS.items())}.",
)
PRESET = FLAGS.enum(
    "preset",
    None,
    PRESETS,
    "Sizes, steps and rates by the number of pictures and the device; other flags come first.",
)
OUT = FLAGS.string("out", None, "Folder of the run, new or to be resumed.", required=True)
MESH = FLAGS.string(
    "mesh",
    None,
    "Devices to train on: data=2 (pictures), fsdp=4 (also parameters and optimizer state), or "
    "both; one axis may be -1: what is left over. A run may go on with other devices.",
)
DISTRIBUTED = DistributedFlag(FLAGS)
QUIET = FLAGS.boolean("quiet", False, "Print no progress.")
MORE = FLAGS.group("settings", "Further settings, as vqvae_steps=1000,ch_mult=1,1,2.")
# settings with a flag of their own: what is trained, on what, and where it runs
SINGLE = set(
    "data family image_size max_images loader accumulate remat seed dtype save_dtype".split()
)


def _define_flags() -> None:
    for field in dataclasses.fields(TrainingSettings):
        flags = FLAGS if field.name in SINGLE else MORE
        define = {
            bool: flags.boolean,
            int: flags.integer,
            float: flags.floating,
            str: flags.string,
            tuple: flags.list,
        }
        default = list(map(str, field.default)) if type(field.default) is tuple else field.default
        text, only = field.metadata["help"], field.metadata["family"]
        own = {f: given[field.name] for f, given in FAMILIES.items() if field.name in given}
        notes = [f" (of --family={only} only)"] if only else []
        notes += [f" (with --family={f} {shown(value)})" for f, value in own.items() if not only]
        text = f"{text[0].upper()}{text[1:]}{''.join(notes)}."
        if default == "":
            FLAGS.string(field.name, None, text, required=True)
        else:
            define[type(field.default)](field.name, default, text)


def read_settings() -> TrainingSettings:
    """Return the settings that the given flags make; `UserError` if they are impossible."""
    names = [field.name for field in dataclasses.fields(TrainingSettings)]
    values = {name: FLAGS.flag(name).value for name in names if FLAGS.flag(name).present}
    for name, value in values.items():
        if isinstance(value, list):
            try:
                values[name] = tuple(map(int, value))
            except ValueError:
                text = f"{name}={','.join(value)} is not valid"
                raise UserError(f"{text}: it must be integers separated by commas") from None
    if PRESET.value is not None and values.get("data"):
        values = _preset(values) | values
    if INIT.value is not None:
        return fine_tuning.settings(INIT.value, **values)
    return TrainingSettings.for_family(**values)


def _preset(given: dict) -> dict:
    """Return the preset's settings, and print those that are not given."""
    if INIT.value is not None:
        raise UserError(f"preset={PRESET.value} given, but sizes are those of init: leave one out")
    pictures, platform = (
        data.count(given["data"], given.get("max_images", 0)),
        jax.default_backend(),
    )
    found = preset(PRESET.value, given.get("family", "var"), pictures, platform)
    own = ",".join(f"{n}={shown(v)}" for n, v in found.items() if n not in given)
    say(f"preset={PRESET.value} for {pictures} pictures on {platform}: {own}", QUIET.value)
    return found


def main(argv: list[str]) -> None:
    DISTRIBUTED.start()
    processes.agree(environment()["versions"])
    with processes.together():
        settings = read_settings()
        # without a mesh one process takes one device, and asks for none before checks
        devices = len(jax.devices()) if MESH.value or hosts.count() > 1 else 1
        with about(MESH):
            mesh = TrainingMesh.parse(MESH.value, devices)
    stage = STAGE.value if STAGE.present or INIT.value is None else "var"
    model = session.train(settings, stage, OUT.value, QUIET.value, mesh)
    if hosts.is_first():
        print(model or f"{OUT.value}/vqvae: codec trained; continue with --stage=var")
    if model and stage != "classifier":
        say(f"next: python -m experiments.run --checkpoint={shlex.quote(str(model))}", QUIET.value)


_define_flags()

if __name__ == "__main__":
    command_line.run(main)
