"""Where the tensors of LlamaGen go: `varjax.models.llamagen.LlamaGen` and its image
tokenizer, `varjax.codecs.vq.VQ`.

In the transformer, layers are stacked: `layers.N.` is index N on the leading axis. The published
tokenizer numbers its blocks in the order in which they run. Ours are numbered by size, the finest
first, so the order of the decoder's is reversed.
"""

import re
from collections.abc import Collection, Mapping

import numpy as np

from ported_weights.rules import Ignore, Refuse, Rule, layer, product
from ported_weights.tables.codecs import vq_rules
from varjax.codecs.vq import VQConfig
from varjax.models.llamagen import LlamaGenConfig

_N = r"layers\.(\d+)\."
_LINEAR = {  # {published name in a layer: ours}
    r"attention\.wqkv": "qkv",
    r"attention\.wo": "proj",
    r"feed_forward\.w2": "down",
}
_TEXT, _LABELS = r"cls_embedding\.(cap_proj\..*|uncond_embedding)", r"cls_embedding\.embedding_.*"
# {part of our names: original}; transformers saves the tokenizer of Janus-Pro under ours
_RENAMED = {
    **dict.fromkeys((r"\.up\.", r"\.down\."), r"\.conv_blocks\."),
    **{r"\.block\.": r"\.res\.", "block_1": "0", "attn_1": "1", "block_2": "2"},
}
_USED = 65536  # length of the tokenizer's record of the codes that it used last


def transformer_rules(
    config: LlamaGenConfig, names: Collection[str] = ()
) -> list[Rule | Ignore | Refuse]:
    """Return the rule table of a transformer."""
    return [
        *_condition(config),
        Rule(r"tok_embeddings\.weight", "token_embedding"),
        *_layers(),
        Rule(r"norm\.weight", "norm"),
        product("output", "head"),
        Ignore(r"freqs_cis", "cosines and sines of positions, which follow from the configuration"),
        Ignore(_N + r"attention\.kv_cache\..*", "the cache of a run"),
        Ignore(r"causal_mask", "the mask of a run"),
    ]


def _layers() -> list[Rule]:
    """Return the rules for what every layer has."""
    rules = [product(_N + name, f"blocks/{target}", 1) for name, target in _LINEAR.items()]
    for number, name in enumerate(("w1", "w3")):  # side by side in one product here
        source = rf"{_N}feed_forward\.{name}"
        rules.append(product(source, "blocks/gate_up", 1, (number, (1, 1))))
    return [
        *rules,
        Rule(rf"{_N}attention_norm\.weight", "blocks/attention_norm", stack=1),
        Rule(rf"{_N}ffn_norm\.weight", "blocks/feed_forward_norm", stack=1),
    ]


def _condition(config: LlamaGenConfig) -> list[Rule | Refuse]:
    """Return the rules for class embeddings or for the projection of texts."""
    if config.condition == "labels":
        return [
            Rule(r"cls_embedding\.embedding_table\.weight", "class_embedding"),
            Refuse(_TEXT, "the configuration says model_type c2i, the weights t2i"),
        ]
    return [
        Rule(r"cls_embedding\.uncond_embedding", "unconditional_text"),
        product(r"cls_embedding\.cap_proj\.fc1", "text_proj1"),
        product(r"cls_embedding\.cap_proj\.fc2", "text_proj2"),
        Refuse(_LABELS, "the configuration says model_type t2i, the weights c2i"),
    ]


# --- the image tokenizer --------------------------------------------------------------------------


def tokenizer_rules(config: VQConfig, names: Collection[str] = ()) -> list[Rule | Ignore]:
    """Return the rule table of a tokenizer for a file with these `names`. Without `has_encoder`,
    what only the encoder needs is ignored."""
    middle = re.compile(r"(encoder|decoder)\.mid\.attn_1\.")
    renamed = {} if any(map(middle.match, names)) else _RENAMED
    linear = "kernel", "conv1x1_to_linear"
    rules = [
        Rule(r"quantize\.embedding\.weight", "embedding"),
        *layer("post_quant_conv", "post_quant_conv", *linear),
        Ignore(r"quantize\.codebook_used", "statistics of the training run", _check_used),
        *_coder("decoder", "up", len(config.ch_mult), renamed),
    ]
    if config.has_encoder:
        rules += layer("quant_conv", "quant_conv", *linear)
        return rules + _coder("encoder", "down", len(config.ch_mult), renamed)
    return [*rules, Ignore(r"encoder\..*|quant_conv\..*", "the encoder: generation only decodes")]


def _coder(net: str, kind: str, count: int, renamed: Mapping[str, str]) -> list[Rule]:
    """Return the rules for an encoder or decoder of `count` levels, which we call `kind`. renamed:
    {a part of our names: published}."""

    def published(pattern: str) -> str:
        if net == "decoder":  # the published levels are in the order in which they run
            last = count - 1
            pattern = re.sub(r"(?<=up\\.)\d+", lambda m: str(last - int(m[0])), pattern)
        for ours, theirs in renamed.items():
            pattern = pattern.replace(ours, theirs)
        return pattern

    return vq_rules(net, [rf"{kind}\.{i}" for i in range(count)], published)


def _check_used(used: np.ndarray) -> str | None:
    if used.shape == (_USED,):
        return None
    return f"has shape {list(used.shape)} instead of [{_USED}]: these are other weights"
