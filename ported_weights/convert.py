"""From published PyTorch files to a varjax checkpoint folder: the library behind the command.

All parts take the same way: open the weights, recognise them, check names and shapes, read values
by the rule table of the part, report. Everything is checked before a value is read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flax import nnx

from ported_weights import rules
from ported_weights.configurations import (
    MODELS,
    class_names_of,
    configurations,
    model_family,
    sampling_of,
)
from ported_weights.readers import sources
from ported_weights.tables import evaluation
from ported_weights.tables.registry import CUSTOM, TABLES, RuleTable
from varjax.errors import UserError, about, choose, some
from varjax.models import registry
from varjax.nn import parameters
from varjax.progress import Progress
from varjax.storage import checkpoint
from varjax.storage.atomic import check_new_folder
from varjax.text.t5 import SPIECE_FILE

CONVERTER_VERSION = 1
DTYPES = ("float32", "bfloat16")
ENCODER = "text_encoder"
# {model: part that it is}: networks of evaluation, which are no part of a model
NETWORKS = {"inception-fid": "inception", "lpips-alex": "lpips", "lpips-vgg": "lpips"}


def convert(
    *,
    model: str,
    source: str,
    out: str,
    tokenizer_source: str | None = None,
    text_encoder_source: str | None = None,
    config: str | None = None,
    tokenizer_config: str | None = None,
    source_key: str | None = None,
    tokenizer_source_key: str | None = None,
    dtype: str | None = None,
    class_names: str | None = None,
    sampling: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Read PyTorch files and write the checkpoint `out`; `say` gets a line per result.

    The arguments are the flags of `python -m ported_weights`; None means not given.

    Raises:
      UserError: wrong input of any kind. Nothing is written then.
    """
    choose("model", model, MODELS)
    _check_output(out, dtype, overwrite)
    family = model_family(model)
    if not tokenizer_source:
        raise UserError(
            "--tokenizer_source is required: the file with the weights of the image tokenizer"
            f" (published for {family.parts['transformer'].name}:"
            f" {CUSTOM[family.name].tokenizer_files}); if --source holds both, give it twice"
        )
    configs, recommended = configurations(
        model,
        source=source,
        tokenizer_source=tokenizer_source,
        config=config,
        tokenizer_config=tokenizer_config,
        say=say,
    )
    encoder, files = {}, {}
    if text_encoder_source:
        encoder[ENCODER] = _text_encoder_of(family, configs["transformer"], text_encoder_source)
        files[ENCODER] = {SPIECE_FILE: Path(text_encoder_source) / SPIECE_FILE}
    metadata = {
        "model": model,
        "sampling": sampling_of(sampling, recommended, configs["transformer"], say),
        "converter_version": CONVERTER_VERSION,
        "sources": [],
    }
    if class_names:
        metadata["class_names"] = class_names_of(class_names, configs["transformer"])
    weights = {
        "transformer": (source, source_key),
        "codec": (tokenizer_source, tokenizer_source_key),
    }
    opened = {n: _open(family.parts[n], configs[n], *given) for n, given in weights.items()}
    modules, metadata["sources"] = _read(opened | encoder, dtype, say)
    what = {"family": family.name, "parts": modules, "metadata": metadata, "files": files}
    checkpoint.save(out, **what, overwrite=overwrite)
    say(f"{out}: {sum(parameters.count(modules[n]) for n in opened):,} parameters written")


def convert_text_encoder(
    source: str,
    out: str,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Read a published T5 folder and write the folder of an encoder alone; as `convert`."""
    _check_output(out, dtype, overwrite)
    modules, described = _read({ENCODER: _open_text_encoder(source)}, dtype, say)
    files, metadata = {ENCODER: {SPIECE_FILE: Path(source) / SPIECE_FILE}}, {"sources": described}
    what = {"family": None, "parts": modules, "metadata": metadata, "files": files}
    checkpoint.save(out, **what, overwrite=overwrite)


def convert_network(
    model: str,
    source: str,
    out: str,
    *,
    heads_source: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Read a network of evaluation, one of `NETWORKS`, and write its folder; as `convert`. Types
    are float32: features of other ones are others.

    heads_source: weights of LPIPS's five heads, which are published apart from its backbone.
    """
    part_name = NETWORKS[choose("model", model, NETWORKS)]
    _check_output(out, None, overwrite)
    opened = _open_network(registry.OWN_FOLDER[part_name], model, source, heads_source)
    modules, described = _read({part_name: opened}, None, say)
    what = {"family": None, "parts": modules, "metadata": {"sources": described}}
    checkpoint.save(out, **what, overwrite=overwrite)


def _check_output(out: str, dtype: str | None, overwrite: bool) -> None:
    if dtype is not None:
        choose("dtype", dtype, DTYPES)
    check_new_folder(out, replaces=checkpoint.written if overwrite else None, flag="--out")


def _read(opened: Mapping[str, "PublishedPart"], dtype: str | None, say):
    """{name: module} and the files that they were made of; what is wrong with any of the parts is
    reported together, names and shapes of all before values of any."""
    _each(opened, lambda part: part.check())
    modules = _each(opened, lambda part: part.read(dtype, say))
    files = {name: part.source.fingerprints() for name, part in opened.items()}
    return modules, [{"part": name, **file} for name, of_part in files.items() for file in of_part]


def _each(opened: Mapping[str, "PublishedPart"], do: Callable) -> dict:
    results, problems = {}, []
    for name, part in opened.items():
        try:
            results[name] = do(part)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return results


# --- one part -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedPart:
    """Weights of a part as they are published, not read yet, and the configuration that they have
    to fit, which messages call `described`."""

    part: registry.Part
    config: object
    source: sources.Source
    described: str

    @property
    def table(self) -> RuleTable:
        return TABLES[self.part.name]

    def check(self) -> None:
        """Raise `UserError` unless names and shapes of all tensors fit."""
        self._applied(rules.check, parameters.named(self.part.abstract(self.config)))

    def read(self, dtype: str | None, say: Callable[[str], None]) -> nnx.Module:
        """The module, filled; what was read and ignored is reported."""
        what, source, count = self.table.what, self.source, len(self.source.tensors)
        if source.taken:
            say(f"{source.path}: took {source.taken}")
        progress = Progress(f"{what}: tensors", count, every=2.0)

        def report(done: int, total: int) -> None:
            progress.total = total
            if done % 50 == 0 or done == total:
                progress.update(done)

        if dtype is None and self.table.storage_dtype is not None:
            dtype = self.table.storage_dtype(source.tensors)
        abstract = self.part.abstract(self.config)
        module, placement = self._applied(rules.apply, abstract, report, dtype)
        line = f"{what}: {len(placement.moves)} tensors read from {source.path},"
        line += f" {parameters.count(module):,} parameters"
        if self.table.ignored:
            line += f"; {len(placement.ignored)} {self.table.ignored} ignored"
        say(line)
        for name, reason in () if self.table.ignored else _grouped(placement.ignored):
            say(f"  ignored {name}: {reason}")
        return module

    def _applied(self, function: Callable, *arguments):
        """`function` of the rules, the tensors and `arguments`; errors say what does not fit."""
        tensors = self.source.tensors
        with about(f"{self.source.path} does not fit {self.described}"):
            return function(self.table.rules(self.config, tensors), tensors, *arguments)


def _open(part: registry.Part, config, path: str, key: str | None) -> PublishedPart:
    """The weights of a transformer or codec, unless they are visibly those of another part."""
    table = TABLES[part.name]
    source = sources.open_source(path, table.signature, key)
    similar = [t for t in TABLES.values() if sources.looks_like(source.tensors, t.signature)]
    if similar and table not in similar:
        raise UserError(
            f"{table.flag}: {path} looks like {similar[0].what} weights, not {table.what} weights:"
            f" it belongs to {similar[0].flag}"
        )
    return PublishedPart(part, config, source, f"the {table.what} configuration")


def _open_network(
    part: registry.Part, model: str, path: str, heads_path: str | None
) -> PublishedPart:
    """The weights of a network of evaluation. LPIPS's come from two files, which are one source."""
    source = sources.open_source(path, TABLES[part.name].signature)
    if part.name == "LPIPS":
        if not heads_path:
            raise UserError(
                f"--heads_source is required: the file {model.removeprefix('lpips-')}.pth with the"
                " weights of LPIPS's heads (weights/v0.1 of the package lpips)"
            )
        heads = sources.open_source(heads_path, evaluation.HEADS)
        if twice := sorted(source.tensors.keys() & heads.tensors.keys()):
            raise UserError(
                f"{path} and {heads_path} both hold {some(twice, 4)}: give the backbone"
                " as --source and the heads as --heads_source"
            )
        source = sources.joined(source, heads)
    elif heads_path:
        raise UserError(f"--heads_source: {model} has no heads: drop it")
    with about(f"{path} does not fit {model}"):
        if part.name == "LPIPS":
            config = evaluation.lpips_config(model.removeprefix("lpips-"), source.tensors)
        else:
            config = evaluation.inception_config(source.tensors)
    return PublishedPart(part, config, source, f"the {TABLES[part.name].what}")


def _open_text_encoder(folder: str) -> PublishedPart:
    part = registry.OWN_FOLDER[ENCODER]
    config, source = sources.open_t5_folder(folder, TABLES[part.name].signature)
    return PublishedPart(part, config, source, str(Path(folder) / sources.T5_CONFIG))


def _text_encoder_of(family: registry.Family, transformer, folder: str) -> PublishedPart:
    """The text encoder, if it is one for the transformer of this configuration."""
    if transformer.condition != "text":
        raise UserError(
            f"--text_encoder_source: {family.parts['transformer'].name} draws classes, not texts:"
            " drop it"
        )
    with about("--text_encoder_source"):
        encoder = _open_text_encoder(folder)
    width = encoder.config.d_model
    if width != transformer.text_channels:
        raise UserError(
            f"--text_encoder_source: {folder} gives features of width {width}, the transformer"
            f" reads width {transformer.text_channels} (text_channels): take the encoder it was"
            " trained with (flan-t5-xl for the released models)"
        )
    return encoder


def _grouped(ignored: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names with the same reason on one line, of which 8 are shown."""
    groups: dict[str, list[str]] = {}
    for name, reason in ignored:
        groups.setdefault(reason, []).append(name)
    return [(some(names, 8), reason) for reason, names in groups.items()]
