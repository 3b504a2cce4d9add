"""From published PyTorch files to a varjax checkpoint folder: the library behind the command."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ported_weights import rules
from ported_weights.readers import sources
from ported_weights.tables import t5
from ported_weights.tables.registry import CUSTOM, TABLES, Table
from varjax.cli.command_line import Progress
from varjax.errors import UserError, choose
from varjax.models import parameters, registry
from varjax.sampling import RECOMMENDABLE, Sampling
from varjax.storage import checkpoint
from varjax.storage.atomic import check_new_folder
from varjax.storage.manifest import parse_json
from varjax.text import encoder as text_encoder

CONVERTER_VERSION = 1
DTYPES = ("float32", "bfloat16")
MODELS = (*registry.PRESETS, *(f"{family}-custom" for family in registry.FAMILIES))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to convert. Paths as given by the user; None means not given."""

    model: str
    source: str
    out: str
    tokenizer_source: str | None = None
    text_encoder_source: str | None = None
    config: str | None = None
    tokenizer_config: str | None = None
    source_key: str | None = None
    tokenizer_source_key: str | None = None
    dtype: str | None = None
    class_names: str | None = None
    sampling: str | None = None
    overwrite: bool = False


def convert(request: Request, say: Callable[[str], None] = print) -> None:
    """Read both PyTorch files and write `request.out`; `say` gets a line per result.

    Raises:
      UserError: wrong input of any kind. Nothing is written then.
    """
    choose("model", request.model, MODELS)
    if request.dtype is not None:
        choose("dtype", request.dtype, DTYPES)
    check_new_folder(request.out, overwrite=request.overwrite)
    tokenizer_source = _tokenizer_source(request)
    family, transformer, codec, sampling = configurations(request, say)
    encoder = _open_text_encoder(family, transformer, request)
    metadata = {
        "model": request.model,
        "sampling": _sampling(request.sampling, sampling, transformer, say),
        "converter_version": CONVERTER_VERSION,
        "sources": [],
    }
    if request.class_names:
        metadata["class_names"] = _class_names(request.class_names, transformer)
    parts = {
        "transformer": (family.transformer, transformer, request.source, request.source_key),
        "codec": (family.codec, codec, *tokenizer_source),
    }
    opened = {name: _open(part, path, key) for name, (part, _, path, key) in parts.items()}
    modules = _modules(parts, opened, request.dtype, say)
    for name, source in opened.items():
        metadata["sources"] += [{"part": name, **f} for f in source.fingerprints()]
    checkpoint.save(
        request.out,
        family=family.name,
        **modules,
        metadata=metadata,
        overwrite=request.overwrite,
        also=_text_encoder_writer(encoder, request.dtype, say),
    )
    say(f"{request.out}: {sum(map(parameters.count, modules.values())):,} parameters written")


def _modules(parts: Mapping, opened: Mapping, dtype: str | None, say) -> dict:
    """Both modules, filled; what is wrong with either is reported together."""
    modules, problems = {}, []
    for name, (part, config, _, _) in parts.items():
        try:
            modules[name] = _port(part, config, opened[name], dtype, say)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return modules


def _family(model: str) -> registry.Family:
    """Of a preset's name, or of FAMILY-custom."""
    if model in registry.PRESETS:
        return registry.family(registry.preset(model).family)
    return registry.family(model.removesuffix("-custom"))


def _tokenizer_source(request: Request) -> tuple[str, str | None]:
    if request.tokenizer_source:
        return request.tokenizer_source, request.tokenizer_source_key
    family = _family(request.model)
    raise UserError(
        "--tokenizer_source is required: the file with the weights of the image tokenizer"
        f" (published for {family.transformer.name}: {CUSTOM[family.name].tokenizer_files}); if"
        " --source holds both, give it twice"
    )


def _open_text_encoder(
    family: registry.Family, transformer, request: Request
) -> t5.PublishedEncoder | None:
    """The text encoder to convert, if any; all but the values of its weights is checked."""
    if not request.text_encoder_source:
        return None
    if family.condition != "text":
        raise UserError(
            f"--text_encoder_source: {family.transformer.name} draws classes, not texts: drop it"
        )
    try:
        encoder = t5.open_folder(request.text_encoder_source)
    except UserError as error:
        raise type(error)(f"--text_encoder_source: {error}") from error
    width = encoder.config.d_model
    if width != transformer.text_channels:
        raise UserError(
            f"--text_encoder_source: {request.text_encoder_source} gives features of width {width},"
            f" the transformer reads width {transformer.text_channels} (text_channels): take the"
            " encoder it was trained with (flan-t5-xl for the released models)"
        )
    return encoder


def _text_encoder_writer(encoder: t5.PublishedEncoder | None, dtype: str | None, say):
    """What writes the text encoder, which is read now, into the checkpoint's folder."""
    if encoder is None:
        return None
    ported = encoder.read(say)
    return lambda folder: ported.write(folder / text_encoder.FOLDER, dtype=dtype)


def _open(part: registry.Part, path: str, key: str | None) -> sources.Source:
    """The weights of one part, unless they are visibly those of the other."""
    table = TABLES[part.name]
    source = sources.open_source(path, table.signature, key)
    _check_kind(table, source)
    return source


def _port(part: registry.Part, config, source: sources.Source, dtype: str | None, say):
    """One module, filled; what was read and ignored is reported."""
    table = TABLES[part.name]
    if source.taken:
        say(f"{source.path}: took {source.taken}")
    progress = Progress(f"{table.what}: tensors", len(source.tensors), every=2.0)

    def report(done: int, total: int) -> None:
        progress.total = total
        if done % 50 == 0 or done == total:
            progress.update(done)

    try:
        ported = rules.apply(
            table.rules(config, source.tensors),
            source.tensors,
            part.abstract(config),
            report,
            dtype,
        )
    except UserError as error:
        raise UserError(
            f"{source.path} does not fit the {table.what} configuration: {error}"
        ) from error
    say(
        f"{table.what}: {ported.tensors_read} tensors read from {source.path},"
        f" {parameters.count(ported.module):,} parameters"
    )
    for name, reason in _grouped(ported.ignored):
        say(f"  ignored {name}: {reason}")
    return ported.module


def _grouped(ignored: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names with the same reason on one line."""
    groups: dict[str, list[str]] = {}
    for name, reason in ignored:
        groups.setdefault(reason, []).append(name)
    return [(_shortened(names), reason) for reason, names in groups.items()]


def _shortened(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _check_kind(table: Table, source: sources.Source) -> None:
    """Say so when the file holds the weights of another kind of model, as when two are swapped."""
    if sources.looks_like(source.tensors, table.signature):
        return
    for other in TABLES.values():
        if sources.looks_like(source.tensors, other.signature):
            raise UserError(
                f"{table.flag}: {source.path} looks like {other.what} weights, not {table.what}"
                f" weights: it belongs to {other.flag}"
            )


# --- configurations -------------------------------------------------------------------------------


def configurations(request: Request, say: Callable[[str], None] = print):
    """(family, transformer configuration, codec configuration, recommended sampling)."""
    family = _family(request.model)
    if request.model not in registry.PRESETS:
        transformer, codec = _custom(family, request, say)
        return family, transformer, codec, dict(CUSTOM[family.name].sampling(transformer))
    preset = registry.preset(request.model)
    for flag in ("config", "tokenizer_config"):
        if getattr(request, flag):
            raise UserError(
                f"--{flag} is for *-custom models; {request.model} has a published configuration:"
                f" drop the flag or choose --model={family.name}-custom"
            )
    return family, preset.transformer, preset.codec, dict(preset.sampling)


def _custom(family: registry.Family, request: Request, say):
    """Both configurations from their files, checked against each other."""
    custom = CUSTOM[family.name]
    if not request.config:
        raise UserError(
            f"--model={request.model} needs --config=FILE.json with the argument names of the"
            f" published constructor, for example {custom.example}"
        )
    given = _arguments(request.config, request.source)
    codec = _explained(
        family.codec, _codec_arguments(custom, given, request, say), request.tokenizer_config
    )
    if isinstance(given, Mapping):  # what both must agree in may be left out; maps are adapted
        shared = [name for name in family.agreed if name != "schedule"]
        given = {**{name: getattr(codec, name) for name in shared}, **given}
    transformer = _explained(family.transformer, given, request.config)
    tell = say if request.tokenizer_config else lambda line: None
    codec = custom.adapt(codec, transformer, tell)
    try:
        family.check(transformer, codec)
    except UserError as error:
        files = f"{request.config} and {request.tokenizer_config or 'the published tokenizer'}"
        raise UserError(f"the configurations do not belong together: {error} ({files})") from error
    return transformer, codec


def _codec_arguments(custom, transformer, request: Request, say):
    """The tokenizer's arguments: those of its file, or of the published one."""
    if request.tokenizer_config:
        return _arguments(request.tokenizer_config, request.tokenizer_source)
    arguments, words = custom.tokenizer(transformer if isinstance(transformer, Mapping) else {})
    say(f"--tokenizer_config is not given: taking the published tokenizer ({words})")
    return arguments


def _arguments(path: str, weights: str | None):
    """Names and values of a configuration file. Of a file with several configurations, that which
    is called as the weights are."""
    content = _read_json(path)
    several = isinstance(content, Mapping) and all(isinstance(v, dict) for v in content.values())
    if not (several and content):
        return content
    file = Path(weights or "")
    names = (file.name, file.stem, file.parent.name)  # the last for the index of a folder of shards
    if found := next((content[name] for name in names if name in content), None):
        return found
    raise UserError(
        f"{path} holds several configurations ({', '.join(content)}), none of them called as the"
        f" weights {file.name!r}: put the one to use into a file of its own"
    )


def _explained(part: registry.Part, arguments, path: str | None):
    """Configuration of a file; errors name the file."""
    try:
        return part.read(arguments)
    except UserError as error:
        raise UserError(f"{path or 'published defaults'}: {error}") from error


# --- small files ----------------------------------------------------------------------------------


def _read_json(path: str):
    try:
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} as JSON: {error}") from error


def _class_names(path: str, transformer) -> list[str]:
    """A JSON list of names, or {"classes": list}; index = label."""
    names = _read_json(path)
    names = names.get("classes") if isinstance(names, dict) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f'{path} must hold a list of texts, or {{"classes": [...]}}')
    count = getattr(transformer, "num_classes", 0)
    if len(names) != count:
        raise UserError(f"{path} has {len(names)} class names, the model has {count} classes")
    return names


def _sampling(path: str | None, default: Mapping, transformer, say) -> dict:
    """Recommended sampling: the default, updated from a JSON file."""
    if not path:
        return dict(default)
    given = _read_json(path)
    if not isinstance(given, dict):
        raise UserError(f"{path} must hold names and values: {', '.join(RECOMMENDABLE)}")
    for name in (n for n in given if n not in RECOMMENDABLE):
        say(f"{path}: {name} is not a sampling setting, ignored")
    chosen = {**default, **{n: v for n, v in given.items() if n in RECOMMENDABLE}}
    try:
        transformer.check_sampling(Sampling.recommended(chosen))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return chosen
