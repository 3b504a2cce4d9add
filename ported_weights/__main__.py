"""Convert a published PyTorch checkpoint into a varjax checkpoint.

    python -m ported_weights --model=var-d16 --source=hub
    python -m experiments.run --checkpoint=var-d16 --policy=headkv --budget=0.25

--source=hub gets the files of a model by its name from the Hugging Face hub, as
ported_weights/hub.json lists them, each checked; what is given by another flag is not fetched.
Without --out the checkpoint goes to varjax/checkpoints/NAME in the user's cache folder, where
--checkpoint=NAME of all commands and `varjax.load(NAME)` find it. From files:

    python -m ported_weights --model=infinity-2b --source=infinity_2b_reg.pth \\
        --tokenizer_source=infinity_vae_d32reg.pth --text_encoder_source=flan-t5-xl \\
        --out=checkpoints/infinity-2b

Files may be .safetensors, .pth/.pt/.bin as torch.save writes them, or a folder of shards with its
index. They are read without PyTorch and without running anything that they contain. Every tensor
must find its place: missing, surplus or misshapen ones are listed together and nothing is written.

A text encoder alone (--model=flan-t5) is for experiments.encode_text, or to copy into a checkpoint
as text_encoder; inception-fid and lpips-* are networks of experiments.evaluate
(docs/howto/evaluate.md says where their files are):

    python -m ported_weights --model=lpips-alex --source=alexnet-owt-7be5be79.pth \\
        --heads_source=alex.pth --out=checkpoints/lpips-alex

Models of other sizes: --model=var-custom or infinity-custom with --config and --tokenizer_config,
JSON files that use the argument names of the published constructors. All families, and what their
files are: docs/howto/port.md.
"""

import dataclasses
import shlex
from pathlib import Path

from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from ported_weights import convert, hub
from ported_weights.configurations import PublishedModel
from varjax.core.errors import UserError
from varjax.storage.names import converted

FLAGS = CommandFlags(
    "--model=var-d16 --source=hub", "model source tokenizer_source out dtype overwrite"
)

FLAGS.enum(
    "model",
    None,
    (*convert.MODELS, *convert.PARTS),
    "Which published model, *-custom, a text encoder alone, or a network of evaluation.",
    required=True,
)
FLAGS.string(
    "source",
    None,
    "Transformer weights: a file, or a folder of shards; flan-t5: its folder; or hub.",
    required=True,
)
OF_MODEL = [field.name for field in dataclasses.fields(PublishedModel)]
for _field in dataclasses.fields(PublishedModel)[2:]:
    FLAGS.string(_field.name, None, _field.metadata["help"])
FLAGS.string(
    "out", None, "Folder to create; default, with --source=hub: where --checkpoint=NAME looks."
)
FLAGS.enum("dtype", None, convert.DTYPES, "Type to store; by default that of the source.")
FLAGS.string("heads_source", None, "lpips-*: weights of the heads, such as alex.pth.")
FLAGS.boolean("overwrite", False, "Replace --out if it exists.")


def main(argv) -> None:
    """Convert what the flags say."""
    given = {name: FLAGS.flag(name).value for name in FLAGS.values}
    if given["source"] == hub.HUB:
        target = Path(given["out"] or converted(given["model"]))
        if not given["out"] and given["model"] in hub.names():
            target.parent.mkdir(parents=True, exist_ok=True)
        # before anything is loaded
        convert.check_output(str(target), given["dtype"], given["overwrite"])
        given |= {"out": str(target), **hub.fetch(given["model"], given)}
    if not given["out"]:
        raise UserError("--out is required (Folder to create), unless --source=hub is given")
    model, out, stored = given["model"], given["out"], {"overwrite": given["overwrite"]}
    part, place = convert.PARTS.get(model), shlex.quote(given["out"])
    if part is None:
        _refuse_others(given, *OF_MODEL, "dtype")
        files = {name: given[name] for name in OF_MODEL}
        convert.convert(PublishedModel(**files), out, dtype=given["dtype"], **stored)
        name = model if Path(out) == converted(model) else place
        print(f"next: python -m experiments.run --checkpoint={name} --policy=headkv")
        return
    own = "dtype" if part == convert.ENCODER else "heads_source"
    _refuse_others(given, "source", own)
    convert.convert_part(model, given["source"], out, **{own: given[own]}, **stored)
    command = f"evaluate --{part}={place}"
    if part == convert.ENCODER:
        command = f"encode_text --checkpoint={place}"
    print(f"written; next: python -m experiments.{command} ...")


def _refuse_others(given: dict, *names: str) -> None:
    """`UserError` if flags are given that the model does not take. names: those that it takes,
    beside those that all take."""
    taken = ("model", "out", "overwrite", *names)
    surplus = [f"--{name}" for name in given if given[name] and name not in taken]
    if surplus:
        them = "it" if len(surplus) == 1 else "them"
        raise UserError(f"--model={given['model']} takes no {', '.join(surplus)}: drop {them}")


if __name__ == "__main__":
    command_line.run(main)
