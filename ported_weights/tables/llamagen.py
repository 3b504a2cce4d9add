"""Where the tensors of LlamaGen go: `varjax.models.llamagen.transformer.LlamaGen` and its image
tokenizer, `varjax.codecs.vq.model.VQ`.

In the transformer, layers are stacked: `layers.N.` is index N on the leading axis. The published
tokenizer numbers its blocks in the order in which they run. Ours are numbered by size, the finest
first, so the order of the decoder's is reversed.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from ported_weights.rules import Ignore, Refuse, Rule, Section, layer
from varjax.codecs.vq.config import VQConfig
from varjax.models.llamagen.config import LlamaGenConfig

_N = r"layers\.(\d+)\."
_LINEAR = {  # {published name in a layer: ours}
    r"attention\.wqkv": "qkv",
    r"attention\.wo": "proj",
    r"feed_forward\.w2": "down",
}
_GATE_UP = r"feed_forward\.w1", r"feed_forward\.w3"  # side by side in one product here
_NORMS = {"attention_norm": "attention_norm", "ffn_norm": "feed_forward_norm"}
_TEXT, _LABELS = r"cls_embedding\.(cap_proj\..*|uncond_embedding)", r"cls_embedding\.embedding_.*"
_THIRDS = (1, 1, 1)  # queries, keys and values side by side


class _Names(NamedTuple):
    """How files call the levels of the tokenizer's encoder and decoder, the residual blocks of a
    level, and the three blocks in the middle."""

    encoder: str
    decoder: str
    residual: str
    middle: tuple[str, str, str]


_ORIGINAL = _Names("conv_blocks", "conv_blocks", "res", ("0", "1", "2"))
# As transformers saves the tokenizer of Janus-Pro. The order of levels is the original's.
_TRANSFORMERS = _Names("down", "up", "block", ("block_1", "attn_1", "block_2"))
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
        _linear("output", "head"),
        Ignore(r"freqs_cis", "cosines and sines of positions, which follow from the configuration"),
        Ignore(_N + r"attention\.kv_cache\..*", "the cache of a run"),
        Ignore(r"causal_mask", "the mask of a run"),
    ]


def _layers() -> list[Rule]:
    """Return the rules for what every layer has."""
    rules = [_linear(_N + name, f"blocks/{target}", 1) for name, target in _LINEAR.items()]
    for number, name in enumerate(_GATE_UP):
        rules.append(_linear(_N + name, "blocks/gate_up", 1, section=(number, (1, 1))))
    for name, target in _NORMS.items():
        rules.append(Rule(rf"{_N}{name}\.weight", f"blocks/{target}", stack=1))
    return rules


def _condition(config: LlamaGenConfig) -> list[Rule | Refuse]:
    """Return the rules for class embeddings or for the projection of texts."""
    if config.condition == "labels":
        return [
            Rule(r"cls_embedding\.embedding_table\.weight", "class_embedding"),
            Refuse(_TEXT, "the configuration says model_type c2i, the weights t2i"),
        ]
    return [
        Rule(r"cls_embedding\.uncond_embedding", "unconditional_text"),
        _linear(r"cls_embedding\.cap_proj\.fc1", "text_proj1"),
        _linear(r"cls_embedding\.cap_proj\.fc2", "text_proj2"),
        Refuse(_LABELS, "the configuration says model_type t2i, the weights c2i"),
    ]


def _linear(
    pattern: str,
    target: str,
    stack: int | None = None,
    section: Section | None = None,
) -> Rule:
    """Return the rule for a linear layer without bias."""
    return Rule(rf"{pattern}\.weight", f"{target}/kernel", "linear", stack, section=section)


# --- the image tokenizer --------------------------------------------------------------------------


def tokenizer_rules(config: VQConfig, names: Collection[str] = ()) -> list[Rule | Ignore]:
    """Return the rule table of a tokenizer for a file with these `names`. Without `has_encoder`,
    what only the encoder needs is ignored."""
    middle = re.compile(r"(encoder|decoder)\.mid\.attn_1\.")
    own = _TRANSFORMERS if any(map(middle.match, names)) else _ORIGINAL
    rules = [
        Rule(r"quantize\.embedding\.weight", "embedding"),
        *_product("post_quant_conv", "post_quant_conv"),
        Ignore(r"quantize\.codebook_used", "statistics of the training run", _check_used),
    ]
    nets, levels = [("decoder", "up")], len(config.ch_mult)
    if config.has_encoder:
        rules += _product("quant_conv", "quant_conv")
        nets.append(("encoder", "down"))
    else:
        reason = "the encoder: generation only decodes"
        rules.append(Ignore(r"encoder\..*|quant_conv\..*", reason))
    for net, ours in nets:
        rules += _ends(net, own)
        for i in range(levels):
            level = i if net == "encoder" else levels - 1 - i
            source = rf"{net}\.{getattr(own, net)}\.{i}"
            rules += _level(source, f"{net}/{ours}/{level}", own.residual)
    return rules


def _ends(net: str, own: _Names) -> list[Rule]:
    """Return the rules for what lies before and behind the levels."""
    rules, (first, attention, second) = [], own.middle
    for name in ("conv_in", "conv_out"):
        rules += layer(rf"{net}\.{name}", f"{net}/{name}", "kernel", "conv")
    rules += layer(rf"{net}\.norm_out", f"{net}/norm_out", "scale", None)
    rules += _residual(rf"{net}\.mid\.{first}", f"{net}/mid/block_1")
    rules += _attention(rf"{net}\.mid\.{attention}", f"{net}/mid/attn_1")
    return rules + _residual(rf"{net}\.mid\.{second}", f"{net}/mid/block_2")


def _level(source: str, target: str, residual: str) -> list[Rule]:
    """Return the rules for a level: blocks called `residual`, attention, resampling."""
    resampling = layer(rf"{source}\.(downsample|upsample)\.conv", rf"{target}/\1", "kernel", "conv")
    return [
        *_residual(rf"{source}\.{residual}\.(\d+)", rf"{target}/block/\1", number=2),
        *_attention(rf"{source}\.attn\.(\d+)", rf"{target}/attn/\1"),
        *resampling,
    ]


def _residual(source: str, target: str, number: int = 1) -> list[Rule]:
    """Return the rules for a residual block. number: the pattern's group with the layer's name."""
    return [
        *layer(rf"{source}\.(conv\d)", rf"{target}/\{number}", "kernel", "conv"),
        *layer(rf"{source}\.(norm\d)", rf"{target}/\{number}", "scale", None),
        *_product(rf"{source}\.nin_shortcut", f"{target}/nin_shortcut"),
    ]


def _attention(source: str, target: str) -> list[Rule]:
    """Return the rules for attention. Queries, keys and values are sections of one product here."""
    return [
        *_product(rf"{source}\.q", f"{target}/qkv", (0, _THIRDS)),
        *_product(rf"{source}\.k", f"{target}/qkv", (1, _THIRDS)),
        *_product(rf"{source}\.v", f"{target}/qkv", (2, _THIRDS)),
        *_product(rf"{source}\.proj_out", f"{target}/proj_out"),
        *layer(rf"{source}\.norm", f"{target}/norm", "scale", None),
    ]


def _product(source: str, target: str, section: Section | None = None) -> list[Rule]:
    """Return the rules for a 1x1 convolution, which is a matrix product here."""
    return layer(source, target, "kernel", "conv1x1_to_linear", section=section)


def _check_used(used: np.ndarray) -> str | None:
    if used.shape == (_USED,):
        return None
    return f"has shape {list(used.shape)} instead of [{_USED}]: these are other weights"
