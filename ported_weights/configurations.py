"""Configurations of the parts of a model, and the small files with what is kept beside weights."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ported_weights.tables.registry import CUSTOM
from varjax.errors import UserError, about, some
from varjax.models import registry
from varjax.nn.families import Family
from varjax.sampling import RECOMMENDABLE, Sampling
from varjax.storage.manifest import is_text, read_json

MODELS = (*registry.PRESETS, *(f"{family}-custom" for family in registry.FAMILIES))


def model_family(model: str) -> Family:
    """Of a preset's name, or of FAMILY-custom."""
    if model in registry.PRESETS:
        return registry.family(registry.preset(model).family)
    return registry.family(model.removesuffix("-custom"))


def configurations(
    model: str,
    *,
    source: str | None = None,
    tokenizer_source: str | None = None,
    config: str | None = None,
    tokenizer_config: str | None = None,
    say: Callable[[str], None] = print,
) -> tuple[dict, dict]:
    """({part: configuration}, recommended sampling) of a published size or of the files `config`
    and `tokenizer_config`; names of the weights choose among several configurations of a file."""
    family = model_family(model)
    if model in registry.PRESETS:
        preset = registry.preset(model)
        for flag, given in (("config", config), ("tokenizer_config", tokenizer_config)):
            if given:
                raise UserError(
                    f"--{flag} is for *-custom models; {model} has a published configuration: drop"
                    f" the flag or choose --model={family.name}-custom"
                )
        return dict(preset.configs), dict(preset.sampling)
    custom = CUSTOM[family.name]
    if not config:
        raise UserError(
            f"--model={model} needs --config=FILE.json with the argument names of the published"
            f" constructor, for example {custom.example}"
        )
    given = _arguments(config, source)
    if tokenizer_config:
        codec_given = _arguments(tokenizer_config, tokenizer_source)
    else:
        codec_given, words = custom.tokenizer(given if isinstance(given, Mapping) else {})
        say(f"--tokenizer_config is not given: taking the published tokenizer ({words})")
    with about(tokenizer_config or "published defaults"):
        codec = family.parts["codec"].read(codec_given)
    if isinstance(given, Mapping):  # what both must agree in may be left out; maps are adapted
        shared = [name for name in family.agreed if name != "schedule"]
        given = {**{name: getattr(codec, name) for name in shared}, **given}
    with about(config):
        transformer = family.parts["transformer"].read(given)
    tell = say if tokenizer_config else lambda line: None
    configs = {"transformer": transformer, "codec": custom.adapt(codec, transformer, tell)}
    try:
        family.check(configs)
    except UserError as error:
        files = f"{config} and {tokenizer_config or 'the published tokenizer'}"
        raise UserError(f"the configurations do not belong together: {error} ({files})") from error
    return configs, dict(custom.sampling(transformer))


def _arguments(path: str, weights: str | None):
    """Names and values of a configuration file. Of a file with several configurations, that which
    is called as the weights are."""
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


# --- small files ----------------------------------------------------------------------------------


def class_names_of(path: str, transformer) -> list[str]:
    """A JSON list of names, or {"classes": list}; index = label."""
    names = read_json(path)
    names = names.get("classes") if isinstance(names, dict) else names
    if not (isinstance(names, list) and all(map(is_text, names))):
        raise UserError(f'{path} must hold a list of texts, or {{"classes": [...]}}')
    count = getattr(transformer, "num_classes", 0)
    if len(names) != count:
        raise UserError(f"{path} has {len(names)} class names, the model has {count} classes")
    return names


def sampling_of(path: str | None, default: Mapping, transformer, say) -> dict:
    """Recommended sampling: the default, updated from a JSON file."""
    if not path:
        return dict(default)
    given = read_json(path)
    if not isinstance(given, dict):
        raise UserError(f"{path} must hold names and values: {', '.join(RECOMMENDABLE)}")
    for name in (n for n in given if n not in RECOMMENDABLE):
        say(f"{path}: {name} is not a sampling setting, ignored")
    chosen = {**default, **{n: v for n, v in given.items() if n in RECOMMENDABLE}}
    with about(path):
        transformer.check_sampling(Sampling.recommended(chosen))
    return chosen
