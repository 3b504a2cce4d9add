"""The known models: families and published sizes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flax import nnx

from varjax.codecs import bsq as bsq
from varjax.codecs.vq import VQ, ChameleonVQConfig, VQConfig
from varjax.codecs.vqvae import VQVAE, VQVAEConfig
from varjax.core.errors import UserError, choose, show
from varjax.core.transformer import Transformer
from varjax.models import janus, llamagen, lumina, var
from varjax.models.infinity import transformer as infinity
from varjax.models.labels import LABELS
from varjax.storage import own_modules, parameters
from varjax.storage.families import CATALOGUE, Family, Part
from varjax.storage.names import converted
from varjax.storage.published import Configuration
from varjax.text.encoder import TEXT, TEXT_ENCODER
from varjax.text.prompt_ids import PROMPT_IDS


@dataclass(frozen=True)
class Preset:
    """A published size, or a model of the user's own: configurations by part, and the sampling that
    its authors recommend.

    weights: gives the modules of an own model with their arrays; None for published sizes, whose
      weights are in checkpoints.
    class_names: of an own model, if it says.
    """

    family: str
    configs: Mapping[str, Configuration]
    sampling: Mapping = field(default_factory=dict)
    weights: Callable[[], Mapping[str, nnx.Module]] | None = None
    class_names: tuple[str, ...] | None = None


def _family(name: str, transformer: Part, codec: Part, agreed: tuple[str, ...], **conditions):
    """A family by its parts. Models that take texts have a text encoder."""
    parts = {"transformer": transformer, "codec": codec}
    parts |= {"text_encoder": TEXT_ENCODER} if "text" in conditions else {}
    return Family(name, parts, agreed=agreed, conditions=conditions)


FAMILIES = CATALOGUE.families  # models of the user's own come to them
FAMILIES |= {
    "var": _family(
        "var",
        Part("VAR", var.VARConfig, var.VAR),
        Part("VQVAE", VQVAEConfig, VQVAE),
        ("vocab_size", "z_channels", "schedule"),
        labels=LABELS,
    ),
    "infinity": _family(
        "infinity",
        Part("Infinity", infinity.InfinityConfig, infinity.Infinity),
        Part("BSQVAE", bsq.BSQConfig, bsq.BSQVAE),
        ("codebook_dim",),
        text=TEXT,
    ),
    "llamagen": _family(
        "llamagen",
        Part("LlamaGen", llamagen.LlamaGenConfig, llamagen.LlamaGen),
        Part("VQ", VQConfig, VQ),
        ("vocab_size",),
        labels=LABELS,
        text=TEXT,
    ),
    "janus": _family(
        "janus",
        Part("Janus", janus.JanusConfig, janus.Janus),
        Part("VQ", VQConfig, VQ),
        ("vocab_size",),
        prompt_ids=PROMPT_IDS,
    ),
    "lumina": _family(
        "lumina",
        Part("Lumina", lumina.LuminaConfig, lumina.Lumina),
        Part("ChameleonVQ", ChameleonVQConfig, VQ),
        ("vocab_size",),
        prompt_ids=PROMPT_IDS,
    ),
}
CATALOGUE.parts["text_encoder"] = TEXT_ENCODER
family = CATALOGUE.family

# What the authors recommend: VAR's and LlamaGen's published FID evaluations, and the published
# inference scripts of the others. Infinity's top-k never binds on two values.
VAR_SAMPLING = {"cfg": 1.5, "top_k": 900, "top_p": 0.96, "more_smooth": False}
INFINITY_SAMPLING = {"cfg": 3.0, "tau": 0.5, "top_k": 900, "top_p": 0.97}
INFINITY_8B = {**INFINITY_SAMPLING, "tau": 1.0}
LLAMAGEN_SAMPLING = {"cfg": 1.75, "tau": 1.0, "cfg_interval": -1, "top_k": 0, "top_p": 0.0}
LLAMAGEN_CFG = {768: 2.0, 1024: 2.0, 3200: 1.65}  # by width; 1.75 in the others
LLAMAGEN_TEXT = {**LLAMAGEN_SAMPLING, "cfg": 7.5, "top_k": 1000}
JANUS_SAMPLING = {"cfg": 5.0, "tau": 1.0, "cfg_interval": -1, "top_k": 0, "top_p": 0.0}
LUMINA_SAMPLING = {**JANUS_SAMPLING, "cfg": 4.0, "top_k": 2000}


def llamagen_sampling(config: llamagen.LlamaGenConfig) -> dict:
    """The sampling that is recommended for a transformer of this configuration."""
    if config.condition == "text":
        return {**LLAMAGEN_TEXT, "top_k": min(LLAMAGEN_TEXT["top_k"], config.vocab_size)}
    cfg = LLAMAGEN_CFG.get(config.dim, LLAMAGEN_SAMPLING["cfg"])
    return {**LLAMAGEN_SAMPLING, "cfg": cfg if config.has_unconditional else 1.0}


def lumina_sampling(config: lumina.LuminaConfig) -> dict:
    """The sampling that is recommended for a transformer of this configuration."""
    return {**LUMINA_SAMPLING, "top_k": min(LUMINA_SAMPLING["top_k"], config.vocab_size)}


PRESETS: dict[str, Preset] = {}


def _add(family: str, configs: Mapping, codec: Callable, sampling: Callable) -> None:
    """Adds the published sizes of a family. codec, sampling: what a transformer's configuration
    leads to."""
    for name, config in configs.items():
        parts = {"transformer": config, "codec": codec(config)}
        PRESETS[name] = Preset(family, parts, sampling(config))


_add("var", var.PRESETS, lambda c: VQVAEConfig(schedule=c.schedule), lambda c: VAR_SAMPLING)
_add(  # models with patchify have the tokenizer of 8 pixels per code and the 8B model's sampling
    "infinity",
    infinity.PRESETS,
    lambda c: bsq.PRESETS["bsq-d56" if c.apply_spatial_patchify else "bsq-d32"],
    lambda c: INFINITY_8B if c.apply_spatial_patchify else INFINITY_SAMPLING,
)
_add("llamagen", llamagen.PRESETS, lambda c: VQConfig(), llamagen_sampling)
# generation only decodes
_add("janus", janus.PRESETS, lambda c: VQConfig(has_encoder=False), lambda c: JANUS_SAMPLING)
_add("lumina", lumina.PRESETS, lambda c: ChameleonVQConfig(), lumina_sampling)


CONDITIONS = {"labels": LABELS, "text": TEXT, "prompt_ids": PROMPT_IDS}


NEEDED = {  # of the configurations of own models
    "transformer": (
        "condition depth embed_dim hidden_dim num_heads head_dim logits_per_token token_maps"
        " total_tokens condition_bytes check_sampling is_guided"
    ).split(),
    "codec": ["downsample"],
}


def register(
    name: str,
    *,
    transformer: type[nnx.Module],
    codec: type[nnx.Module],
    configs: Mapping[str, Configuration],
    weights: Callable[[], Mapping[str, nnx.Module]] | None = None,
    sampling: Mapping | None = None,
    class_names: tuple[str, ...] | None = None,
) -> None:
    """Makes a model of your own known under a name (docs/howto/own_model.md).

    Args:
      transformer, codec: classes, built as `cls(config, rngs=rngs)`: a `NextScaleTransformer` or
        `NextTokenTransformer`, and what turns its tokens into pictures.
      configs: {"transformer": ..., "codec": ...}.
      weights: gives both modules with their arrays; None: random ones, always the same.
      sampling: what is recommended, fields of `varjax.Sampling`.
      class_names: of a model that draws from labels.

    Raises:
      UserError: the name is taken or none that people can type, or something is of another kind.
    """
    if not isinstance(name, str) or not re.fullmatch("[A-Za-z0-9_.-]{1,64}", name):
        raise UserError(f"model name {show(name)}: give 1 to 64 ASCII letters, digits, _, . and -")
    if name in PRESETS or name in FAMILIES:
        raise UserError(f"model {name!r} is known already: rename yours")
    if not isinstance(transformer, type) or not issubclass(transformer, Transformer):
        raise UserError(
            f"model {name!r}: {show(transformer)} is no transformer: derive the class from "
            "NextTokenTransformer or NextScaleTransformer"
        )
    given = configs if isinstance(configs, Mapping) else {}
    for part in ("transformer", "codec"):
        if not isinstance(given.get(part), Configuration):
            raise UserError(f"model {name!r}: configs has no Configuration for its {part}")
        if lacking := [n for n in NEEDED[part] if not hasattr(given[part], n)]:
            raise UserError(f"model {name!r}: its {part} has no {', '.join(lacking)}")
    kind = choose(f"condition of model {name!r}", given["transformer"].condition, CONDITIONS)

    def random() -> Mapping[str, nnx.Module]:
        classes = {"transformer": transformer, "codec": codec}
        return {p: cls(given[p], rngs=nnx.Rngs(0)) for p, cls in classes.items()}

    parts = {
        "transformer": Part(name, type(given["transformer"]), transformer),
        "codec": Part(f"{name} codec", type(given["codec"]), codec),
    }
    FAMILIES[name] = Family(name, parts, agreed=(), conditions={kind: CONDITIONS[kind]})
    PRESETS[name] = Preset(name, dict(given), dict(sampling or {}), weights or random, class_names)


def own_parts(
    name: str, wanted: Mapping[str, nnx.Module], dtypes: Mapping[str, str]
) -> dict[str, nnx.Module]:
    """The modules of an own model with their arrays. `UserError`: what the user's function gives is
    not that.

    wanted: abstract modules. dtypes: of floating parameters, by part; float32 if it is not named.
    """
    given, found = PRESETS[name].weights(), {}
    for part, abstract in wanted.items():
        module = given.get(part) if isinstance(given, Mapping) else None
        if not isinstance(module, type(abstract)):
            raise UserError(f"{name}: its weights have no {type(abstract).__name__} as {part}")
        arrays, shapes = parameters.named(module), parameters.named(abstract)
        if other := [n for n in shapes if n not in arrays or arrays[n].shape != shapes[n].shape]:
            raise UserError(f"{name}: parameters {', '.join(other[:4])} of its {part} do not fit")
        kind = dtypes.get(part, "float32")
        cast = {
            n: a.astype(kind) if parameters.is_floating(a.dtype) else a for n, a in arrays.items()
        }
        found[part] = parameters.fill(abstract, cast)
    return found


OWN = own_modules.Kind(
    "model",
    (PRESETS, FAMILIES),
    lambda preset: type(preset.configs["transformer"]).__module__,
    "call varjax.models.registry.register('its_name', ...)",
)
load_module = OWN.load


def preset(name: str) -> Preset:
    """The published size called `name`; `UserError` with the list of sizes otherwise."""
    return PRESETS[choose("model", name, PRESETS)]


def found(name_or_directory: str | Path | None) -> str | Path | None:
    """The path to read for a checkpoint's name: a published name stands for what
    `python -m ported_weights --source=hub` has converted (`varjax.storage.names`), if it has and
    there is no folder of that name here; anything else stands for itself."""
    name = str(name_or_directory)
    if name in PRESETS and not Path(name).exists():
        folder = converted(name)
        return folder if folder.is_dir() else name
    return name_or_directory
