"""Which model families there are: configurations, modules, image codecs and published sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from flax import nnx

from varjax.codecs.bsq import model
from varjax.codecs.bsq.model import BSQVAE, BSQConfig
from varjax.codecs.vqvae.config import VQVAEConfig
from varjax.codecs.vqvae.model import VQVAE
from varjax.errors import UserError, choose
from varjax.models import parameters
from varjax.models.infinity import transformer as infinity
from varjax.models.infinity.transformer import Infinity, InfinityConfig
from varjax.models.var import transformer as var


@dataclass(frozen=True)
class Part:
    """A module together with its configuration class.

    The configuration class has `from_published(dict)` and `to_published()`; the module class is
    built as `module(config, rngs=rngs)`.
    """

    name: str
    config: type
    module: type

    def read(self, published: Mapping):
        """Configuration from the published constructor's argument names."""
        if not isinstance(published, Mapping):
            raise UserError(
                f"{self.name} configuration: expected names and values, got {published!r:.60}"
            )
        try:
            return self.config.from_published(published)
        except (TypeError, AttributeError, OverflowError) as error:  # a text where a number belongs
            raise UserError(
                f"{self.name} configuration: a value has the wrong type: {error}"
            ) from error

    def build(self, config) -> nnx.Module:
        """The module with random parameters."""
        return self.module(config, rngs=nnx.Rngs(0))

    def abstract(self, config) -> nnx.Module:
        """The module with shapes and types in place of arrays; allocates nothing."""
        return nnx.merge(*_abstract(self, config))


@lru_cache(maxsize=32)
def _abstract(part: Part, config):
    """Structure and abstract state; kept, because tracing a deep codec takes a second."""
    return nnx.split(parameters.abstract(lambda: part.build(config)))


@dataclass(frozen=True)
class Family:
    """A transformer, and the codec that turns its tokens into pictures.

    agreed: names that both configurations have and must agree in.
    condition: what images are made of, "labels" or "text".
    """

    name: str
    transformer: Part
    codec: Part
    agreed: tuple[str, ...]
    condition: str

    def check(self, transformer, codec) -> None:
        """Raise `UserError` if two configurations do not belong together."""
        for name in self.agreed:
            ours, theirs = getattr(transformer, name), getattr(codec, name)
            if ours != theirs:
                shown = "patch_nums" if name == "schedule" else name
                raise UserError(
                    f"{shown} is {str(ours):.200} for the transformer and {str(theirs):.200} for "
                    f"the codec; they must agree"
                )

    def with_template(self, config, aspect: float | str | None, size: str | None):
        """A transformer's configuration for pictures of another aspect (height / width) and size.

        Raises:
          UserError: the family has one schedule per checkpoint, or there is no such template.
        """
        if aspect is None and size is None:
            return config
        if not hasattr(config, "with_template"):
            height, width = config.schedule.final_map
            raise UserError(
                f"aspect and size: {self.transformer.name} draws pictures of one shape per "
                f"checkpoint ({height}x{width} tokens here): leave them out"
            )
        return config.with_template(aspect, size)


@dataclass(frozen=True)
class Preset:
    """A published size: both configurations and the sampling its authors recommend."""

    family: str
    transformer: object
    codec: object
    sampling: Mapping = field(default_factory=dict)


FAMILIES = {
    "var": Family(
        "var",
        Part("VAR", var.VARConfig, var.VAR),
        Part("VQVAE", VQVAEConfig, VQVAE),
        agreed=("vocab_size", "z_channels", "schedule"),
        condition="labels",
    ),
    "infinity": Family(
        "infinity",
        Part("Infinity", InfinityConfig, Infinity),
        Part("BSQVAE", BSQConfig, BSQVAE),
        agreed=("codebook_dim",),
        condition="text",
    ),
}

# Settings of the published FID evaluation of VAR.
VAR_SAMPLING = {"cfg": 1.5, "top_k": 900, "top_p": 0.96, "more_smooth": False}

# Settings of the published inference scripts of Infinity; top-k never binds on two values.
INFINITY_SAMPLING = {"cfg": 3.0, "tau": 0.5, "top_k": 900, "top_p": 0.97}
INFINITY_8B = {**INFINITY_SAMPLING, "tau": 1.0}

PRESETS = {
    **{
        name: Preset("var", config, VQVAEConfig(schedule=config.schedule), VAR_SAMPLING)
        for name, config in var.PRESETS.items()
    },
    **{
        name: Preset(
            "infinity",
            config,
            model.PRESETS["bsq-d56" if config.apply_spatial_patchify else "bsq-d32"],
            INFINITY_8B if config.apply_spatial_patchify else INFINITY_SAMPLING,
        )
        for name, config in infinity.PRESETS.items()
    },
}


def family(name: str) -> Family:
    """The family called `name`; `UserError` with the list of families otherwise."""
    return FAMILIES[choose("model family", name, FAMILIES)]


def preset(name: str) -> Preset:
    """The published size called `name`; `UserError` with the list of sizes otherwise."""
    return PRESETS[choose("model", name, PRESETS)]
