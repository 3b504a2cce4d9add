"""Rules for the tensors of published transformers: `varjax.models.var.VAR`,
`varjax.models.infinity.transformer.Infinity`, and the encoder of T5 (flan-t5),
`varjax.text.t5.T5Encoder`.

Layers are stacked: `blocks.N.` is index N on the leading axis. The six modulation vectors (AdaLN)
keep the published order: two gates, two scales, two shifts. So do the head's two: scale, shift.
"""

import re
from collections.abc import Collection, Mapping

import numpy as np

from ported_weights.rules import Ignore, Refuse, Stack, Take, linear, product, zero_key_bias
from varjax.core.errors import some
from varjax.core.sequence import Schedule
from varjax.models.infinity.transformer import InfinityConfig
from varjax.models.var import VARConfig

_N = r"blocks\.(\d+)\."
_CHUNKED = r"block_chunks\.(\d+)\.module\.(\d+)\."
_POOL = r"text_proj_for_sos\.ca"
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")  # two names of T5's one table
_T5_N = r"encoder\.block\.(\d+)\."


# --- VAR and Infinity -----------------------------------------------------------------------------


_AROUND_LAYERS = [  # what both have before and after their layers
    Take(r"pos_start", "start_embedding", "drop_axis"),
    Take(r"lvl_embed\.weight", "level_embedding"),
    *linear(r"word_embed", "word_embedding"),
    *linear(r"head_nm\.ada_lin\.1", "head_modulation"),
    *linear(r"head", "head"),
]


def _layers(prefix: str, attention: str, stack: Stack, model: str) -> list[Take | Ignore]:
    """Return the rules for what both have in a layer. attention: its published name in a layer."""
    own = rf"{prefix}{attention}"
    return [
        Take(rf"{own}\.mat_qkv\.weight", "blocks/qkv/kernel", "linear", stack),
        Take(rf"{own}\.q_bias", "blocks/q_bias", stack=stack),
        Take(rf"{own}\.v_bias", "blocks/v_bias", stack=stack),
        *linear(rf"{own}\.proj", "blocks/proj", stack),
        *linear(rf"{prefix}ffn\.fc1", "blocks/fc1", stack),
        *linear(rf"{prefix}ffn\.fc2", "blocks/fc2", stack),
        zero_key_bias(own, model),
    ]


def var_rules(config: VARConfig, names: Collection[str] = ()) -> list[Take | Ignore | Refuse]:
    """Return the rule table of VAR."""
    multiplier, offset, own = _N + r"attn\.scale_mul_1H11", _N + r"ada_gss", _N + r"ada_lin\.1"
    if config.attn_l2_norm:  # of queries, with a learned multiplier per head, (1, N, 1, 1)
        scale = Take(multiplier, "blocks/log_scale", "flatten", stack=1)
    else:
        scale = Refuse(multiplier, "the configuration says attn_l2_norm false, the weights true")
    if config.shared_aln:  # one projection for all layers, and an offset (1, 1, 6, D) in each
        modulation = [
            *linear(r"shared_ada_lin\.1", "shared_modulation"),
            Take(offset, "blocks/modulation_offset", ("drop_axis", "drop_axis"), stack=1),
            Refuse(rf"{own}\..*", "the configuration says shared_aln true, the weights false"),
        ]
    else:
        reason = "the configuration says shared_aln false, the weights true"
        modulation = linear(own, "blocks/modulation", stack=1)
        modulation += [Refuse(rf"{offset}|shared_ada_lin\..*", reason)]
    return [
        Take(r"class_emb\.weight", "class_embedding"),
        Take(r"pos_1LC", "position_embedding", "drop_axis"),
        *_AROUND_LAYERS,
        *_layers(_N, "attn", 1, "VAR"),
        scale,
        *modulation,
        Ignore("attn_bias_for_masking", "the block-causal mask, which follows from the schedule"),
        Ignore("lvl_1L", "the scale of every token", lambda a: _disagrees(a, config.schedule)),
    ]


def _disagrees(levels: np.ndarray, schedule: Schedule) -> str | None:
    """Say what is wrong with the buffer lvl_1L, int [1, L], under `schedule`; None: nothing."""
    if np.array_equal(levels.reshape(-1), schedule.scale_of_token):
        return None
    _, counts = np.unique(levels, return_counts=True)
    there, wanted = (some(map(str, numbers)) for numbers in (counts, schedule.tokens))
    return (
        f"belongs to another schedule: tokens per scale {there} in the weights, {wanted} by the"
        " configuration (patch_nums)"
    )


def infinity_rules(config: InfinityConfig, names: Collection[str] = ()) -> list[Take | Ignore]:
    """Return the rule table of Infinity for a file with these `names`.

    The published blocks come in chunks: `block_chunks.I.module.J.` is layer I * (layers of a chunk)
    + J. Models with one chunk call their layers `blocks.I.`. The names in the file decide which it
    is and how long a chunk is. The configuration's `block_chunks` decides only without names.
    """
    per_chunk, is_chunked = config.depth // config.block_chunks, config.block_chunks > 1
    if inner := [int(m[2]) for m in map(re.compile(_CHUNKED).match, names) if m]:
        per_chunk, is_chunked = 1 + max(inner), True
    elif names:
        is_chunked = False
    chunked, plain = (_CHUNKED, (1, 2, per_chunk)), (_N, 1)
    blocks = []  # under both names: what is in the file first, since messages name the first
    for prefix, stack in (chunked, plain) if is_chunked else (plain, chunked):
        blocks += [
            *_layers(prefix, "sa", stack, "Infinity"),
            Take(prefix + r"ada_gss", "blocks/modulation_offset", ("drop_axis",) * 2, stack),
            Take(prefix + r"sa\.scale_mul_1H11", "blocks/log_scale", "flatten", stack),
            Take(prefix + r"ca_norm\.weight", "blocks/cross_norm/scale", stack=stack),
            Take(prefix + r"ca_norm\.bias", "blocks/cross_norm/bias", stack=stack),
            *linear(prefix + r"ca\.mat_q", "blocks/cross_q", stack),
            Take(prefix + r"ca\.mat_kv\.weight", "blocks/cross_kv/kernel", "linear", stack),
            Take(prefix + r"ca\.v_bias", "blocks/cross_v_bias", stack=stack),
            *linear(prefix + r"ca\.proj", "blocks/cross_proj", stack),
            zero_key_bias(prefix + "ca", "Infinity"),
        ]
    return [
        Take(r"cfg_uncond", "unconditional_text", row_limit="text_maxlen"),
        Take(r"text_norm\.weight", "text_norm"),
        Take(_POOL + r"\.mat_q", "text_pool/query", "drop_axis"),
        Take(_POOL + r"\.mat_kv\.weight", "text_pool/kv/kernel", "linear"),
        Take(_POOL + r"\.v_bias", "text_pool/v_bias"),
        zero_key_bias(_POOL, "Infinity"),
        *linear(_POOL + r"\.proj", "text_pool/proj"),
        *linear(r"text_proj_for_ca\.0", "text_proj1"),
        *linear(r"text_proj_for_ca\.2", "text_proj2"),
        *linear(r"shared_ada_lin\.1", "shared_modulation"),
        *_AROUND_LAYERS,
        *blocks,
    ]


# --- T5 -------------------------------------------------------------------------------------------


def t5_rules(names: Collection[str] = EMBEDDINGS) -> list[Take | Ignore]:
    """Return the rule table of an encoder of any size for a file with these `names`.

    Only the encoder is taken; full checkpoints also hold a decoder. The embedding has two names,
    and files hold one or both. The published code takes `shared`.

    names: {name: tensor}, so that both can be compared; names alone: they are not.
    """
    taken, other = EMBEDDINGS if EMBEDDINGS[0] in names else reversed(EMBEDDINGS)
    tensor = names.get(taken) if isinstance(names, Mapping) else None
    bias = r"encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight"
    return [
        Take(re.escape(taken), "embedding"),
        Ignore(re.escape(other), f"the same table as {taken}", same_as=tensor),
        Take(bias, "position_bias"),
        Take(_T5_N + r"layer\.0\.layer_norm\.weight", "blocks/attention_norm", stack=1),
        product(_T5_N + r"layer\.0\.SelfAttention\.([qkvo])", r"blocks/\2", 1),
        Take(_T5_N + r"layer\.1\.layer_norm\.weight", "blocks/feed_forward_norm", stack=1),
        product(_T5_N + r"layer\.1\.DenseReluDense\.wi_0", "blocks/gate", 1),
        product(_T5_N + r"layer\.1\.DenseReluDense\.wi_1", "blocks/up", 1),
        product(_T5_N + r"layer\.1\.DenseReluDense\.wo", "blocks/down", 1),
        Take(r"encoder\.final_layer_norm\.weight", "final_norm"),
        Ignore(r"decoder\..*", "the decoder of the language model: only the encoder is needed"),
        Ignore(r"lm_head\.weight", "the output layer of the decoder"),
    ]


def t5_storage_dtype(tensors: Mapping) -> str:
    """Choose bfloat16 if all weights are bfloat16, else float32: float16 may overflow."""
    own = [t for name, t in tensors.items() if name.startswith(("encoder.", "shared."))]
    return "bfloat16" if {np.dtype(t.dtype).name for t in own} == {"bfloat16"} else "float32"
