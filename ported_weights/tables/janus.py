"""Rules for the tensors of Janus-Pro: `varjax.models.janus.Janus`. Its image tokenizer is
LlamaGen's (`llamagen.tokenizer_rules`), in the same files under `codec` of `Names`.

Janus-Pro reads pictures with one network and draws them with another. Only what draws is taken.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ported_weights.rules import Ignore, Take, linear
from ported_weights.tables import llama
from varjax.models.janus import JanusConfig


@dataclass(frozen=True)
class Names:
    """Names of the parts of a Janus-Pro in files. The first three and `codec` are prefixes,
    `readers` is a pattern, the others are names of layers.

    language: before the names of the language model. codec: before those of the image tokenizer.
    readers: names of the networks that read pictures. words: the head for words.
    """

    language: str
    codec: str
    embedding: str
    aligner: tuple[str, str]
    head: tuple[str, str]
    readers: str
    words: str


ORIGINAL = Names(
    language="language_model.model.",
    codec="gen_vision_model.",
    embedding="gen_embed",
    aligner=("gen_aligner.layers.0", "gen_aligner.layers.2"),
    head=("gen_head.output_mlp_projector", "gen_head.vision_head"),
    readers=r"vision_model\..*|aligner\..*",
    words="language_model.lm_head",
)
# As the class JanusForConditionalGeneration of the package transformers saves them.
TRANSFORMERS = Names(
    language="model.language_model.",
    codec="model.vqmodel.",
    embedding="model.generation_embeddings",
    aligner=("model.generation_aligner.fc1", "model.generation_aligner.hidden_layers.0"),
    head=("model.generation_head.proj_out", "model.generation_head.vision_head"),
    readers=r"model\.vision_model\..*|model\.aligner\..*",
    words="lm_head",
)
_LAYERS = ("aligner1", "aligner2", "head_hidden", "head")  # ours of aligner and head
CODECS = (ORIGINAL.codec, TRANSFORMERS.codec)


def names_in(names: Collection[str]) -> Names:
    """Return how a file with these names calls the parts; without names the original ones."""
    own = TRANSFORMERS.language, TRANSFORMERS.embedding
    return TRANSFORMERS if any(name.startswith(own) for name in names) else ORIGINAL


def needed(names: Collection[str] = ()) -> Sequence[tuple[str, str]]:
    """Return (a name, what it is) of what a checkpoint that draws has."""
    own = names_in(names)
    return (
        (f"{own.language}embed_tokens.weight", "the language model"),
        (f"{own.embedding}.weight", "the embedding of image tokens"),
        (f"{own.head[1]}.weight", "the head for image tokens"),
    )


def transformer_rules(config: JanusConfig, names: Collection[str] = ()) -> list[Take | Ignore]:
    """Return the rule table of a transformer for a file with these `names`, which decide whether
    they are the original ones or those of the package transformers."""
    own = names_in(names)
    layers = zip(own.aligner + own.head, _LAYERS, strict=True)
    return [
        *llama.decoder(re.escape(own.language), config),
        Take(re.escape(f"{own.embedding}.weight"), "image_embedding"),
        *(rule for name, target in layers for rule in linear(re.escape(name), target)),
        Ignore(re.escape(own.codec) + ".*", "the image tokenizer, a part of its own"),
        Ignore(own.readers, "the network that reads pictures"),
        Ignore(re.escape(f"{own.words}.weight"), "the head for words"),
    ]


def codec_arguments(given: Mapping) -> tuple[dict, str]:
    """Return the arguments of the image tokenizer that a config.json describes, and a description.

    Published ones say how many codes there are and how wide they are; `vq_tiny` of a model of one's
    own has the rest. `UserError` for anything else there.
    """
    inside = JanusConfig.inside
    params = inside(inside(given, "gen_vision_config"), "params")
    names = {"image_token_size": "codebook_size", "n_embed": "codebook_embed_dim"}
    found = {ours: params[name] for name, ours in names.items() if name in params}
    return {**found, **inside(given, "vq_tiny"), "has_encoder": False}, "of VQ-16's kind"


def with_grid(given: Mapping) -> Mapping:
    """Return the arguments of a model of one's own with a grid: the released one, or where its
    context is shorter the largest square that fits."""
    prompt = given.get("prompt_tokens", JanusConfig.prompt_tokens)
    released = JanusConfig.grid[0]
    side = llama.side_that_fits(given.get("language_config"), prompt, lambda n: n * n, released)
    return given if "grid" in given or side is None else {**given, "grid": [side, side]}
