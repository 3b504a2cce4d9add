"""List the classes of a model, by number and name, as --labels takes them.

    python -m experiments.classes --checkpoint=DIR

Names are `class_names` of model.json: those of the folders of a training, or of the list that
`python -m ported_weights --class_names=FILE.json` was given.
"""

from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from experiments.flags.condition import WAYS
from varjax.core.errors import UserError
from varjax.models.loading import describe
from varjax.models.registry import found

FLAGS = CommandFlags("--checkpoint=demo", "checkpoint")
CHECKPOINT = FLAGS.string("checkpoint", None, "Checkpoint folder or name; default: demo.")


def main(argv: list[str]) -> None:
    model = describe(found(CHECKPOINT.value))
    if not model.num_classes:
        raise UserError(f"{model.name} has no classes: it {WAYS[model.condition]}")
    if not model.class_names:
        print(f"{model.name}: classes 0 to {model.num_classes - 1}, without names")
    for number, name in enumerate(model.class_names or ()):
        print(f"{number:4}  {' '.join(name.split())}")


if __name__ == "__main__":
    command_line.run(main)
