"""Which models there are: named parts, the families that they make together, published sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flax import nnx

from varjax.codecs.bsq import model as bsq
from varjax.codecs.vq.model import VQ, VQConfig
from varjax.codecs.vqvae.config import VQVAEConfig
from varjax.codecs.vqvae.model import VQVAE
from varjax.errors import UserError, choose
from varjax.evaluation.classifier import Classifier, ClassifierConfig
from varjax.evaluation.inception import Inception, InceptionConfig
from varjax.evaluation.lpips import LPIPS, LPIPSConfig
from varjax.models.infinity import transformer as infinity
from varjax.models.llamagen import transformer as llamagen
from varjax.models.var import transformer as var
from varjax.nn import parameters
from varjax.text.t5 import T5Config, T5Encoder


@dataclass(frozen=True)
class Part:
    """A module together with its configuration class.

    The configuration class has `from_published(dict)` and `to_published()`; the module class is
    built as `module(config, rngs=rngs)`.

    own_folder: it lies in a folder of its own, which a checkpoint may lack, and is loaded only on
    request; other parts share the tree of the checkpoint.
    """

    name: str
    config: type
    module: type
    own_folder: bool = False

    def read(self, published: Mapping):
        """Configuration from the published constructor's argument names."""
        if not isinstance(published, Mapping):
            raise UserError(
                f"{self.name} configuration: expected names and values, got {published!r:.60}"
            )
        try:
            return self.config.from_published(published)
        except (TypeError, AttributeError, OverflowError) as error:  # a text where a number belongs
            problem = f"a value has the wrong type: {error}"
            raise UserError(f"{self.name} configuration: {problem}") from error

    def abstract(self, config) -> nnx.Module:
        """The module with shapes and types in place of arrays; allocates nothing."""
        return parameters.abstract(self.module, config)


@dataclass(frozen=True)
class Family:
    """Parts that make a model together.

    parts: by name; "transformer" and "codec", which turns tokens into pictures, are always there.
    agreed: names that the configurations of both have and must agree in.
    draws: "scales" (a `NextScaleTransformer`) or "tokens" (a `NextTokenTransformer`).
    """

    name: str
    parts: Mapping[str, Part]
    agreed: tuple[str, ...]
    draws: str = "scales"

    @property
    def tree(self) -> dict[str, Part]:
        """The parts that lie together in every checkpoint of the family."""
        return {name: part for name, part in self.parts.items() if not part.own_folder}

    def check(self, configs: Mapping) -> None:
        """Raise `UserError` if configurations, {part: configuration}, do not belong together."""
        for name in self.agreed:
            ours, theirs = getattr(configs["transformer"], name), getattr(configs["codec"], name)
            if ours != theirs:
                shown = "patch_nums" if name == "schedule" else name
                raise UserError(
                    f"{shown} is {str(ours):.200} for the transformer and {str(theirs):.200} for "
                    f"the codec; they must agree"
                )


@dataclass(frozen=True)
class Preset:
    """A published size: configurations by part, and the sampling its authors recommend."""

    family: str
    configs: Mapping[str, object]
    sampling: Mapping = field(default_factory=dict)


# Parts with a folder of their own, which is called as they are here.
OWN_FOLDER = {
    "text_encoder": Part("T5", T5Config, T5Encoder, own_folder=True),
    # of evaluation, which belong to no family
    "inception": Part("Inception", InceptionConfig, Inception, own_folder=True),
    "lpips": Part("LPIPS", LPIPSConfig, LPIPS, own_folder=True),
    "classifier": Part("Classifier", ClassifierConfig, Classifier, own_folder=True),
}

FAMILIES = {
    "var": Family(
        "var",
        {
            "transformer": Part("VAR", var.VARConfig, var.VAR),
            "codec": Part("VQVAE", VQVAEConfig, VQVAE),
        },
        agreed=("vocab_size", "z_channels", "schedule"),
    ),
    "infinity": Family(
        "infinity",
        {
            "transformer": Part("Infinity", infinity.InfinityConfig, infinity.Infinity),
            "codec": Part("BSQVAE", bsq.BSQConfig, bsq.BSQVAE),
            "text_encoder": OWN_FOLDER["text_encoder"],
        },
        agreed=("codebook_dim",),
    ),
    "llamagen": Family(
        "llamagen",
        {
            "transformer": Part("LlamaGen", llamagen.LlamaGenConfig, llamagen.LlamaGen),
            "codec": Part("VQ", VQConfig, VQ),
            "text_encoder": OWN_FOLDER["text_encoder"],
        },
        agreed=("vocab_size",),
        draws="tokens",
    ),
}

# Settings of the published FID evaluation of VAR.
VAR_SAMPLING = {"cfg": 1.5, "top_k": 900, "top_p": 0.96, "more_smooth": False}

# Settings of the published inference scripts of Infinity; top-k never binds on two values.
INFINITY_SAMPLING = {"cfg": 3.0, "tau": 0.5, "top_k": 900, "top_p": 0.97}
INFINITY_8B = {**INFINITY_SAMPLING, "tau": 1.0}

# Settings of LlamaGen's published FID evaluation, and of its text-to-image script.
LLAMAGEN_SAMPLING = {"cfg": 1.75, "tau": 1.0, "cfg_interval": -1, "top_k": 0, "top_p": 0.0}
LLAMAGEN_CFG = {768: 2.0, 1024: 2.0, 3200: 1.65}  # by width; 1.75 in the others
LLAMAGEN_TEXT = {**LLAMAGEN_SAMPLING, "cfg": 7.5, "top_k": 1000}


def _var_preset(config: var.VARConfig) -> Preset:
    codec = VQVAEConfig(schedule=config.schedule)
    return Preset("var", {"transformer": config, "codec": codec}, VAR_SAMPLING)


def _infinity_preset(config: infinity.InfinityConfig) -> Preset:
    """Patchify comes with the 8x tokenizer and the sampling of the 8B model."""
    patchify = config.apply_spatial_patchify
    codec = bsq.PRESETS["bsq-d56" if patchify else "bsq-d32"]
    sampling = INFINITY_8B if patchify else INFINITY_SAMPLING
    return Preset("infinity", {"transformer": config, "codec": codec}, sampling)


def llamagen_sampling(config: llamagen.LlamaGenConfig) -> dict:
    """Recommended for a transformer of this configuration."""
    if config.condition == "text":
        return {**LLAMAGEN_TEXT, "top_k": min(LLAMAGEN_TEXT["top_k"], config.vocab_size)}
    cfg = LLAMAGEN_CFG.get(config.dim, LLAMAGEN_SAMPLING["cfg"])
    return {**LLAMAGEN_SAMPLING, "cfg": cfg if config.has_unconditional else 1.0}


def _llamagen_preset(config: llamagen.LlamaGenConfig) -> Preset:
    parts = {"transformer": config, "codec": VQConfig()}
    return Preset("llamagen", parts, llamagen_sampling(config))


PRESETS = {
    **{name: _var_preset(config) for name, config in var.PRESETS.items()},
    **{name: _infinity_preset(config) for name, config in infinity.PRESETS.items()},
    **{name: _llamagen_preset(config) for name, config in llamagen.PRESETS.items()},
}


def family(name: str) -> Family:
    """The family called `name`; `UserError` with the list of families otherwise."""
    return FAMILIES[choose("model family", name, FAMILIES)]


def preset(name: str) -> Preset:
    """The published size called `name`; `UserError` with the list of sizes otherwise."""
    return PRESETS[choose("model", name, PRESETS)]
