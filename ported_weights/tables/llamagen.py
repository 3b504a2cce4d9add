"""Rules for the tensors of LlamaGen: `varjax.models.llamagen.LlamaGen` and `varjax.codecs.vq.VQ`.

In the transformer, layers are stacked: `layers.N.` is index N on the leading axis. The published
tokenizer numbers its blocks in the order in which they run. Ours are numbered by size, the finest
first, so the order of the decoder's is reversed.
"""

import re
from collections.abc import Collection

import numpy as np

from ported_weights.rules import Ignore, Refuse, Take, product
from ported_weights.tables.codecs import vq_rules, vq_table
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
) -> list[Take | Ignore | Refuse]:
    """Return the rule table of a transformer."""
    if config.condition == "labels":
        condition = [
            Take(r"cls_embedding\.embedding_table\.weight", "class_embedding"),
            Refuse(_TEXT, "the configuration says model_type c2i, the weights t2i"),
        ]
    else:
        condition = [
            Take(r"cls_embedding\.uncond_embedding", "unconditional_text"),
            product(r"cls_embedding\.cap_proj\.fc1", "text_proj1"),
            product(r"cls_embedding\.cap_proj\.fc2", "text_proj2"),
            Refuse(_LABELS, "the configuration says model_type t2i, the weights c2i"),
        ]
    layers = [product(_N + name, f"blocks/{target}", 1) for name, target in _LINEAR.items()]
    for number, name in enumerate(("w1", "w3")):  # side by side in one product here
        source = rf"{_N}feed_forward\.{name}"
        layers.append(product(source, "blocks/gate_up", 1, (number, (1, 1))))
    return [
        *condition,
        Take(r"tok_embeddings\.weight", "token_embedding"),
        *layers,
        Take(rf"{_N}attention_norm\.weight", "blocks/attention_norm", stack=1),
        Take(rf"{_N}ffn_norm\.weight", "blocks/feed_forward_norm", stack=1),
        Take(r"norm\.weight", "norm"),
        product("output", "head"),
        Ignore(r"freqs_cis", "cosines and sines of positions, which follow from the configuration"),
        Ignore(_N + r"attention\.kv_cache\..*", "the cache of a run"),
        Ignore(r"causal_mask", "the mask of a run"),
    ]


# --- the image tokenizer --------------------------------------------------------------------------


def tokenizer_rules(config: VQConfig, names: Collection[str] = ()) -> list[Take | Ignore]:
    """Return the rule table of a tokenizer for a file with these `names`."""

    def check_used(used: np.ndarray) -> str | None:
        shown = f"has shape {list(used.shape)} instead of [{_USED}]: these are other weights"
        return None if used.shape == (_USED,) else shown

    middle = re.compile(r"(encoder|decoder)\.mid\.attn_1\.")
    renamed = {} if any(map(middle.match, names)) else _RENAMED
    count = len(config.ch_mult)

    def published(pattern: str) -> str:
        # the levels of the published decoder are in the order in which they run
        pattern = re.sub(r"(?<=up\\.)\d+", lambda m: str(count - 1 - int(m[0])), pattern)
        for ours, theirs in renamed.items():
            pattern = pattern.replace(ours, theirs)
        return pattern

    def coder(net: str) -> list[Take]:
        kind = {"decoder": "up", "encoder": "down"}[net]
        return vq_rules(net, [rf"{kind}\.{i}" for i in range(count)], published)

    used = Ignore(r"quantize\.codebook_used", "statistics of the training run", check_used)
    return [*vq_table(config, coder), used]
