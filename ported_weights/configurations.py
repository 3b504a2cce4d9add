"""A published model: its files, its configurations, and what is kept beside its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ported_weights.tables.registry import CUSTOM_DEFAULTS, CustomDefaults
from varjax.errors import UserError, about, some
from varjax.models import registry
from varjax.nn.families import Family
from varjax.sampling import RECOMMENDABLE, Sampling
from varjax.storage.manifest import is_text, read_json

MODELS = (*registry.PRESETS, *(f"{family}-custom" for family in registry.FAMILIES))
Say: TypeAlias = Callable[[str], None]  # gets one line of a report


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model and its files, named as the flags of `python -m ported_weights`.

    Attributes:
      model: a published size, or FAMILY-custom.
      source: the weights of the transformer: a file, or a folder of shards.
      tokenizer_source: the weights of the image tokenizer, in a file or folder of the same kinds.
      text_encoder_source: folder of the published text encoder; None: the model gets none.
      config: JSON file with the arguments of the transformer's constructor, for FAMILY-custom.
      tokenizer_config: the same for the tokenizer; None: the published tokenizer's.
      source_key: which state dict of `source` is meant; None: there is only one that fits.
      tokenizer_source_key: the same for `tokenizer_source`.
      class_names: JSON file with a list of names, or {"classes": list}; index = label.
      sampling: JSON file with recommended sampling; None: that of the published size or family.
    """

    model: str
    source: str
    tokenizer_source: str | None = None
    text_encoder_source: str | None = None
    config: str | None = None
    tokenizer_config: str | None = None
    source_key: str | None = None
    tokenizer_source_key: str | None = None
    class_names: str | None = None
    sampling: str | None = None

    @property
    def family(self) -> Family:
        if self.model in registry.PRESETS:
            return registry.family(registry.preset(self.model).family)
        return registry.family(self.model.removesuffix("-custom"))

    @property
    def defaults(self) -> CustomDefaults:
        """What a custom model of this family takes where nothing is given."""
        return CUSTOM_DEFAULTS[self.family.name]

    def check_tokenizer_source(self) -> None:
        """`UserError` without weights of the image tokenizer."""
        if not self.tokenizer_source:
            raise UserError(
                "--tokenizer_source is required: the file with the weights of the image tokenizer"
                f" (published for {self.family.parts['transformer'].name}:"
                f" {self.defaults.tokenizer_files}); if --source holds both, give it twice"
            )

    def configurations(self, say: Say = print) -> tuple[dict, dict]:
        """Read ({part: configuration}, recommended sampling).

        They are those of the published size, or of the files `config` and `tokenizer_config`. If
        such a file holds several configurations, the name of the weights chooses among them.
        """
        if self.model not in registry.PRESETS:
            return self._custom_configurations(say)
        preset = registry.preset(self.model)
        for flag, given in (("config", self.config), ("tokenizer_config", self.tokenizer_config)):
            if given:
                raise UserError(
                    f"--{flag} is for *-custom models; {self.model} has a published configuration:"
                    f" drop the flag or choose --model={self.family.name}-custom"
                )
        return dict(preset.configs), dict(preset.sampling)

    def _custom_configurations(self, say: Say) -> tuple[dict, dict]:
        family = self.family
        if not self.config:
            raise UserError(
                f"--model={self.model} needs --config=FILE.json with the argument names of the"
                f" published constructor, for example {self.defaults.example}"
            )
        given = _arguments(self.config, self.source)
        codec = self._codec(given, say)
        if isinstance(given, Mapping):  # what both must agree in may be left out; maps are adapted
            shared = {name: getattr(codec, name) for name in family.agreed if name != "schedule"}
            given = shared | given
        with about(self.config):
            transformer = family.parts["transformer"].read(given)
        tell = say if self.tokenizer_config else lambda line: None
        codec = self.defaults.adapt(codec, transformer, tell)
        configs = {"transformer": transformer, "codec": codec}
        try:
            family.check(configs)
        except UserError as error:
            files = f"{self.config} and {self.tokenizer_config or 'the published tokenizer'}"
            problem = f"the configurations do not belong together: {error} ({files})"
            raise UserError(problem) from error
        return configs, dict(self.defaults.sampling(transformer))

    def _codec(self, transformer_arguments: object, say: Say) -> object:
        """The tokenizer's configuration: its own file's, or the published one that fits."""
        if self.tokenizer_config:
            given = _arguments(self.tokenizer_config, self.tokenizer_source)
        else:
            known = transformer_arguments if isinstance(transformer_arguments, Mapping) else {}
            given, words = self.defaults.tokenizer(known)
            say(f"--tokenizer_config is not given: taking the published tokenizer ({words})")
        with about(self.tokenizer_config or "published defaults"):
            return self.family.parts["codec"].read(given)

    def read_class_names(self, transformer: object) -> list[str]:
        """The names in the file `class_names`, as many as a transformer's configuration has."""
        path = self.class_names
        names = read_json(path)
        names = names.get("classes") if isinstance(names, dict) else names
        if not (isinstance(names, list) and all(map(is_text, names))):
            raise UserError(f'{path} must hold a list of texts, or {{"classes": [...]}}')
        count = getattr(transformer, "num_classes", 0)
        if len(names) != count:
            raise UserError(f"{path} has {len(names)} class names, the model has {count} classes")
        return names

    def read_sampling(self, default: Mapping, transformer, say: Say) -> dict:
        """Recommended sampling: the default, updated from the file `sampling`."""
        path = self.sampling
        if not path:
            return dict(default)
        given = read_json(path)
        if not isinstance(given, dict):
            raise UserError(f"{path} must hold names and values: {', '.join(RECOMMENDABLE)}")
        for name in (n for n in given if n not in RECOMMENDABLE):
            say(f"{path}: {name} is not a sampling setting, ignored")
        chosen = dict(default) | {n: v for n, v in given.items() if n in RECOMMENDABLE}
        with about(path):
            transformer.check_sampling(Sampling.recommended(chosen))
        return chosen


def _arguments(path: str, weights: str | None) -> object:
    """Read names and values from a configuration file.

    A file may hold several configurations: the one that has the name of the weights is taken.
    """
    content = read_json(path)
    several = isinstance(content, Mapping) and all(isinstance(v, dict) for v in content.values())
    if not (several and content):
        return content
    file = Path(weights or "")
    names = (file.name, file.stem, file.parent.name)  # the last for the index of a folder of shards
    if found := next((content[name] for name in names if name in content), None):
        return found
    raise UserError(
        f"{path} holds several configurations ({some(content)}), none of them called as the"
        f" weights {file.name!r}: put the one to use into a file of its own"
    )
