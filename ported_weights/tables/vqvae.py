"""Where the tensors of a published VQVAE checkpoint go in `varjax.codecs.vqvae.model.VQVAE`.

The module tree keeps the published names (`encoder.down.0.block.1.conv1` is
`encoder/down/0/block/1/conv1`); 1x1 convolutions are matrix products here, and the phi convolutions
are stacked along a leading axis.
"""

import dataclasses
from collections.abc import Callable, Collection

from ported_weights.rules import Ignore, Rule, layer, path_of
from varjax.codecs.vqvae.model import VQVAEConfig
from varjax.errors import UserError

# Names that tell a VQVAE's weights from others.
SIGNATURE = ("quantize.embedding.weight", "quant_conv.weight", "post_quant_conv.weight")
_NET = r"(encoder|decoder)"
_RESOLUTION = rf"{_NET}\.(down|up)\.(\d+)"
_BLOCK = rf"{_RESOLUTION}\.block\.(\d+)"
_LAYERS = {  # by the name of the weight here, and its transform
    ("kernel", "conv"): (
        rf"{_NET}\.(conv_in|conv_out)",
        rf"{_NET}\.mid\.(block_\d)\.(conv\d)",
        rf"{_BLOCK}\.(conv\d)",
        rf"{_RESOLUTION}\.(downsample|upsample)\.conv",
        r"(quant_conv|post_quant_conv)",
    ),
    ("kernel", "conv1x1_to_linear"): (
        rf"{_NET}\.mid\.attn_1\.(qkv|proj_out)",
        rf"{_BLOCK}\.nin_shortcut",
        rf"{_RESOLUTION}\.attn\.(\d+)\.(qkv|proj_out)",
    ),
    ("scale", None): (
        rf"{_NET}\.norm_out",
        rf"{_NET}\.mid\.(block_\d)\.(norm\d)",
        rf"{_NET}\.mid\.attn_1\.norm",
        rf"{_BLOCK}\.(norm\d)",
        rf"{_RESOLUTION}\.attn\.(\d+)\.norm",
    ),
}


def vqvae_rules(config: VQVAEConfig, names: Collection[str] = ()) -> list[Rule | Ignore]:
    """Rules for a VQVAE of this configuration; only the phi convolutions depend on it."""
    rules = [Rule(r"quantize\.embedding\.weight", "quantizer/embedding", None)]
    for (weight, transform), patterns in _LAYERS.items():
        for pattern in patterns:
            rules += layer(pattern, path_of(pattern), weight, transform)
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
