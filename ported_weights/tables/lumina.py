"""Rules for the tensors of Lumina-mGPT: `varjax.models.lumina.Lumina`. Those of
Chameleon's image tokenizer have our names (`ported_weights.tables.codecs.vq_table`).

The published head has a row for every token of the vocabulary. Ours has a column for every code of
the image tokenizer, in the order of codes: within an image nothing else may be drawn.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ported_weights.rules import Ignore, Take
from ported_weights.tables import llama
from varjax.core.errors import UserError, about
from varjax.models.lumina import PATCH, LuminaConfig, image_ids
from varjax.storage.manifest import read_json

_N = r"model\.layers\.(\d+)\."
# What a checkpoint that draws has: (a name, what it is)
NEEDED = (
    ("model.embed_tokens.weight", "the language model"),
    ("model.layers.0.self_attn.q_norm.weight", "Chameleon's norm of queries and keys"),
    ("lm_head.weight", "the head"),
)
# Chameleon's tokenizer of prompts lies beside vqgan.ckpt, or in a folder beside the weights.
TOKENIZERS = (
    "text_tokenizer.json",
    "tokenizer/text_tokenizer.json",
    "chameleon/tokenizer/text_tokenizer.json",
)


def transformer_rules(config: LuminaConfig, names: Collection[str] = ()) -> list[Take | Ignore]:
    """Return the rule table of a transformer."""
    image_ids = config.token_ids[: config.vocab_size]
    norms = []
    for kind in ("q_norm", "k_norm"):
        for theirs, ours in (("weight", "scale"), ("bias", "bias")):
            pattern = rf"{_N}self_attn\.{kind}\.{theirs}"
            norms.append(Take(pattern, f"blocks/{kind}/{ours}", stack=1))
    return [
        *llama.decoder(r"model\.", config),
        *norms,
        Take(r"lm_head\.weight", "head/kernel", "linear", rows=image_ids),
        Ignore(r"model\.vqmodel\..*", "the image tokenizer, which --tokenizer_source gives"),
    ]


# --- what other files say -------------------------------------------------------------------------


def with_units(given: Mapping) -> Mapping:
    """Return the arguments of a model of one's own with height and width in units: the released
    ones, or where its context is shorter the largest square that fits."""
    model = given.get("model", given)
    prompt = given.get("prompt_tokens", LuminaConfig.prompt_tokens)
    side = llama.side_that_fits(
        model, prompt, lambda n: PATCH * n * (PATCH * n + 1), LuminaConfig.units[0]
    )  # new lines included
    own = model if isinstance(model, Mapping) else {}
    fits = "units" in given or "units" in own or side is None
    return given if fits else {**given, "units": [side, side]}


def with_image_ids(config: LuminaConfig, file: str | None, folders: Sequence[Path]) -> LuminaConfig:
    """Return the configuration with the ids of image tokens, which are in no order.

    Args:
      file: a config.json or a tokenizer file with the vocabulary. None: unless the configuration
        has ids already, the first file of `folders` that has names.

    Raises:
      UserError: there is no vocabulary, or it is damaged or another model's.
    """
    if file is None and config.image_ids:
        return config
    file = Path(file) if file else _vocabulary_file(folders)
    with about(file):
        names = _names(read_json(file))
        if names is None:
            raise UserError(
                "no vocabulary in it: expected a config.json with vocabulary_map, or a tokenizer"
                " file with model and vocab in it"
            )
        ids = image_ids(names)
        if len(ids) != config.vocab_size:
            raise UserError(f"it names {len(ids)} codes, the model has {config.vocab_size}")
        return dataclasses.replace(config, image_ids=ids, first_image=min(ids))


def _vocabulary_file(folders: Sequence[Path]) -> Path:
    """Return the first file in the folders that has a vocabulary."""
    for folder in folders:
        config = folder / "config.json"
        if config.is_file() and _names(read_json(config)) is not None:
            return config
        if found := next(filter(Path.is_file, (folder / name for name in TOKENIZERS)), None):
            return found
    looked = " and ".join(dict.fromkeys(map(str, folders)))
    raise UserError(
        "which token stands for which code of the image tokenizer is in no file that was found:"
        " give --vocabulary=FILE, the config.json published with the weights (its vocabulary_map),"
        f" or Chameleon's text_tokenizer.json (looked for in {looked})"
    )


def _names(content: object) -> Mapping | None:
    """Return the vocabulary of a file, {name: id}; None if it has none."""
    if not isinstance(content, Mapping):
        return None
    for name in ("vocabulary_map", "image_vocab"):
        if isinstance(content.get(name), Mapping):
            return content[name]
    model = content.get("model")
    found = model.get("vocab") if isinstance(model, Mapping) else None
    return found if isinstance(found, Mapping) else None
