"""Where the tensors of Janus-Pro go: `varjax.models.janus.transformer.Janus`. Its image tokenizer
is LlamaGen's (`ported_weights.tables.llamagen.tokenizer_rules`), in the same files under `CODEC`.

Janus-Pro reads pictures with one network and draws them with another. Only what draws is taken.
"""

from collections.abc import Collection, Mapping

from ported_weights.rules import Ignore, Rule, linear
from ported_weights.tables import llama
from varjax.models.janus.config import JanusConfig

CODEC = "gen_vision_model."  # before the names of the image tokenizer
# What a checkpoint that draws has: (a name, what it is)
NEEDED = (
    ("language_model.model.embed_tokens.weight", "the language model"),
    ("gen_embed.weight", "the embedding of image tokens"),
    ("gen_head.vision_head.weight", "the head for image tokens"),
)


def transformer_rules(config: JanusConfig, names: Collection[str] = ()) -> list[Rule | Ignore]:
    """Return the rule table of a transformer."""
    return [
        *llama.decoder(r"language_model\.model\.", config),
        Rule(r"gen_embed\.weight", "image_embedding"),
        *linear(r"gen_aligner\.layers\.0", "aligner1"),
        *linear(r"gen_aligner\.layers\.2", "aligner2"),
        *linear(r"gen_head\.output_mlp_projector", "head_hidden"),
        *linear(r"gen_head\.vision_head", "head"),
        Ignore(r"gen_vision_model\..*", "the image tokenizer, a part of its own"),
        Ignore(r"vision_model\..*|aligner\..*", "the network that reads pictures"),
        Ignore(r"language_model\.lm_head\.weight", "the head for words"),
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
