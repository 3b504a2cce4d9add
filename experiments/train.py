"""Train an image codec (VQVAE) and a class-conditional transformer (VAR) on a folder of pictures.

    python -m experiments.train --stage=both --data=PICTURES --out=RUN
    python -m experiments.run --checkpoint=RUN/model

`--data` is a folder with one sub-folder per class, an .npz file with `images` and `labels`, or a
folder with train.npz and val.npz. A run that was stopped continues from its last checkpoint when
the same command is given again. Progress goes to standard error, losses to RUN/STAGE/history.jsonl,
and the finished model to RUN/model. What to choose: docs/training.md.
"""

import dataclasses

from varjax.cli import command_line
from varjax.cli.flags import CommandFlags
from varjax.errors import UserError
from varjax.training import loop, session
from varjax.training.settings import Settings

FLAGS = CommandFlags()
FLAGS.compilation_cache()


STAGE = FLAGS.enum("stage", "both", session.STAGES, "what to train: the codec, the transformer")
OUT = FLAGS.string("out", None, "folder of the run, new or to be resumed", required=True)
QUIET = FLAGS.boolean("quiet", False, "print no progress")


def _define_flags() -> None:
    for name, default in vars(loop.Intervals()).items():
        FLAGS.integer(f"{name}_every", default, f"steps between two of: {name}", 1)
    define = {
        bool: FLAGS.boolean,
        int: FLAGS.integer,
        float: FLAGS.floating,
        str: FLAGS.string,
        tuple: FLAGS.list,
    }
    for field in dataclasses.fields(Settings):
        default = field.default
        if isinstance(default, tuple):
            default = [str(item) for item in default]
        define[type(field.default)](field.name, default, field.metadata["help"])


def _integers(name: str, values) -> tuple[int, ...]:
    try:
        return tuple(int(value) for value in values)
    except ValueError:
        raise UserError(
            f"--{name}={','.join(values)} is not valid: it must be integers separated by commas"
        ) from None


def read_settings() -> Settings:
    """Settings from the parsed flags; `UserError` if they are impossible."""
    values = {field.name: FLAGS.values[field.name].value for field in dataclasses.fields(Settings)}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = _integers(name, value)
    return Settings(**values)


def main(argv) -> None:
    del argv
    intervals = loop.Intervals(
        **{name: FLAGS.values[f"{name}_every"].value for name in vars(loop.Intervals())}
    )
    model = session.train(read_settings(), STAGE.value, OUT.value, intervals, QUIET.value)
    print(model or f"{OUT.value}/vqvae: codec trained; continue with --stage=var")


_define_flags()

if __name__ == "__main__":
    command_line.run(main)
