"""Where the tensors of LlamaGen go: `varjax.models.llamagen.transformer.LlamaGen` and its image
tokenizer, `varjax.codecs.vq.model.VQ`.

In the transformer, layers are stacked: `layers.N.` is index N on the leading axis. The tokenizer's
blocks are numbered in the order in which they run, ours by size, the finest first: those of the
decoder are turned round.
"""

from collections.abc import Collection

import numpy as np

from ported_weights.rules import Ignore, Refuse, Rule, layer
from varjax.codecs.vq.config import VQConfig
from varjax.models.llamagen.config import LlamaGenConfig

_N = r"layers\.(\d+)\."
_LINEAR = {  # of a layer: published name, ours
    r"attention\.wqkv": "qkv",
    r"attention\.wo": "proj",
    r"feed_forward\.w2": "down",
}
_GATE_UP = r"feed_forward\.w1", r"feed_forward\.w3"  # of a layer, side by side in one product
_NORMS = {"attention_norm": "attention_norm", "ffn_norm": "feed_forward_norm"}
_TEXT, _LABELS = r"cls_embedding\.(cap_proj\..*|uncond_embedding)", r"cls_embedding\.embedding_.*"
_USED = 65536  # length of the tokenizer's record of the codes that it used last


def transformer_rules(
    config: LlamaGenConfig, names: Collection[str] = ()
) -> list[Rule | Ignore | Refuse]:
    """Rules for a transformer of this configuration."""
    return [
        *_condition(config),
        Rule(r"tok_embeddings\.weight", "token_embedding"),
        *(_linear(_N + name, f"blocks/{target}", 1) for name, target in _LINEAR.items()),
        *(_linear(_N + n, "blocks/gate_up", 1, section=(i, 2)) for i, n in enumerate(_GATE_UP)),
        *(Rule(rf"{_N}{n}\.weight", f"blocks/{t}", stack=1) for n, t in _NORMS.items()),
        Rule(r"norm\.weight", "norm"),
        _linear("output", "head"),
        Ignore(r"freqs_cis", "cosines and sines of positions, which follow from the configuration"),
        Ignore(_N + r"attention\.kv_cache\..*", "the cache of a run"),
        Ignore(r"causal_mask", "the mask of a run"),
    ]


def _condition(config: LlamaGenConfig) -> list[Rule | Refuse]:
    if config.condition == "labels":
        return [
            Rule(r"cls_embedding\.embedding_table\.weight", "class_embedding"),
            Refuse(_TEXT, "the configuration says model_type c2i, the weights t2i"),
        ]
    return [
        Rule(r"cls_embedding\.uncond_embedding", "unconditional_text"),
        *(_linear(rf"cls_embedding\.cap_proj\.fc{i}", f"text_proj{i}") for i in (1, 2)),
        Refuse(_LABELS, "the configuration says model_type t2i, the weights c2i"),
    ]


def _linear(pattern: str, target: str, stack: int | None = None, section=None) -> Rule:
    """A linear layer without bias."""
    return Rule(rf"{pattern}\.weight", f"{target}/kernel", "linear", stack, section=section)


# --- the image tokenizer --------------------------------------------------------------------------


def tokenizer_rules(config: VQConfig, names: Collection[str] = ()) -> list[Rule | Ignore]:
    """Rules for a tokenizer of this configuration."""
    rules = [
        Rule(r"quantize\.embedding\.weight", "embedding"),
        *(r for n in ("quant_conv", "post_quant_conv") for r in _product(n, n)),
        Ignore(r"quantize\.codebook_used", "statistics of the training run", _check_used),
    ]
    levels = len(config.ch_mult)
    for net, ours in (("encoder", "down"), ("decoder", "up")):
        rules += _ends(net)
        for i in range(levels):
            level = i if net == "encoder" else levels - 1 - i
            rules += _level(rf"{net}\.conv_blocks\.{i}", f"{net}/{ours}/{level}")
    return rules


def _ends(net: str) -> list[Rule]:
    """What is before and behind the levels."""
    rules = []
    for name in ("conv_in", "conv_out"):
        rules += layer(rf"{net}\.{name}", f"{net}/{name}", "kernel", "conv")
    rules += layer(rf"{net}\.norm_out", f"{net}/norm_out", "scale", None)
    rules += _residual(rf"{net}\.mid\.0", f"{net}/mid/block_1")
    rules += _attention(rf"{net}\.mid\.1", f"{net}/mid/attn_1")
    return rules + _residual(rf"{net}\.mid\.2", f"{net}/mid/block_2")


def _level(source: str, target: str) -> list[Rule]:
    resampling = layer(rf"{source}\.(downsample|upsample)\.conv", rf"{target}/\1", "kernel", "conv")
    return [
        *_residual(rf"{source}\.res\.(\d+)", rf"{target}/block/\1", number=2),
        *_attention(rf"{source}\.attn\.(\d+)", rf"{target}/attn/\1"),
        *resampling,
    ]


def _residual(source: str, target: str, number: int = 1) -> list[Rule]:
    """A residual block; number: the next group of the pattern."""
    return [
        *layer(rf"{source}\.(conv\d)", rf"{target}/\{number}", "kernel", "conv"),
        *layer(rf"{source}\.(norm\d)", rf"{target}/\{number}", "scale", None),
        *_product(rf"{source}\.nin_shortcut", f"{target}/nin_shortcut"),
    ]


def _attention(source: str, target: str) -> list[Rule]:
    """Queries, keys and values are one product here."""
    parts = enumerate("qkv")
    return [
        *(r for i, n in parts for r in _product(rf"{source}\.{n}", f"{target}/qkv", (i, 3))),
        *_product(rf"{source}\.proj_out", f"{target}/proj_out"),
        *layer(rf"{source}\.norm", f"{target}/norm", "scale", None),
    ]


def _product(source: str, target: str, section=None) -> list[Rule]:
    """A 1x1 convolution."""
    return layer(source, target, "kernel", "conv1x1_to_linear", section=section)


def _check_used(used: np.ndarray) -> str | None:
    if used.shape == (_USED,):
        return None
    return f"has shape {list(used.shape)} instead of [{_USED}]: these are other weights"
