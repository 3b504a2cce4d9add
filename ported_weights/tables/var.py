"""Where the tensors of a published VAR checkpoint go in `varjax.models.var.transformer.VAR`.

Layers are stacked: `blocks.N.` is index N on the leading axis. The six AdaLN vectors keep the
published order (two gates, two scales, two shifts), the head's two as well (scale, shift).
"""

from collections.abc import Collection

import numpy as np

from ported_weights.rules import Ignore, Refuse, Rule, linear, zero_key_bias
from varjax.models.var.transformer import VARConfig
from varjax.schedule import Schedule

# Names that tell VAR's weights from others, Infinity's included.
SIGNATURE = ("pos_1LC", "class_emb.weight")
_N = r"blocks\.(\d+)\."


def var_rules(config: VARConfig, names: Collection[str] = ()) -> list[Rule | Ignore | Refuse]:
    """Rules for a transformer of this configuration."""
    return [
        Rule(r"class_emb\.weight", "class_embedding"),
        Rule(r"pos_start", "start_embedding", "drop_axis"),
        Rule(r"pos_1LC", "position_embedding", "drop_axis"),
        Rule(r"lvl_embed\.weight", "level_embedding"),
        *linear(r"word_embed", "word_embedding"),
        *linear(r"head_nm\.ada_lin\.1", "head_modulation"),
        *linear(r"head", "head"),
        Rule(_N + r"attn\.mat_qkv\.weight", "blocks/qkv/kernel", "linear", stack=1),
        Rule(_N + r"attn\.(q_bias|v_bias)", r"blocks/\2", stack=1),
        *linear(_N + r"attn\.proj", "blocks/proj", stack=1),
        *linear(_N + r"ffn\.fc1", "blocks/fc1", stack=1),
        *linear(_N + r"ffn\.fc2", "blocks/fc2", stack=1),
        *_attention_scale(config),
        *_modulation(config),
        zero_key_bias(_N + "attn", "VAR"),
        Ignore("attn_bias_for_masking", "the block-causal mask, which follows from the schedule"),
        Ignore("lvl_1L", "the scale of every token", lambda a: _disagrees(a, config.schedule)),
    ]


def _attention_scale(config: VARConfig) -> list[Rule | Refuse]:
    """The learned multiplier per head, (1, N, 1, 1); only normalised queries have it."""
    name = _N + r"attn\.scale_mul_1H11"
    if config.attn_l2_norm:
        return [Rule(name, "blocks/log_scale", "flatten", stack=1)]
    return [Refuse(name, "the configuration says attn_l2_norm false, the weights true")]


def _modulation(config: VARConfig) -> list[Rule | Refuse]:
    """AdaLN: one projection for all layers plus an offset (1, 1, 6, D) in each, or one in each."""
    offset, own = _N + r"ada_gss", _N + r"ada_lin\.1"
    if config.shared_aln:
        return [
            *linear(r"shared_ada_lin\.1", "shared_modulation"),
            Rule(offset, "blocks/modulation_offset", ("drop_axis", "drop_axis"), stack=1),
            Refuse(rf"{own}\..*", "the configuration says shared_aln true, the weights false"),
        ]
    return [
        *linear(own, "blocks/modulation", stack=1),
        Refuse(
            rf"{offset}|shared_ada_lin\..*",
            "the configuration says shared_aln false, the weights true",
        ),
    ]


def _disagrees(levels: np.ndarray, schedule: Schedule) -> str | None:
    """What is wrong with the buffer lvl_1L, int [1, L], under `schedule`."""
    if np.array_equal(levels.reshape(-1), schedule.scale_of_token):
        return None
    _, counts = np.unique(levels, return_counts=True)
    return (
        f"belongs to another schedule: tokens per scale {_listed(counts)} in the weights,"
        f" {_listed(schedule.tokens)} by the configuration (patch_nums)"
    )


def _listed(counts) -> str:
    return ", ".join(str(c) for c in counts[:20]) + (", ..." if len(counts) > 20 else "")
