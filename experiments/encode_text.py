"""Encode prompts once and keep the features: the encoder then needs no memory beside the model.

    python -m experiments.encode_text --checkpoint=DIR --prompts=FILE --save=FEATURES.npz
    python -m experiments.run --checkpoint=DIR --text_features=FEATURES.npz

--checkpoint is a checkpoint with a text encoder, or the folder of an encoder alone. --prompts is a
file with one prompt per line, a published prompt set (docs/howto/text.md), or a text: --prompts="a
red apple" may be repeated. An empty prompt stands for the model's own unconditional text. Longer
prompts than --prompt_tokens are cut, with a warning that names the line.
"""

import pathlib

from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from experiments.flags.program import batch_size_flag, dtype_flag
from experiments.flags.prompts import PromptFlags
from experiments.output import FileFlags
from experiments.prompts import condition
from varjax.core.errors import UserError
from varjax.generation.progress import Progress
from varjax.models.loading import describe
from varjax.storage import manifest
from varjax.storage.parameters import default_dtype
from varjax.text import encoder as encoder_lib
from varjax.text.features import MAX_LENGTH, TextFeatures

FLAGS = CommandFlags(
    "--checkpoint=infinity-2b --prompts='a red apple' --save=FEATURES.npz",
    "checkpoint prompts save",
    compiles=True,
)
CHECKPOINT = FLAGS.string(
    "checkpoint", None, "Checkpoint with a text encoder, or an encoder.", required=True
)
PROMPTS = PromptFlags(FLAGS)
DTYPE = dtype_flag(FLAGS, None, "the weights")
BATCH_SIZE = batch_size_flag(FLAGS, 8, "Texts per program call.")
LONGEST = FLAGS.integer(
    "prompt_tokens",
    None,
    f"Tokens per text, the end token included; default: what the model takes, else {MAX_LENGTH}.",
    lower_bound=1,
)
SAVE = FileFlags(FLAGS, "save", "The file to write.", required=True)


def max_length(checkpoint: str) -> int:
    """Tokens per text: --prompt_tokens, else what the checkpoint's model takes, else what
    released models take. `UserError` if the model has no use for features."""
    longest = MAX_LENGTH
    if (pathlib.Path(checkpoint) / manifest.NAME).is_file():  # else an encoder alone
        model = describe(checkpoint)
        if "text_features" not in model.family.conditions[model.condition].arguments:
            raise UserError(
                f"--checkpoint={checkpoint}: {model.family.name} models draw from"
                f" {model.condition}, not from features of texts: give the prompts or labels to"
                " experiments.run itself"
            )
        longest = model.config.text_maxlen
    return LONGEST.value or longest


def summary(features: TextFeatures) -> str:
    """Return the text that is printed at the end."""
    empty = int(features.unconditional.sum())
    lens, negative = features.lens, features.negative_lens
    lines = [
        f"{len(lens)} prompts, {lens.sum()} tokens, longest {lens.max()}, width "
        f"{features.kv.shape[1]}"
    ]
    if empty:
        lines.append(f"{empty} empty prompts: the model's own unconditional text")
    if negative is not None:
        lines.append(f"{len(negative)} negative prompts, longest {negative.max()}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    target = SAVE.check()
    prompts = PROMPTS.read()
    if prompts is None:
        raise UserError("there are no prompts: give --prompts=TEXT or --prompts=FILE")
    longest, negative = max_length(CHECKPOINT.value), PROMPTS.read_negative(prompts)
    folder = condition.encoder_folder(CHECKPOINT.value)
    encoder_lib.check_folder(folder)
    progress = Progress("encoded text", len(prompts), every=2.0)
    progress.note("reading the encoder")

    features, _ = encoder_lib.encode_texts(
        folder,
        prompts.texts,
        negative and negative.texts,
        dtype=DTYPE.value or default_dtype(),
        max_length=longest,
        batch_size=BATCH_SIZE.value,
        names=prompts.names,
        negative_names=negative and negative.names,
        progress=progress.report,
        warn=condition.warn,
    )
    features.save(target)
    print(f"{summary(features)}\nwritten to {target}")


if __name__ == "__main__":
    command_line.run(main)
