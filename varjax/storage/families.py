"""Parts, and the families of models that they make together: what a checkpoint may hold.

Which families there are is not said here: `varjax.models.registry` lists the models,
`varjax.models.judges` the networks that judge pictures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flax import nnx

from varjax.conditions import ConditionKind
from varjax.core.errors import UserError, choose
from varjax.storage import parameters
from varjax.storage.published import Configuration


@dataclass(frozen=True)
class Part:
    """A module together with its configuration class.

    name: what messages and the rules of ported weights call it.
    config: has `from_published(dict)` and `to_published()`.
    module: is built as `module(config, rngs=rngs)`.
    own_folder: whether it lies in a folder of its own, which a checkpoint may lack and which is
      read only on request. The other parts share the tree of the checkpoint.
    """

    name: str
    config: type[Configuration]
    module: type[nnx.Module]
    own_folder: bool = False

    def read(self, published: Mapping) -> Configuration:
        """Configuration from the published constructor's argument names; `UserError` for others."""
        if not isinstance(published, Mapping):
            raise UserError(
                f"{self.name} configuration: expected names and values, got {published!r:.60}"
            )
        try:
            return self.config.from_published(published)
        except (TypeError, AttributeError, OverflowError) as error:  # a text where a number belongs
            problem = f"a value has the wrong type: {error}"
            raise UserError(f"{self.name} configuration: {problem}") from error

    def abstract(self, config: Configuration) -> nnx.Module:
        """The module with shapes and types in place of arrays; allocates nothing."""
        return parameters.abstract(self.module, config)


@dataclass(frozen=True)
class Family:
    """Parts that make a model together.

    parts: by name. "transformer" and "codec", which turns tokens into pictures, are always there.
    agreed: names that the configurations of both have and must agree in.
    conditions: kinds of condition that its models draw from, by name. A transformer's configuration
      names its own kind (`condition`).
    """

    name: str
    parts: Mapping[str, Part]
    agreed: tuple[str, ...]
    conditions: Mapping[str, ConditionKind]

    @property
    def tree(self) -> dict[str, Part]:
        """The parts that lie together in every checkpoint of the family."""
        return {name: part for name, part in self.parts.items() if not part.own_folder}

    def check(self, configs: Mapping[str, Configuration]) -> None:
        """Raises `UserError` if configurations, {part: configuration}, do not belong together."""
        for name in self.agreed:
            ours, theirs = getattr(configs["transformer"], name), getattr(configs["codec"], name)
            if ours != theirs:
                shown = "patch_nums" if name == "schedule" else name
                raise UserError(
                    f"{shown} is {str(ours):.200} for the transformer and {str(theirs):.200} for "
                    f"the codec; they must agree"
                )


@dataclass(frozen=True)
class Catalogue:
    """The families and parts that a reader of checkpoints knows.

    families: by name.
    parts: those with a folder of their own, by the name of that folder. Some belong to no family.
    """

    families: dict[str, Family] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def family(self, name: str) -> Family:
        """The family called `name`; `UserError` with the list of families otherwise."""
        return self.families[choose("model family", name, self.families)]


CATALOGUE = Catalogue()  # of models: `varjax.models.registry` fills it
