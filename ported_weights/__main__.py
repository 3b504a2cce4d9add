"""Convert a published PyTorch checkpoint into a varjax checkpoint.

    python -m ported_weights --model=var-d16 --source=hub
    python -m experiments.run --checkpoint=var-d16 --policy=headkv --budget=0.25

--source=hub gets the files of a model by its name from the Hugging Face hub: transformer, image
tokenizer and text encoder, as ported_weights/hub.json lists them, each checked; what is given by
another flag is not fetched. Without --out the checkpoint goes to varjax/checkpoints/NAME in the
user's cache folder, where --checkpoint=NAME of all commands and `varjax.load(NAME)` find it. From
files:

    python -m ported_weights --model=var-d16 --source=var_d16.pth \\
        --tokenizer_source=vae_ch160v4096z32.pth --out=checkpoints/var-d16

Files may be .safetensors, .pth/.pt/.bin as torch.save writes them, or a folder of shards with its
index. They are read without PyTorch and without running anything that they contain. Every tensor
must find its place: missing, surplus or misshapen ones are listed together and nothing is written.

    python -m ported_weights --model=infinity-2b --source=infinity_2b_reg.pth \\
        --tokenizer_source=infinity_vae_d32reg.pth --text_encoder_source=flan-t5-xl \\
        --out=checkpoints/infinity-2b

A text encoder alone, for experiments.encode_text, or to copy into a checkpoint as text_encoder:

    python -m ported_weights --model=flan-t5 --source=flan-t5-xl --out=checkpoints/flan-t5-xl

The networks of experiments.evaluate (docs/howto/evaluate.md says where their files are):

    python -m ported_weights --model=inception-fid \\
        --source=pt_inception-2015-12-05-6726825d.pth --out=checkpoints/inception
    python -m ported_weights --model=lpips-alex --source=alexnet-owt-7be5be79.pth \\
        --heads_source=alex.pth --out=checkpoints/lpips-alex

Janus-Pro needs no --tokenizer_source, since its folder holds everything; Lumina-mGPT takes Meta's:

    python -m ported_weights --model=janus-pro-1b --source=Janus-Pro-1B --out=checkpoints/janus-1b
    python -m ported_weights --model=lumina-mgpt-7b-768 --source=Lumina-mGPT-7B-768 \\
        --tokenizer_source=chameleon/tokenizer/vqgan.ckpt --out=checkpoints/lumina-768

Models of other sizes: --model=var-custom or infinity-custom with --config and --tokenizer_config,
JSON files that use the argument names of the published constructors.
"""

import dataclasses
import shlex
from pathlib import Path

from ported_weights import convert, hub
from ported_weights.configurations import PublishedModel
from varjax.cli import command_line
from varjax.cli.flags import CommandFlags
from varjax.errors import UserError
from varjax.sampling import RECOMMENDABLE
from varjax.storage.names import converted

ENCODER_ALONE = "flan-t5"  # of any size: its config.json says which
FLAGS = CommandFlags(
    "--model=var-d16 --source=hub", "model source tokenizer_source out dtype overwrite"
)

GIVEN = [  # with the names of `PublishedModel` and of the arguments of `convert`
    FLAGS.enum(
        "model",
        None,
        (*convert.MODELS, ENCODER_ALONE, *convert.NETWORKS),
        "Which published model, *-custom, a text encoder alone, or a network of evaluation.",
    ),
    FLAGS.string(
        "source",
        None,
        "Transformer weights: a file, or a folder of shards; flan-t5: its folder; or hub.",
    ),
    FLAGS.string("tokenizer_source", None, "Weights of the image tokenizer."),
    FLAGS.string("text_encoder_source", None, "Text models: folder of the published flan-t5."),
    FLAGS.string(
        "config",
        None,
        "*-custom models: JSON file with the transformer's arguments; for Janus-Pro and Lumina-mGPT"
        " by default the config.json beside --source.",
    ),
    FLAGS.string("tokenizer_config", None, "*-custom models: the same for the tokenizer."),
    FLAGS.string(
        "out",
        None,
        "Folder to create; default, with --source=hub: where --checkpoint=NAME looks.",
    ),
    FLAGS.enum("dtype", None, convert.DTYPES, "Type to store; by default that of the source."),
    FLAGS.string("class_names", None, "JSON list of class names, index = label."),
    FLAGS.string("sampling", None, f"JSON file: recommended {', '.join(RECOMMENDABLE)}."),
    FLAGS.string("source_key", None, "Which state dict of --source, for example ema."),
    FLAGS.string("tokenizer_source_key", None, "Which state dict of --tokenizer_source."),
    FLAGS.string(
        "prompt_tokenizer_source",
        None,
        "Janus-Pro, Lumina-mGPT: tokenizer.json of prompts; by default the one beside --source.",
    ),
    FLAGS.string(
        "vocabulary",
        None,
        "Lumina-mGPT: JSON file with names and ids of tokens, if none lies beside --source.",
    ),
    FLAGS.string("heads_source", None, "lpips-*: weights of the heads, such as alex.pth."),
    FLAGS.boolean("overwrite", False, "Replace --out if it exists."),
]
for _name in ("model", "source"):
    FLAGS.require(_name)


def main(argv) -> None:
    """Convert what the flags say."""
    del argv
    given = {flag.name: flag.value for flag in GIVEN}
    if given["source"] == hub.HUB:
        given |= _fetched(given)
    if not given["out"]:
        raise UserError("--out is required (Folder to create), unless --source=hub is given")
    model, source, out = given["model"], given["source"], given["out"]
    dtype, overwrite = given["dtype"], given["overwrite"]
    if model == ENCODER_ALONE:
        _refuse_others(given, "source", "out", "dtype", "overwrite")
        convert.convert_text_encoder(source, out, dtype=dtype, overwrite=overwrite)
        place = shlex.quote(out)
        print(f"written; next: python -m experiments.encode_text --checkpoint={place} ...")
    elif model in convert.NETWORKS:
        _refuse_others(given, "source", "heads_source", "out", "overwrite")
        heads = given["heads_source"]
        convert.convert_network(model, source, out, heads_source=heads, overwrite=overwrite)
        flag = f"--{convert.NETWORKS[model]}={shlex.quote(out)}"
        print(f"written; next: python -m experiments.evaluate {flag} ...")
    else:
        names = [field.name for field in dataclasses.fields(PublishedModel)]
        _refuse_others(given, *names, "out", "dtype", "overwrite")
        files = {name: given[name] for name in names}
        convert.convert(PublishedModel(**files), out, dtype=dtype, overwrite=overwrite)
        name = model if Path(out) == converted(model) else shlex.quote(out)
        print(f"next: python -m experiments.run --checkpoint={name} --policy=headkv")


def _fetched(given: dict) -> dict:
    """Return --out and the files of --source=hub. --out is checked before anything is loaded."""
    model = given["model"]
    out = Path(given["out"] or converted(model))
    if not given["out"] and model in hub.names():
        out.parent.mkdir(parents=True, exist_ok=True)
    convert.check_output(str(out), given["dtype"], given["overwrite"])
    return {"out": str(out), **hub.fetch(model, given)}


def _refuse_others(given: dict, *names: str) -> None:
    """`UserError` if flags are given that the model does not take. names: those that it takes."""
    surplus = [f"--{name}" for name in given if given[name] and name not in ("model", *names)]
    if surplus:
        them = "it" if len(surplus) == 1 else "them"
        raise UserError(f"--model={given['model']} takes no {', '.join(surplus)}: drop {them}")


if __name__ == "__main__":
    command_line.run(main)
