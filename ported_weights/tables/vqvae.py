"""Where the tensors of a published VQVAE checkpoint go in `varjax.codecs.vqvae.VQVAE`.

The module tree keeps the published names (`encoder.down.0.block.1.conv1` is
`encoder/down/0/block/1/conv1`); 1x1 convolutions are matrix products here, and the phi convolutions
are stacked along a leading axis.
"""

import dataclasses
from collections.abc import Callable

from ported_weights.rules import Ignore, Rule
from varjax.codecs.vqvae.model import VQVAEConfig
from varjax.errors import UserError

# Names that tell a VQVAE's weights from others.
SIGNATURE = ("quantize.embedding.weight", "quant_conv.weight", "post_quant_conv.weight")
_NET = r"(encoder|decoder)"
_LAYERS = (
    (rf"{_NET}\.(conv_in|conv_out)", r"\1/\2", "conv"),
    (rf"{_NET}\.norm_out", r"\1/norm_out", "norm"),
    (rf"{_NET}\.mid\.(block_\d)\.(conv\d)", r"\1/mid/\2/\3", "conv"),
    (rf"{_NET}\.mid\.(block_\d)\.(norm\d)", r"\1/mid/\2/\3", "norm"),
    (rf"{_NET}\.mid\.attn_1\.(qkv|proj_out)", r"\1/mid/attn_1/\2", "dense"),
    (rf"{_NET}\.mid\.attn_1\.norm", r"\1/mid/attn_1/norm", "norm"),
    (rf"{_NET}\.(down|up)\.(\d+)\.block\.(\d+)\.(conv\d)", r"\1/\2/\3/block/\4/\5", "conv"),
    (rf"{_NET}\.(down|up)\.(\d+)\.block\.(\d+)\.(norm\d)", r"\1/\2/\3/block/\4/\5", "norm"),
    (
        rf"{_NET}\.(down|up)\.(\d+)\.block\.(\d+)\.nin_shortcut",
        r"\1/\2/\3/block/\4/nin_shortcut",
        "dense",
    ),
    (rf"{_NET}\.(down|up)\.(\d+)\.attn\.(\d+)\.(qkv|proj_out)", r"\1/\2/\3/attn/\4/\5", "dense"),
    (rf"{_NET}\.(down|up)\.(\d+)\.attn\.(\d+)\.norm", r"\1/\2/\3/attn/\4/norm", "norm"),
    (rf"{_NET}\.(down|up)\.(\d+)\.(downsample|upsample)\.conv", r"\1/\2/\3/\4", "conv"),
    (r"(quant_conv|post_quant_conv)", r"\1", "conv"),
)
_WEIGHTS = {
    "conv": ("kernel", "conv"),
    "dense": ("kernel", "conv1x1_to_linear"),
    "norm": ("scale", None),
}


def vqvae_rules(config: VQVAEConfig) -> list[Rule | Ignore]:
    """Rules for a VQVAE of this configuration; only the phi convolutions depend on it."""
    rules = [Rule(r"quantize\.embedding\.weight", "quantizer/embedding", None)]
    for pattern, target, kind in _LAYERS:
        name, transform = _WEIGHTS[kind]
        rules.append(Rule(rf"{pattern}\.weight", f"{target}/{name}", transform))
        rules.append(Rule(rf"{pattern}\.bias", f"{target}/bias", None))
    rules.append(Ignore(r"quantize\.ema_vocab_hit_SV", "statistics of the training run"))
    return rules + _phi_rules(config)


def _phi_rules(config: VQVAEConfig) -> list[Rule]:
    """One shared list of phi convolutions, a list with an entry per scale, or a single one."""
    if not config.num_phi:
        return []
    published = {0: r"(\d+)", 1: "qresi"}.get(config.share_quant_resi, r"qresi_ls\.(\d+)")
    stack, single = (None, ("add_axis",)) if config.share_quant_resi == 1 else (1, ())
    source = rf"quantize\.quant_resi\.{published}"
    return [
        Rule(rf"{source}\.weight", "quantizer/phi_kernel", ("conv", *single), stack),
        Rule(rf"{source}\.bias", "quantizer/phi_bias", single, stack),
    ]


def under_schedule(
    codec: VQVAEConfig, transformer, say: Callable[[str], None] = print
) -> VQVAEConfig:
    """The codec's configuration under the transformer's schedule.

    A tokenizer's weights hardly depend on its schedule, so one tokenizer serves several
    transformers; only phi convolutions that belong to single scales tie it to one.
    """
    if codec.schedule == transformer.schedule:
        return codec
    adapted = dataclasses.replace(codec, schedule=transformer.schedule)
    if adapted.num_phi != codec.num_phi:
        raise UserError(
            f"the tokenizer has one phi convolution for each of its {codec.num_phi} scales"
            f" ({codec.schedule}), the transformer has {transformer.schedule.num_scales} scales"
            f" ({transformer.schedule}): their patch_nums must agree"
        )
    say(f"tokenizer schedule {codec.schedule}: the transformer's is used instead")
    return adapted
