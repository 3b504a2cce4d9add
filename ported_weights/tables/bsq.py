"""Where the tensors of a published BSQ-VAE checkpoint go in `varjax.codecs.bsq.model.BSQVAE`.

The module tree keeps the published names. Every convolution and norm is wrapped in the published
network, which shows as an inner `.conv` or `.norm` (`encoder.down.0.block.1.conv1.conv`); some
releases have names without it. The wrapper is therefore optional in every pattern, and the same
tensor under both names is an error. 1x1 convolutions are matrix products here.
"""

from collections.abc import Collection, Mapping

import numpy as np

from ported_weights.rules import Ignore, Rule, layer, path_of
from varjax.codecs.bsq.model import PRESETS, BSQConfig

# Names that tell a BSQ-VAE's weights from others; a VQVAE has none of them.
SIGNATURE = (
    *("quantizer.lfq.mask", "quantize.lfq.mask"),
    *("encoder.conv_in.conv.weight", "decoder.conv_in.conv.weight"),
)
_NET = r"(encoder|decoder)"
_BLOCK = rf"{_NET}\.(down|up)\.(\d+)\.block\.(\d+)"
# By the published wrapper, the name of the weight here, and its transform.
_LAYERS = {
    ("conv", "kernel", "conv"): (
        rf"{_NET}\.(conv_in|conv_out)",
        rf"{_NET}\.mid\.(block_\d)\.(conv\d)",
        rf"{_BLOCK}\.(conv\d)",
        rf"{_NET}\.(down|up)\.(\d+)\.(downsample|upsample)\.conv",
    ),
    ("conv", "kernel", "conv1x1_to_linear"): (rf"{_BLOCK}\.nin_shortcut",),
    ("norm", "scale", None): (
        rf"{_NET}\.norm_out",
        rf"{_NET}\.mid\.(block_\d)\.(norm\d)",
        rf"{_BLOCK}\.(norm\d)",
    ),
}


def bsq_rules(config: BSQConfig, names: Collection[str] = ()) -> list[Rule | Ignore]:
    """Rules for a BSQ-VAE of this configuration, with and without the wrappers' names."""
    rules = []
    for (wrapper, weight, transform), patterns in _LAYERS.items():
        for pattern in patterns:
            for name in (rf"{pattern}\.{wrapper}", pattern):
                rules += layer(name, path_of(pattern), weight, transform)
    return [*rules, *_ignored(config)]


def _ignored(config: BSQConfig) -> list[Ignore]:
    """The quantiser's buffer, registered under two names; its length is the number of bits."""

    def check(mask: np.ndarray) -> str | None:
        if mask.shape == (config.codebook_dim,):
            return None
        return (
            f"has shape {list(mask.shape)}: the weights have another number of bits than the"
            f" configuration (codebook_dim {config.codebook_dim})"
        )

    return [
        Ignore(r"quantizer\.lfq\.mask", "the value of each bit in an index, not needed", check),
        Ignore(r"quantize\.lfq\.mask", "the same buffer registered a second time", check),
    ]


def published_tokenizer(transformer: Mapping) -> tuple[dict, str]:
    """Arguments of the released tokenizer for a transformer's arguments, and what it is in words.

    Patchify belongs to the 8x tokenizer. The number of bits is the transformer's where it is given.
    """
    patchify = bool(transformer.get("apply_spatial_patchify", False))
    arguments = PRESETS["bsq-d56" if patchify else "bsq-d32"].to_published()
    if "codebook_dim" in transformer:
        arguments["codebook_dim"] = transformer["codebook_dim"]
    return arguments, f"{arguments['patch_size']}x, {arguments['codebook_dim']} bits per position"
