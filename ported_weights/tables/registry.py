"""What the port knows of every model family: rule tables, and what a custom model leaves out."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ported_weights.tables import bsq, infinity, var, vqvae
from varjax.models import registry


@dataclass(frozen=True)
class Table:
    """How the weights of one module class are recognised and where they go.

    rules: of a configuration and the names in the file.
    """

    what: str
    flag: str
    signature: Sequence[str]
    rules: Callable[[object, Collection[str]], Sequence]


def _of_all(rules: Callable[[object], Sequence]):
    """Rules that are the same for all files."""
    return lambda config, names: rules(config)


# By the name of the `registry.Part`.
TABLES = {
    "VAR": Table("VAR transformer", "--source", var.SIGNATURE, _of_all(var.var_rules)),
    "VQVAE": Table(
        "VQVAE tokenizer", "--tokenizer_source", vqvae.SIGNATURE, _of_all(vqvae.vqvae_rules)
    ),
    "Infinity": Table(
        "Infinity transformer", "--source", infinity.SIGNATURE, infinity.infinity_rules
    ),
    "BSQVAE": Table(
        "BSQ-VAE tokenizer", "--tokenizer_source", bsq.SIGNATURE, _of_all(bsq.bsq_rules)
    ),
}


def _unchanged(codec, transformer, say: Callable[[str], None]):
    """The codec's configuration, where it does not depend on the transformer's."""
    del transformer, say
    return codec


@dataclass(frozen=True)
class Custom:
    """What a `*-custom` model of a family takes where the user gives nothing, and how to ask.

    Attributes:
      example: a transformer's configuration, for messages.
      tokenizer_files: names of the published tokenizers, for messages.
      tokenizer: from the transformer's arguments as given to those of the published tokenizer, and
        what that is in words.
      adapt: the codec's configuration under a transformer's; `UserError` if that is impossible.
      sampling: recommended sampling of a transformer's configuration.
    """

    example: str
    tokenizer_files: str
    tokenizer: Callable[[Mapping], tuple[dict, str]]
    sampling: Callable[[object], Mapping]
    adapt: Callable = _unchanged


# By the name of the `registry.Family`.
CUSTOM = {
    "var": Custom(
        example=(
            '{"num_classes": 1000, "depth": 16, "embed_dim": 1024, "num_heads": 16,'
            ' "attn_l2_norm": true, "patch_nums": [1, 2, 3]}'
        ),
        tokenizer_files="vae_ch160v4096z32.pth",
        tokenizer=lambda given: ({}, "4096 codes, 32 channels"),
        # guidance as published, no filters
        sampling=lambda config: {"cfg": 1.5, "top_k": 0, "top_p": 0.0, "more_smooth": False},
        adapt=vqvae.under_schedule,
    ),
    "infinity": Custom(
        example=(
            '{"depth": 32, "embed_dim": 2048, "num_heads": 16, "block_chunks": 8,'
            ' "text_channels": 2048, "text_maxlen": 512}'
        ),
        tokenizer_files="infinity_vae_d32reg.pth or infinity_vae_d56_f8_14_patchify.pth",
        tokenizer=bsq.published_tokenizer,
        sampling=lambda config: (
            registry.INFINITY_8B if config.apply_spatial_patchify else registry.INFINITY_SAMPLING
        ),
    ),
}
