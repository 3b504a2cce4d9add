"""Which models there are: families and published sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from varjax.codecs.bsq import model as bsq
from varjax.codecs.vq.chameleon import ChameleonVQ, ChameleonVQConfig
from varjax.codecs.vq.model import VQ, VQConfig
from varjax.codecs.vqvae.config import VQVAEConfig
from varjax.codecs.vqvae.model import VQVAE
from varjax.errors import choose
from varjax.models.infinity import transformer as infinity
from varjax.models.janus import transformer as janus
from varjax.models.labels import LABELS
from varjax.models.llamagen import transformer as llamagen
from varjax.models.lumina import transformer as lumina
from varjax.models.var import transformer as var
from varjax.nn.families import Catalogue, Family, Part
from varjax.nn.published import Configuration
from varjax.text.condition import TEXT
from varjax.text.encoder import TEXT_ENCODER
from varjax.text.prompt_ids import PROMPT_IDS


@dataclass(frozen=True)
class Preset:
    """A published size: configurations by part, and the sampling that its authors recommend."""

    family: str
    configs: Mapping[str, Configuration]
    sampling: Mapping = field(default_factory=dict)


FAMILIES = {
    "var": Family(
        "var",
        {
            "transformer": Part("VAR", var.VARConfig, var.VAR),
            "codec": Part("VQVAE", VQVAEConfig, VQVAE),
        },
        agreed=("vocab_size", "z_channels", "schedule"),
        conditions={"labels": LABELS},
    ),
    "infinity": Family(
        "infinity",
        {
            "transformer": Part("Infinity", infinity.InfinityConfig, infinity.Infinity),
            "codec": Part("BSQVAE", bsq.BSQConfig, bsq.BSQVAE),
            "text_encoder": TEXT_ENCODER,
        },
        agreed=("codebook_dim",),
        conditions={"text": TEXT},
    ),
    "llamagen": Family(
        "llamagen",
        {
            "transformer": Part("LlamaGen", llamagen.LlamaGenConfig, llamagen.LlamaGen),
            "codec": Part("VQ", VQConfig, VQ),
            "text_encoder": TEXT_ENCODER,
        },
        agreed=("vocab_size",),
        conditions={"labels": LABELS, "text": TEXT},
    ),
    "janus": Family(
        "janus",
        {
            "transformer": Part("Janus", janus.JanusConfig, janus.Janus),
            "codec": Part("VQ", VQConfig, VQ),
        },
        agreed=("vocab_size",),
        conditions={"prompt_ids": PROMPT_IDS},
    ),
    "lumina": Family(
        "lumina",
        {
            "transformer": Part("Lumina", lumina.LuminaConfig, lumina.Lumina),
            "codec": Part("ChameleonVQ", ChameleonVQConfig, ChameleonVQ),
        },
        agreed=("vocab_size",),
        conditions={"prompt_ids": PROMPT_IDS},
    ),
}
CATALOGUE = Catalogue(FAMILIES, {"text_encoder": TEXT_ENCODER})

# Settings of the published FID evaluation of VAR.
VAR_SAMPLING = {"cfg": 1.5, "top_k": 900, "top_p": 0.96, "more_smooth": False}

# Settings of the published inference scripts of Infinity; top-k never binds on two values.
INFINITY_SAMPLING = {"cfg": 3.0, "tau": 0.5, "top_k": 900, "top_p": 0.97}
INFINITY_8B = {**INFINITY_SAMPLING, "tau": 1.0}

# Settings of LlamaGen's published FID evaluation, and of its text-to-image script.
LLAMAGEN_SAMPLING = {"cfg": 1.75, "tau": 1.0, "cfg_interval": -1, "top_k": 0, "top_p": 0.0}
LLAMAGEN_CFG = {768: 2.0, 1024: 2.0, 3200: 1.65}  # by width; 1.75 in the others
LLAMAGEN_TEXT = {**LLAMAGEN_SAMPLING, "cfg": 7.5, "top_k": 1000}

# Settings of the published inference scripts of Janus-Pro and Lumina-mGPT.
JANUS_SAMPLING = {"cfg": 5.0, "tau": 1.0, "cfg_interval": -1, "top_k": 0, "top_p": 0.0}
LUMINA_SAMPLING = {**JANUS_SAMPLING, "cfg": 4.0, "top_k": 2000}


def _var_preset(config: var.VARConfig) -> Preset:
    codec = VQVAEConfig(schedule=config.schedule)
    return Preset("var", {"transformer": config, "codec": codec}, VAR_SAMPLING)


def _infinity_preset(config: infinity.InfinityConfig) -> Preset:
    """Models with patchify have the tokenizer of 8 pixels per code and the 8B model's sampling."""
    patchify = config.apply_spatial_patchify
    codec = bsq.PRESETS["bsq-d56" if patchify else "bsq-d32"]
    sampling = INFINITY_8B if patchify else INFINITY_SAMPLING
    return Preset("infinity", {"transformer": config, "codec": codec}, sampling)


def llamagen_sampling(config: llamagen.LlamaGenConfig) -> dict:
    """The sampling that is recommended for a transformer of this configuration."""
    if config.condition == "text":
        return {**LLAMAGEN_TEXT, "top_k": min(LLAMAGEN_TEXT["top_k"], config.vocab_size)}
    cfg = LLAMAGEN_CFG.get(config.dim, LLAMAGEN_SAMPLING["cfg"])
    return {**LLAMAGEN_SAMPLING, "cfg": cfg if config.has_unconditional else 1.0}


def _llamagen_preset(config: llamagen.LlamaGenConfig) -> Preset:
    parts = {"transformer": config, "codec": VQConfig()}
    return Preset("llamagen", parts, llamagen_sampling(config))


def lumina_sampling(config: lumina.LuminaConfig) -> dict:
    """The sampling that is recommended for a transformer of this configuration."""
    return {**LUMINA_SAMPLING, "top_k": min(LUMINA_SAMPLING["top_k"], config.vocab_size)}


def _janus_preset(config: janus.JanusConfig) -> Preset:
    codec = VQConfig(has_encoder=False)  # generation only decodes
    return Preset("janus", {"transformer": config, "codec": codec}, JANUS_SAMPLING)


def _lumina_preset(config: lumina.LuminaConfig) -> Preset:
    parts = {"transformer": config, "codec": ChameleonVQConfig()}
    return Preset("lumina", parts, lumina_sampling(config))


PRESETS = {name: _var_preset(config) for name, config in var.PRESETS.items()}
PRESETS |= {name: _infinity_preset(config) for name, config in infinity.PRESETS.items()}
PRESETS |= {name: _llamagen_preset(config) for name, config in llamagen.PRESETS.items()}
PRESETS |= {name: _janus_preset(config) for name, config in janus.PRESETS.items()}
PRESETS |= {name: _lumina_preset(config) for name, config in lumina.PRESETS.items()}


def family(name: str) -> Family:
    """The family called `name`; `UserError` with the list of families otherwise."""
    return CATALOGUE.family(name)


def preset(name: str) -> Preset:
    """The published size called `name`; `UserError` with the list of sizes otherwise."""
    return PRESETS[choose("model", name, PRESETS)]
