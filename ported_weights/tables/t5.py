"""Where the tensors of a published T5 (flan-t5) go in `varjax.text.t5.T5Encoder`.

Only the encoder is taken; full checkpoints also hold a decoder. Layers are stacked:
`encoder.block.N.` is index N on the leading axis.
"""

from collections.abc import Collection, Mapping

import numpy as np

from ported_weights.rules import Ignore, Rule

# Names that tell a T5 encoder's weights from others.
SIGNATURE = ("encoder.final_layer_norm.weight", "encoder.block.0.layer.0.SelfAttention.q.weight")
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")  # two names of one table
_N = r"encoder\.block\.(\d+)\."
_FEED_FORWARD = (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down"))


def t5_rules(names: Collection[str] = EMBEDDINGS) -> list[Rule | Ignore]:
    """Rules for an encoder of any size, from a file with these `names`.

    The embedding has two names, of which files hold either or both; `shared` is what the published
    code takes.
    """
    taken, other = EMBEDDINGS if EMBEDDINGS[0] in names else reversed(EMBEDDINGS)
    bias = r"encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight"
    return [
        Rule(_escaped(taken), "embedding"),
        Ignore(_escaped(other), f"the same table as {taken}"),
        Rule(bias, "position_bias"),
        Rule(_N + r"layer\.0\.layer_norm\.weight", "blocks/attention_norm", stack=1),
        _projection(r"layer\.0\.SelfAttention\.([qkvo])", r"\2"),
        Rule(_N + r"layer\.1\.layer_norm\.weight", "blocks/feed_forward_norm", stack=1),
        *(_projection(rf"layer\.1\.DenseReluDense\.{n}", target) for n, target in _FEED_FORWARD),
        Rule(r"encoder\.final_layer_norm\.weight", "final_norm"),
        Ignore(r"decoder\..*", "the decoder of the language model: only the encoder is needed"),
        Ignore(r"lm_head\.weight", "the output layer of the decoder"),
    ]


def _projection(pattern: str, target: str) -> Rule:
    return Rule(rf"{_N}{pattern}\.weight", f"blocks/{target}/kernel", "linear", stack=1)


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")


def storage_dtype(tensors: Mapping) -> str:
    """bfloat16 if all weights are; what is float16 or mixed is kept in float32, since products of
    T5 can overflow in float16."""
    own = [t for name, t in tensors.items() if name.startswith(("encoder.", "shared."))]
    return "bfloat16" if {np.dtype(t.dtype).name for t in own} == {"bfloat16"} else "float32"
