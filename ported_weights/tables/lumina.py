"""Where the tensors of Lumina-mGPT go: `varjax.models.lumina.transformer.Lumina`, and those of
Chameleon's image tokenizer, `varjax.codecs.vq.chameleon.ChameleonVQ`.

The published head has a row for every token of the vocabulary. Ours has a column for every code of
the image tokenizer, in the order of codes: within an image nothing else may be drawn.
"""

from collections.abc import Collection

from ported_weights.rules import Ignore, Rule, layer, path_of
from ported_weights.tables import llama
from varjax.codecs.vq.chameleon import ChameleonVQConfig
from varjax.models.lumina.config import LuminaConfig

_N = r"model\.layers\.(\d+)\."
# What a checkpoint that draws has: (a name, what it is)
NEEDED = (
    ("model.embed_tokens.weight", "the language model"),
    ("model.layers.0.self_attn.q_norm.weight", "Chameleon's norm of queries and keys"),
    ("lm_head.weight", "the head"),
)


def transformer_rules(config: LuminaConfig, names: Collection[str] = ()) -> list[Rule | Ignore]:
    """Return the rule table of a transformer."""
    image_ids = config.token_ids[: config.vocab_size]
    norms = []
    for kind in ("q_norm", "k_norm"):
        for theirs, ours in (("weight", "scale"), ("bias", "bias")):
            pattern = rf"{_N}self_attn\.{kind}\.{theirs}"
            norms.append(Rule(pattern, f"blocks/{kind}/{ours}", stack=1))
    return [
        *llama.decoder(r"model\.", config),
        *norms,
        Rule(
            r"lm_head\.weight",
            "head/kernel",
            "linear",
            rows=image_ids,
            unused_rows="tokens that no image has",
        ),
        Ignore(r"model\.vqmodel\..*", "the image tokenizer, which --tokenizer_source gives"),
    ]


# --- the image tokenizer --------------------------------------------------------------------------


def tokenizer_rules(config: ChameleonVQConfig, names: Collection[str] = ()) -> list[Rule | Ignore]:
    """Return the rule table of a tokenizer. Without `has_encoder`, what only the encoder needs is
    ignored."""
    rules = [
        Rule(r"quantize\.embedding\.weight", "embedding"),
        *layer("post_quant_conv", "post_quant_conv", "kernel", "conv1x1_to_linear"),
        *_coder("decoder", "up"),
        Ignore(r"loss\..*", "the networks of its training"),
    ]
    if config.has_encoder:
        rules += layer("quant_conv", "quant_conv", "kernel", "conv1x1_to_linear")
        return rules + _coder("encoder", "down")
    return [*rules, Ignore(r"encoder\..*|quant_conv\..*", "the encoder: generation only decodes")]


def _coder(net: str, levels: str) -> list[Rule]:
    """Return the rules for an encoder or decoder, which keep the published names. levels: what
    `net` calls them."""
    level = rf"{net}\.{levels}\.(\d+)"
    kinds = {  # {(our name of the weight, its transform): patterns}
        ("kernel", "conv"): [
            rf"{net}\.(conv_in|conv_out)",
            rf"{level}\.(downsample|upsample)\.conv",
        ],
        ("scale", None): [rf"{net}\.norm_out"],
        ("kernel", "conv1x1_to_linear"): [],
    }
    for block in (rf"{net}\.mid\.(block_\d)", rf"{level}\.block\.(\d+)"):
        kinds["kernel", "conv"].append(rf"{block}\.(conv\d)")
        kinds["scale", None].append(rf"{block}\.(norm\d)")
        kinds["kernel", "conv1x1_to_linear"].append(rf"{block}\.nin_shortcut")
    rules = []
    for block in (rf"{net}\.mid\.attn_1", rf"{level}\.attn\.(\d+)"):
        kinds["scale", None].append(rf"{block}\.norm")
        kinds["kernel", "conv1x1_to_linear"].append(rf"{block}\.proj_out")
        for number, name in enumerate("qkv"):  # side by side in one product here
            target, place = f"{path_of(block)}/qkv", (number, (1, 1, 1))
            rules += layer(
                rf"{block}\.{name}", target, "kernel", "conv1x1_to_linear", section=place
            )
    for (weight, transform), patterns in kinds.items():
        for pattern in patterns:
            rules += layer(pattern, path_of(pattern), weight, transform)
    return rules
