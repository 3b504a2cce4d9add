"""Rules for the tensors of language models of the Llama family:
`varjax.models.llama.decoder.LlamaBlock`, whose layers are stacked.

Published queries, keys and values are one product here, and so are gates and what they let through.
"""

from collections.abc import Callable, Mapping

from ported_weights.rules import Ignore, Take, product
from varjax.models.llama.config import LlamaConfig


def decoder(prefix: str, config: LlamaConfig) -> list[Take | Ignore]:
    """Return the rules for embedding, layers and last norm. prefix: of all names, a pattern."""
    layer = prefix + r"layers\.(\d+)\."
    widths = (config.queries_per_head, 1, 1)  # of queries, keys and values, side by side
    rules = [
        Take(prefix + r"embed_tokens\.weight", "token_embedding"),
        Take(prefix + r"norm\.weight", "norm"),
        Take(layer + r"input_layernorm\.weight", "blocks/attention_norm", stack=1),
        Take(layer + r"post_attention_layernorm\.weight", "blocks/feed_forward_norm", stack=1),
        product(layer + r"self_attn\.o_proj", "blocks/proj", 1),
        product(layer + r"mlp\.down_proj", "blocks/down", 1),
    ]
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rules.append(product(rf"{layer}self_attn\.{name}", "blocks/qkv", 1, (number, widths)))
    for number, name in enumerate(("gate_proj", "up_proj")):
        rules.append(product(rf"{layer}mlp\.{name}", "blocks/gate_up", 1, (number, (1, 1))))
    reason = "frequencies of positions, which follow from the configuration"
    return [*rules, Ignore(rf"{prefix}(?:layers\.\d+\.self_attn\.)?rotary_emb\..*", reason)]


def side_that_fits(
    language: object, prompt: object, tokens: Callable[[int], int], side: int
) -> int | None:
    """Return the largest side of a square image, `side` or less, that fits the context behind a
    prompt; None if `side` does, or if these are no sizes, which the configuration then refuses.

    Args:
      language: published configuration of the language model.
      prompt: tokens of a prompt.
      tokens: function of a side that gives the tokens of an image.
    """
    context = language.get("max_position_embeddings") if isinstance(language, Mapping) else None
    if type(context) is not int or type(prompt) is not int or prompt + tokens(side) <= context:
        return None
    fitting = (n for n in range(side, 0, -1) if prompt + tokens(n) <= context)
    return next(fitting, None)
