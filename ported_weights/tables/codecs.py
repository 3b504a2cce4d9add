"""Rules for the tensors of published image tokenizers: `varjax.codecs.vqvae.VQVAE` and
`varjax.codecs.bsq.BSQVAE`.

The module trees keep the published names (`encoder.down.0.block.1.conv1` is
`encoder/down/0/block/1/conv1`); 1x1 convolutions are matrix products here.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from ported_weights.rules import Ignore, Take, layer, path_of
from varjax.codecs.bsq import PRESETS, BSQConfig
from varjax.codecs.vq import ChameleonVQConfig, VQConfig
from varjax.codecs.vqvae import VQVAEConfig
from varjax.core.errors import UserError
from varjax.models.var import VARConfig

_BOTH = r"(encoder|decoder)"
_LEVELS = (r"(down|up)\.(\d+)",)
_WRAPPERS = {"kernel": "conv", "scale": "norm"}  # {our name of the weight: inner name in BSQ-VAE}


def layers_of(net: str, levels: Sequence[str] = _LEVELS) -> Iterator[tuple[str, str, str | None]]:
    """Yield (pattern, our name of the weight, its transform) of all layers but attention.

    net: pattern of what the encoder and the decoder are called. levels: those of their levels.
    """
    yield rf"{net}\.(conv_in|conv_out)", "kernel", "conv"
    yield rf"{net}\.norm_out", "scale", None
    for level in levels:
        yield rf"{net}\.{level}\.(downsample|upsample)\.conv", "kernel", "conv"
    for place in (r"mid\.block_1", r"mid\.block_2", *(rf"{x}\.block\.(\d+)" for x in levels)):
        yield rf"{net}\.{place}\.(conv\d)", "kernel", "conv"
        yield rf"{net}\.{place}\.nin_shortcut", "kernel", "conv1x1_to_linear"
        yield rf"{net}\.{place}\.(norm\d)", "scale", None


def attentions_of(net: str, levels: Sequence[str] = _LEVELS) -> list[str]:
    """Return the patterns of attention in the middle and at levels."""
    return [rf"{net}\.mid\.attn_1", *(rf"{net}\.{level}\.attn\.(\d+)" for level in levels)]


def vq_rules(
    net: str,
    levels: Sequence[str] = _LEVELS,
    published: Callable[[str], str] = lambda pattern: pattern,
) -> list[Take]:
    """Return the rules for an encoder or decoder whose queries, keys and values are three tensors;
    they lie side by side in one product here. published: function of a pattern of our names."""
    rules = []
    for pattern, weight, transform in layers_of(net, levels):
        rules += layer(published(pattern), path_of(pattern), weight, transform)
    for attention in attentions_of(net, levels):
        source, target = published(attention), path_of(attention)
        rules += layer(rf"{source}\.norm", f"{target}/norm", "scale", None)
        for number, name in enumerate("qkv"):
            own = rf"{source}\.{name}", f"{target}/qkv", "kernel", "conv1x1_to_linear"
            rules += layer(*own, section=(number, (1, 1, 1)))
        own = rf"{source}\.proj_out", f"{target}/proj_out"
        rules += layer(*own, "kernel", "conv1x1_to_linear")
    return rules


def vq_table(
    config: VQConfig | ChameleonVQConfig, coder: Callable[[str], list[Take]]
) -> list[Take | Ignore]:
    """Return the rule table of a VQ. coder: function of "encoder" or "decoder" that returns its
    rules. Without `has_encoder`, what only the encoder needs is ignored."""
    linear = "kernel", "conv1x1_to_linear"
    rules = [
        Take(r"quantize\.embedding\.weight", "embedding"),
        *layer("post_quant_conv", "post_quant_conv", *linear),
        *coder("decoder"),
    ]
    if config.has_encoder:
        return [*rules, *layer("quant_conv", "quant_conv", *linear), *coder("encoder")]
    return [*rules, Ignore(r"encoder\..*|quant_conv\..*", "the encoder: generation only decodes")]


def vqvae_rules(config: VQVAEConfig, names: Collection[str] = ()) -> list[Take | Ignore]:
    """Return the rule table of a VQVAE.

    Only the phi convolutions, which are stacked along a leading axis, depend on the configuration.
    """
    rules = [
        Take(r"quantize\.embedding\.weight", "quantizer/embedding", None),
        *layer(r"(quant_conv|post_quant_conv)", r"\1", "kernel", "conv"),
        Ignore(r"quantize\.ema_vocab_hit_SV", "statistics of the training run"),
    ]
    for pattern, weight, transform in layers_of(_BOTH):
        rules += layer(pattern, path_of(pattern), weight, transform)
    for attention in attentions_of(_BOTH):
        own, norm = rf"{attention}\.(qkv|proj_out)", rf"{attention}\.norm"
        rules += layer(own, path_of(own), "kernel", "conv1x1_to_linear")
        rules += layer(norm, path_of(norm), "scale", None)
    if not config.num_phi:
        return rules
    # phi convolutions: a shared list, one for each scale, or a single one
    published = {0: r"(\d+)", 1: "qresi"}.get(config.share_quant_resi, r"qresi_ls\.(\d+)")
    stack, single = (None, ("add_axis",)) if config.share_quant_resi == 1 else (1, ())
    source = rf"quantize\.quant_resi\.{published}"
    rules.append(Take(rf"{source}\.weight", "quantizer/phi_kernel", ("conv", *single), stack))
    return [*rules, Take(rf"{source}\.bias", "quantizer/phi_bias", single, stack)]


def under_schedule(
    codec: VQVAEConfig, transformer: VARConfig, say: Callable[[str], None] = print
) -> VQVAEConfig:
    """Return the codec's configuration under the transformer's schedule.

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


def bsq_rules(config: BSQConfig, names: Collection[str] = ()) -> list[Take | Ignore]:
    """Return the rule table of a BSQ-VAE.

    The published network wraps every convolution and norm, which shows as an inner `.conv` or
    `.norm` (`encoder.down.0.block.1.conv1.conv`). Some releases have names without it. So every
    pattern is there with and without the wrapper, and a tensor under both names is an error.
    """

    def check(mask: np.ndarray) -> str | None:
        if mask.shape == (config.codebook_dim,):
            return None
        return (
            f"has shape {list(mask.shape)}: the weights have another number of bits than the"
            f" configuration (codebook_dim {config.codebook_dim})"
        )

    rules = [
        Ignore(r"quantizer\.lfq\.mask", "the value of each bit in an index, not needed", check),
        Ignore(r"quantize\.lfq\.mask", "the same buffer registered a second time", check),
    ]
    for pattern, weight, transform in layers_of(_BOTH):
        for name in (rf"{pattern}\.{_WRAPPERS[weight]}", pattern):
            rules += layer(name, path_of(pattern), weight, transform)
    return rules


def published_tokenizer(transformer: Mapping) -> tuple[dict, str]:
    """Return the arguments of the released tokenizer that fits a transformer, and a description.

    Patchify belongs to the 8x tokenizer. The transformer's number of bits wins where it is given.

    transformer: arguments of the transformer's constructor.
    """
    patchify = bool(transformer.get("apply_spatial_patchify", False))
    arguments = PRESETS["bsq-d56" if patchify else "bsq-d32"].to_published()
    if "codebook_dim" in transformer:
        arguments["codebook_dim"] = transformer["codebook_dim"]
    return arguments, f"{arguments['patch_size']}x, {arguments['codebook_dim']} bits per position"
