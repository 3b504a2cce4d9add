"""From published PyTorch files to a varjax checkpoint folder: the library behind the command."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ported_weights import rules, sources, var, vqvae
from varjax import checkpoint
from varjax.command_line import Progress
from varjax.description import parse_json
from varjax.errors import UserError, choose
from varjax.folders import check_absent
from varjax.models import parameters, registry
from varjax.sampling import Sampling

CONVERTER_VERSION = 1
DTYPES = ("float32", "bfloat16")
# Used unless the preset or --sampling says otherwise: guidance as published, no filters.
DEFAULT_SAMPLING = {"cfg": 1.5, "top_k": 0, "top_p": 0.0, "more_smooth": False}


@dataclass(frozen=True)
class Table:
    """How the weights of one module class are recognised and where they go."""

    what: str
    flag: str
    signature: Sequence[str]
    rules: Callable[[object], Sequence]


TABLES = {
    "VAR": Table("VAR transformer", "--source", var.SIGNATURE, var.var_rules),
    "VQVAE": Table("VQVAE tokenizer", "--tokenizer_source", vqvae.SIGNATURE, vqvae.vqvae_rules),
}
MODELS = (*registry.PRESETS, *(f"{family}-custom" for family in registry.FAMILIES))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to convert. Paths as given by the user; None means not given."""

    model: str
    source: str
    out: str
    tokenizer_source: str | None = None
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
    check_absent(request.out, overwrite=request.overwrite)
    family, transformer, codec, sampling = configurations(request, say)
    metadata = {
        "model": request.model,
        "sampling": _sampling(request.sampling, sampling, transformer.vocab_size, say),
        "converter_version": CONVERTER_VERSION,
        "sources": [],
    }
    if request.class_names:
        metadata["class_names"] = _class_names(request.class_names, transformer.num_classes)
    parts = {
        "transformer": (family.transformer, transformer, request.source, request.source_key),
        "codec": (family.codec, codec, *_tokenizer_source(request)),
    }
    opened = {name: _open(part, path, key) for name, (part, _, path, key) in parts.items()}
    modules, problems = {}, []
    for name, (part, config, _, _) in parts.items():
        try:
            modules[name] = _port(part, config, opened[name], say)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    for name, source in opened.items():
        metadata["sources"] += [{"part": name, **f} for f in source.fingerprints()]
    checkpoint.save(
        request.out,
        family=family.name,
        **modules,
        metadata=metadata,
        dtype=request.dtype,
        overwrite=request.overwrite,
    )
    say(f"{request.out}: {sum(map(parameters.count, modules.values())):,} parameters written")


def _tokenizer_source(request: Request) -> tuple[str, str | None]:
    if request.tokenizer_source:
        return request.tokenizer_source, request.tokenizer_source_key
    raise UserError(
        "--tokenizer_source is required: the file with the weights of the image tokenizer (for VAR"
        " the published vae_ch160v4096z32.pth); if --source holds both, give it twice"
    )


def _open(part: registry.Part, path: str, key: str | None) -> sources.Source:
    """The weights of one part, unless they are visibly those of the other."""
    table = TABLES[part.name]
    source = sources.open_source(path, table.signature, key)
    _check_kind(table, source)
    return source


def _port(part: registry.Part, config, source: sources.Source, say):
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
        ported = rules.apply(table.rules(config), source.tensors, part.abstract(config), report)
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
    return [(", ".join(names), reason) for reason, names in groups.items()]


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
    if request.model in registry.PRESETS:
        for flag, value in (
            ("config", request.config),
            ("tokenizer_config", request.tokenizer_config),
        ):
            if value:
                raise UserError(
                    f"--{flag} is for *-custom models; {request.model} has a published"
                    " configuration: drop the flag or choose --model=var-custom"
                )
        preset = registry.preset(request.model)
        return (
            registry.family(preset.family),
            preset.transformer,
            preset.codec,
            dict(preset.sampling),
        )
    family = registry.family(request.model.removesuffix("-custom"))
    return family, *_custom(family, request, say), DEFAULT_SAMPLING


def _custom(family: registry.Family, request: Request, say):
    """Both configurations from their files, checked against each other."""
    if not request.config:
        raise UserError(
            f"--model={request.model} needs --config=FILE.json with the argument names of the"
            ' published constructor, for example {"num_classes": 1000, "depth": 16, "embed_dim":'
            ' 1024, "num_heads": 16, "attn_l2_norm": true, "patch_nums": [1, 2, 3]}'
        )
    given = _read_json(request.config)
    codec = _explained(family.codec, _codec_arguments(request, say), request.tokenizer_config)
    if isinstance(given, Mapping):
        given = {"vocab_size": codec.vocab_size, "z_channels": codec.z_channels, **given}
    transformer = _explained(family.transformer, given, request.config)
    return transformer, _consistent(transformer, codec, request, say)


def _codec_arguments(request: Request, say):
    if request.tokenizer_config:
        return _read_json(request.tokenizer_config)
    say("--tokenizer_config is not given: taking the published tokenizer (4096 codes, 32 channels)")
    return {}


def _explained(part: registry.Part, arguments, path: str | None):
    """Configuration of a file; errors name the file."""
    try:
        return part.read(arguments)
    except UserError as error:
        raise UserError(f"{path or 'published defaults'}: {error}") from error


def _consistent(transformer, codec, request: Request, say):
    """The codec's configuration under the transformer's schedule.

    A tokenizer's weights hardly depend on its schedule, so one tokenizer serves several
    transformers; only phi convolutions that belong to single scales tie it to one.
    """
    for name in ("vocab_size", "z_channels"):
        ours, theirs = getattr(transformer, name), getattr(codec, name)
        if ours != theirs:
            raise UserError(
                f"the configurations do not belong together: {name} is {ours} in {request.config}"
                f" and {theirs} in {request.tokenizer_config or 'the published tokenizer'}"
            )
    if codec.schedule == transformer.schedule:
        return codec
    adapted = dataclasses.replace(codec, schedule=transformer.schedule)
    if adapted.num_phi != codec.num_phi:
        raise UserError(
            f"the tokenizer has one phi convolution for each of its {codec.num_phi} scales"
            f" ({codec.schedule}), the transformer has {transformer.schedule.num_scales} scales"
            f" ({transformer.schedule}): their patch_nums must agree"
        )
    if request.tokenizer_config:
        say(f"tokenizer schedule {codec.schedule}: the transformer's is used instead")
    return adapted


# --- small files ----------------------------------------------------------------------------------


def _read_json(path: str):
    try:
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} as JSON: {error}") from error


def _class_names(path: str, num_classes: int) -> list[str]:
    """A JSON list of names, or {"classes": list}; index = label."""
    names = _read_json(path)
    names = names.get("classes") if isinstance(names, dict) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f'{path} must hold a list of texts, or {{"classes": [...]}}')
    if len(names) != num_classes:
        raise UserError(f"{path} has {len(names)} class names, the model has {num_classes} classes")
    return names


def _sampling(path: str | None, default: Mapping, vocab_size: int, say) -> dict:
    """Recommended sampling: the default, updated from a JSON file."""
    if not path:
        return dict(default)
    given = _read_json(path)
    if not isinstance(given, dict):
        raise UserError(f"{path} must hold names and values: {', '.join(DEFAULT_SAMPLING)}")
    for name in (n for n in given if n not in DEFAULT_SAMPLING):
        say(f"{path}: {name} is not a sampling setting, ignored")
    chosen = {name: given.get(name, default[name]) for name in DEFAULT_SAMPLING}
    try:
        Sampling(**chosen).check(vocab_size)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return chosen
