"""A published model: its files, its configurations, and what is kept beside its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ported_weights.readers import sources
from ported_weights.tables.registry import CUSTOM_DEFAULTS, RULE_TABLES, CustomDefaults
from varjax.core.errors import UserError, about, some
from varjax.models import registry
from varjax.storage.families import Family
from varjax.storage.manifest import RECOMMENDABLE, read_class_names, read_json, recommended_sampling

MODELS = (*registry.PRESETS, *(f"{family}-custom" for family in registry.FAMILIES))
Say: TypeAlias = Callable[[str], None]  # gets one line of a report


def _flag(text: str) -> str | None:
    """Return an optional field. text: help of its flag."""
    return field(default=None, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model and its files. Every field is also a flag of `python -m ported_weights`,
    with the help that stands here.

    Attributes:
      model: a published size, or FAMILY-custom.
      source: the weights of the transformer: a file, or a folder of shards.
    """

    model: str
    source: str
    tokenizer_source: str | None = _flag("Weights of the image tokenizer.")
    text_encoder_source: str | None = _flag("Text models: folder of the published flan-t5.")
    config: str | None = _flag(
        "*-custom models: JSON file with the transformer's arguments; for Janus-Pro and Lumina-mGPT"
        " by default the config.json beside --source."
    )
    tokenizer_config: str | None = _flag("*-custom models: the same for the tokenizer.")
    class_names: str | None = _flag("JSON list of class names, index = label.")
    sampling: str | None = _flag(f"JSON file: recommended {', '.join(RECOMMENDABLE)}.")
    source_key: str | None = _flag("Which state dict of --source, for example ema.")
    tokenizer_source_key: str | None = _flag("Which state dict of --tokenizer_source.")
    prompt_tokenizer_source: str | None = _flag(
        "Janus-Pro, Lumina-mGPT: tokenizer.json of prompts; by default the one beside --source."
    )
    vocabulary: str | None = _flag(
        "Lumina-mGPT: JSON file with names and ids of tokens, if none lies beside --source."
    )

    @property
    def family(self) -> Family:
        if self.model in registry.PRESETS:
            return registry.family(registry.preset(self.model).family)
        return registry.family(self.model.removesuffix("-custom"))

    @property
    def defaults(self) -> CustomDefaults:
        """Defaults of a custom model of this family."""
        return CUSTOM_DEFAULTS[self.family.name]

    def check_files(self) -> None:
        """`UserError` without weights of the image tokenizer, or for files of other families."""
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
        if self.model in registry.PRESETS:
            for name in ("config", "tokenizer_config"):
                if getattr(self, name):
                    raise UserError(
                        f"--{name} is for *-custom models; {self.model} has a published"
                        " configuration: drop the flag or choose"
                        f" --model={self.family.name}-custom"
                    )
            preset = registry.preset(self.model)
            configs, sampling = dict(preset.configs), dict(preset.sampling)
        else:
            configs, sampling = self._custom_configurations(say)
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

    def _custom_configurations(self, say: Say) -> tuple[dict, dict]:
        family, own = self.family, self.defaults
        file, is_whole, beside = self.config, own.is_whole, self._folders()[:1]
        if not file and is_whole and beside and (beside[0] / "config.json").is_file():
            file = str(beside[0] / "config.json")
        if not file:
            raise UserError(
                f"--model={self.model} needs --config=FILE.json with the argument names of the"
                " published constructor (docs/howto/port.md has one of each family)"
            )
        given = read_json(file) if is_whole else _arguments(file, self.source)
        if is_whole and isinstance(given, Mapping):
            signature = RULE_TABLES[family.parts["transformer"].name].signature
            weights = partial(sources.open_source, self.source, signature, self.source_key)
            given = own.translate(given, Path(file), weights, say)
        codec = self._codec(given if isinstance(given, Mapping) else {}, file, say)
        if isinstance(given, Mapping) and not is_whole:
            # what both must agree in may be left out; maps are adapted
            agreed = (name for name in family.agreed if name != "schedule")
            given = {name: getattr(codec, name) for name in agreed} | given
        with about(file):
            transformer = family.parts["transformer"].read(given)
        codec = own.adapt(codec, transformer, say if self.tokenizer_config else lambda line: None)
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
        return configs, dict(own.sampling(transformer))

    def _codec(self, known: Mapping, file: str, say: Say) -> object:
        """The tokenizer's configuration: its own file's, or the published one that fits. known,
        file: arguments of the transformer, and where they are."""
        where, is_whole = self.tokenizer_config, self.defaults.is_whole
        if where:
            given = _arguments(where, self.tokenizer_source)
        else:
            given, words = self.defaults.tokenizer(known)
            where = file if is_whole else "published defaults"
            if not is_whole:
                say(f"--tokenizer_config is not given: taking the published tokenizer ({words})")
        with about(where):
            return self.family.parts["codec"].read(given)

    def read_class_names(self, transformer: object) -> list[str]:
        """The names in the file `class_names`, as many as a transformer's configuration has."""
        names = read_class_names(self.class_names)
        count = getattr(transformer, "num_classes", 0)
        if len(names) != count:
            has = f"{self.class_names} has {len(names)} class names"
            raise UserError(f"{has}, the model has {count} classes")
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
            transformer.check_sampling(recommended_sampling(chosen))
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
