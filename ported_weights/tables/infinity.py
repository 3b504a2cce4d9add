"""Where the tensors of a published Infinity checkpoint go in
`varjax.models.infinity.transformer.Infinity`.

Layers are stacked. The published blocks come in chunks: `block_chunks.I.module.J.` is layer
I * (layers of a chunk) + J; models of one chunk call them `blocks.I.`. The names in the file say
which it is and how long a chunk is, whatever the configuration's `block_chunks`. The six modulation
vectors keep the published order (two gates, two scales, two shifts), the head's two as well (scale,
shift).
"""

import re
from collections.abc import Collection

from ported_weights.rules import Ignore, Rule, Stack, linear, zero_key_bias
from varjax.models.infinity.transformer import InfinityConfig

# Names that tell Infinity's weights from others, VAR's included.
SIGNATURE = ("cfg_uncond", "text_norm.weight", "text_proj_for_ca.0.weight")
_CHUNKED = r"block_chunks\.(\d+)\.module\.(\d+)\."
_POOL = r"text_proj_for_sos\.ca"


def infinity_rules(config: InfinityConfig, names: Collection[str] = ()) -> list[Rule | Ignore]:
    """Rules for a transformer of this configuration, from a file with these `names`; without any,
    chunks are as configured."""
    per_chunk, is_chunked = config.depth // config.block_chunks, config.block_chunks > 1
    if inner := [int(m[2]) for m in map(re.compile(_CHUNKED).match, names) if m]:
        per_chunk, is_chunked = 1 + max(inner), True
    elif names:
        is_chunked = False
    chunked, plain = (_CHUNKED, (1, 2, per_chunk)), (r"blocks\.(\d+)\.", 1)
    ways = (chunked, plain) if is_chunked else (plain, chunked)
    return [
        Rule(r"cfg_uncond", "unconditional_text", row_limit="text_maxlen"),
        Rule(r"text_norm\.weight", "text_norm"),
        Rule(r"pos_start", "start_embedding", "drop_axis"),
        Rule(r"lvl_embed\.weight", "level_embedding"),
        Rule(_POOL + r"\.mat_q", "text_pool/query", "drop_axis"),
        Rule(_POOL + r"\.mat_kv\.weight", "text_pool/kv/kernel", "linear"),
        Rule(_POOL + r"\.v_bias", "text_pool/v_bias"),
        zero_key_bias(_POOL, "Infinity"),
        *linear(_POOL + r"\.proj", "text_pool/proj"),
        *linear(r"text_proj_for_ca\.0", "text_proj1"),
        *linear(r"text_proj_for_ca\.2", "text_proj2"),
        *linear(r"word_embed", "word_embedding"),
        *linear(r"shared_ada_lin\.1", "shared_modulation"),
        *linear(r"head_nm\.ada_lin\.1", "head_modulation"),
        *linear(r"head", "head"),
        *(rule for prefix, stack in ways for rule in _block(prefix, stack)),
    ]


def _block(prefix: str, stack: Stack) -> list[Rule | Ignore]:
    """One layer, under one way of naming it."""
    return [
        Rule(prefix + r"ada_gss", "blocks/modulation_offset", ("drop_axis",) * 2, stack),
        Rule(prefix + r"sa\.scale_mul_1H11", "blocks/log_scale", "flatten", stack),
        Rule(prefix + r"sa\.q_bias", "blocks/q_bias", stack=stack),
        Rule(prefix + r"sa\.v_bias", "blocks/v_bias", stack=stack),
        Rule(prefix + r"sa\.mat_qkv\.weight", "blocks/qkv/kernel", "linear", stack),
        *linear(prefix + r"sa\.proj", "blocks/proj", stack),
        Rule(prefix + r"ca_norm\.weight", "blocks/cross_norm/scale", stack=stack),
        Rule(prefix + r"ca_norm\.bias", "blocks/cross_norm/bias", stack=stack),
        *linear(prefix + r"ca\.mat_q", "blocks/cross_q", stack),
        Rule(prefix + r"ca\.mat_kv\.weight", "blocks/cross_kv/kernel", "linear", stack),
        Rule(prefix + r"ca\.v_bias", "blocks/cross_v_bias", stack=stack),
        *linear(prefix + r"ca\.proj", "blocks/cross_proj", stack),
        *linear(prefix + r"ffn\.fc1", "blocks/fc1", stack),
        *linear(prefix + r"ffn\.fc2", "blocks/fc2", stack),
        zero_key_bias(prefix + "sa", "Infinity"),
        zero_key_bias(prefix + "ca", "Infinity"),
    ]
