"""Which model families there are: configurations, modules, image codecs and published sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from flax import nnx

from varjax.codecs.config import VQVAEConfig
from varjax.codecs.vqvae import VQVAE
from varjax.errors import UserError, choose
from varjax.models import parameters, var
from varjax.models.pipeline import VARPipeline


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
    """A transformer, the codec that turns its tokens into pictures, and both for the engine."""

    name: str
    transformer: Part
    codec: Part
    pipeline: type


@dataclass(frozen=True)
class Preset:
    """A published size: both configurations and the sampling its authors recommend."""

    family: str
    transformer: object
    codec: object
    sampling: Mapping = field(default_factory=dict)


FAMILIES = {
    "var": Family(
        "var", Part("VAR", var.VARConfig, var.VAR), Part("VQVAE", VQVAEConfig, VQVAE), VARPipeline
    ),
}

# Settings of the published FID evaluation of VAR.
VAR_SAMPLING = {"cfg": 1.5, "top_k": 900, "top_p": 0.96, "more_smooth": False}

PRESETS = {
    name: Preset("var", config, VQVAEConfig(schedule=config.schedule), VAR_SAMPLING)
    for name, config in var.PRESETS.items()
}


def family(name: str) -> Family:
    """The family called `name`; `UserError` with the list of families otherwise."""
    return FAMILIES[choose("model family", name, FAMILIES)]


def preset(name: str) -> Preset:
    """The published size called `name`; `UserError` with the list of sizes otherwise."""
    return PRESETS[choose("model", name, PRESETS)]
