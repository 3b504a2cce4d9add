"""A published model: its files, its configurations, and what is kept beside its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ported_weights.readers import sources
from ported_weights.tables.registry import (
    CUSTOM_DEFAULTS,
    RULE_TABLES,
    CustomDefaults,
)
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
      config: JSON file with the arguments of the transformer's constructor, for FAMILY-custom;
        None: the published config.json beside `source`, in families that have one.
      tokenizer_config: the same for the tokenizer; None: the published tokenizer's.
      source_key: which state dict of `source` is meant; None: there is only one that fits.
      tokenizer_source_key: the same for `tokenizer_source`.
      class_names: JSON file with a list of names, or {"classes": list}; index = label.
      sampling: JSON file with recommended sampling; None: that of the published size or family.
      prompt_tokenizer_source: the tokenizer of prompts, a tokenizer.json, to keep beside the
        weights; None: the one that lies beside `source`, if any. For models of token ids.
      vocabulary: JSON file that names the image tokens, where `source` has none; for Lumina-mGPT.
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
    prompt_tokenizer_source: str | None = None
    vocabulary: str | None = None

    @property
    def family(self) -> Family:
        if self.model in registry.PRESETS:
            return registry.family(registry.preset(self.model).family)
        return registry.family(self.model.removesuffix("-custom"))

    @property
    def defaults(self) -> CustomDefaults:
        """What a custom model of this family takes where nothing is given."""
        return CUSTOM_DEFAULTS[self.family.name]

    def check_files(self) -> None:
        """`UserError` without weights of the image tokenizer, or for files that this family does
        not have."""
        name = self.family.parts["transformer"].name
        if self.prompt_tokenizer_source and not self.defaults.prompt_tokenizers:
            raise UserError(f"--prompt_tokenizer_source: {name} takes no token ids: drop it")
        if self.vocabulary and not self.defaults.complete:
            raise UserError(f"--vocabulary: {name} has no names of image tokens: drop it")
        if not (self.tokenizer_source or self.defaults.codec_prefixes):
            raise UserError(
                "--tokenizer_source is required: the file with the weights of the image tokenizer"
                f" (published for {name}:"
                f" {self.defaults.tokenizer_files}); if --source holds both, give it twice"
            )

    def configurations(self, say: Say = print) -> tuple[dict, dict]:
        """Read ({part: configuration}, recommended sampling).

        They are those of the published size, or of the files `config` and `tokenizer_config`. If
        such a file holds several configurations, the name of the weights chooses among them.
        """
        if self.model not in registry.PRESETS:
            configs, sampling = self._custom_configurations(say)
        else:
            configs, sampling = self._published_configurations()
        if complete := self.defaults.complete:
            given = configs["transformer"], self.vocabulary, self._folders()
            configs["transformer"] = complete(*given)
        return configs, sampling

    def _folders(self) -> list[Path]:
        """The folders in which the weights lie."""
        given = [Path(path) for path in (self.source, self.tokenizer_source) if path]
        return [path if path.is_dir() else path.parent for path in given]

    def prompt_tokenizer(self) -> Path | None:
        """The tokenizer of prompts to keep: the one that was given, or lies beside the weights.
        `UserError` if it is no tokenizer file."""
        if given := self.prompt_tokenizer_source:
            found = Path(given)
        else:
            names = self.defaults.prompt_tokenizers
            files = (folder / name for folder in self._folders() for name in names)
            found = next(filter(Path.is_file, files), None)
        if found is not None:
            content = read_json(found)
            if not (isinstance(content, dict) and isinstance(content.get("model"), dict)):
                raise UserError(f"{found} is no tokenizer.json of the tokenizers library")
        return found

    def _published_configurations(self) -> tuple[dict, dict]:
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
        file = self.config_file
        if not file:
            raise UserError(
                f"--model={self.model} needs --config=FILE.json with the argument names of the"
                f" published constructor, for example {self.defaults.example}"
            )
        is_whole = self.defaults.is_whole
        given = self._given(file, say)
        codec = self._codec(given, say)
        if (
            isinstance(given, Mapping) and not is_whole
        ):  # what both must agree in may be left out; maps are adapted
            shared = {name: getattr(codec, name) for name in family.agreed if name != "schedule"}
            given = shared | given
        if isinstance(given, Mapping):
            given = self.defaults.prepare(given)
        with about(file):
            transformer = family.parts["transformer"].read(given)
        tell = say if self.tokenizer_config else lambda line: None
        codec = self.defaults.adapt(codec, transformer, tell)
        if transformer.condition == "prompt_ids":
            height, width = transformer.grid
            say(
                f"images of {height}x{width} tokens, prompts of at most {transformer.prompt_tokens}"
                " (commands take --grid and --prompt_tokens)"
            )
        configs = {"transformer": transformer, "codec": codec}
        try:
            family.check(configs)
        except UserError as error:
            other = self.tokenizer_config or (None if is_whole else "the published tokenizer")
            files = " and ".join(filter(None, (file, other)))
            problem = f"the configurations do not belong together: {error} ({files})"
            raise UserError(problem) from error
        return configs, dict(self.defaults.sampling(transformer))

    @property
    def config_file(self) -> str | None:
        """The configuration of a custom model: the file given, or the config.json beside weights of
        a family whose config.json describes the whole model."""
        folders = self._folders()
        beside = folders and folders[0] / "config.json"
        if self.config or not (self.defaults.is_whole and beside and beside.is_file()):
            return self.config
        return str(beside)

    def _given(self, file: str, say: Say) -> object:
        """What a configuration file says about the transformer, in the original's names."""
        if not self.defaults.is_whole:
            return _arguments(file, self.source)
        given = read_json(file)
        if not isinstance(given, Mapping):
            return given
        table = RULE_TABLES[self.family.parts["transformer"].name]

        def weights() -> Mapping[str, sources.Tensor]:
            return sources.open_source(self.source, table.signature, self.source_key).tensors

        return self.defaults.translate(given, Path(file), weights, say)

    def _codec(self, transformer_arguments: object, say: Say) -> object:
        """The tokenizer's configuration: its own file's, or the published one that fits."""
        if self.tokenizer_config:
            given = _arguments(self.tokenizer_config, self.tokenizer_source)
        else:
            known = transformer_arguments if isinstance(transformer_arguments, Mapping) else {}
            given, words = self.defaults.tokenizer(known)
            if not self.defaults.is_whole:
                say(f"--tokenizer_config is not given: taking the published tokenizer ({words})")
        own = self.config_file if self.defaults.is_whole else "published defaults"
        with about(self.tokenizer_config or own):
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
