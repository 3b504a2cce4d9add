"""From published PyTorch files to a varjax checkpoint folder: the library behind the command.

Every part takes the same steps: open the weights, recognise them, check names and shapes, read
values by the part's rule table, report. Everything is checked before a value is read.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flax import nnx

from ported_weights import rules
from ported_weights.configurations import MODELS, PublishedModel, Say
from ported_weights.readers import sources
from ported_weights.tables import evaluation
from ported_weights.tables.registry import RULE_TABLES, RuleTable
from varjax.core.errors import UserError, about, choose, some
from varjax.generation.progress import Progress
from varjax.models.judges import JUDGES
from varjax.storage import checkpoint, parameters
from varjax.storage.atomic import check_new_folder
from varjax.storage.families import Family, Part
from varjax.text.encoder import TEXT_ENCODER
from varjax.text.t5 import SPIECE_FILE

CONVERTER_VERSION = 1
DTYPES = ("float32", "bfloat16")
ENCODER = "text_encoder"
PROMPT_TOKENIZER = "prompt_tokenizer"  # its folder in a checkpoint
# {name: part}: a text encoder of any size (its config.json says which), networks of evaluation
PARTS = {"flan-t5": ENCODER, "inception-fid": "inception"}
PARTS |= {"lpips-alex": "lpips", "lpips-vgg": "lpips"}


def convert(
    published: PublishedModel,
    out: str,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    say: Say = print,
) -> None:
    """Read the PyTorch files of a model and write the checkpoint `out`.

    Args:
      published: the model and its files.
      out: folder to create.
      dtype: one of `DTYPES`; None: types of the source.
      overwrite: replace `out` if it is a checkpoint.
      say: gets a line per result.

    Raises:
      UserError: wrong input of any kind. Nothing is written then.
    """
    choose("model", published.model, MODELS)
    check_output(out, dtype, overwrite)
    published.check_files()
    family = published.family
    configs, recommended = published.configurations(say)
    transformer, folder = configs["transformer"], published.text_encoder_source
    encoder, files = {}, {}
    if folder:
        encoder[ENCODER] = _text_encoder_of(family, transformer, folder)
        files[ENCODER] = {SPIECE_FILE: Path(folder) / SPIECE_FILE}
    metadata = {
        "model": published.model,
        "sampling": published.read_sampling(recommended, transformer, say),
        "converter_version": CONVERTER_VERSION,
        "sources": [],
    }
    if published.class_names:
        metadata["class_names"] = published.read_class_names(transformer)
    beside, tokenizer = {}, published.prompt_tokenizer()
    opened = _open_both(published, configs)
    modules, metadata["sources"] = _read_parts(opened | encoder, dtype, say)
    if tokenizer is not None:
        beside[f"{PROMPT_TOKENIZER}/tokenizer.json"] = tokenizer
        record = {"part": PROMPT_TOKENIZER, **sources.fingerprint(tokenizer)}
        metadata["sources"].append(record)
        say(f"tokenizer of prompts: {tokenizer}")
    checkpoint.save(
        out, family, modules, metadata=metadata, files=files, beside=beside, overwrite=overwrite
    )
    say(f"{out}: {sum(parameters.count(modules[n]) for n in opened):,} parameters written")


def convert_part(
    model: str,
    source: str,
    out: str,
    *,
    heads_source: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    say: Say = print,
) -> None:
    """Read a text encoder or a network of evaluation alone, one of `PARTS`, and write its folder.

    A network is stored in float32, since another type would change its features. Other arguments
    and errors: as in `convert`.

    source: a weights file; of "flan-t5" its published folder.
    heads_source: weights of LPIPS's five heads, which are published apart from its backbone.
    """
    name = PARTS[choose("model", model, PARTS)]
    check_output(out, dtype, overwrite)
    if name == ENCODER:
        part, opened = TEXT_ENCODER, _open_text_encoder(source)
        files = {name: {SPIECE_FILE: Path(source) / SPIECE_FILE}}
    else:
        part, files = JUDGES.parts[name], {}
        opened = _open_network(part, model, source, heads_source)
    modules, described = _read_parts({name: opened}, dtype, say)
    metadata = {"sources": described}
    checkpoint.save(out, part, modules, metadata=metadata, files=files, overwrite=overwrite)


def check_output(out: str, dtype: str | None, overwrite: bool) -> None:
    """Raise `UserError` unless a checkpoint of this type may be written there now."""
    if dtype is not None:
        choose("dtype", dtype, DTYPES)
    check_new_folder(out, replaces=checkpoint.written if overwrite else None, flag="--out")


def _read_parts(
    opened: Mapping[str, "PublishedPart"], dtype: str | None, say: Say
) -> tuple[dict[str, nnx.Module], list[dict]]:
    """Return {name: module} and the files that the modules were made of.

    Problems of all parts are reported together: those of names and shapes before any value is read.
    """
    for do in (PublishedPart.check, lambda part: part.read(dtype, say)):
        modules, problems = {}, []
        for name, part in opened.items():
            try:
                with about(f"{part.source.path} does not fit {part.described}"):
                    modules[name] = do(part)
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise UserError("\n".join(problems))
    used = [(name, path) for name, part in opened.items() for path in part.source.files]
    records = {path: sources.fingerprint(path) for path in {path for _, path in used}}
    return modules, [{"part": name, **records[path]} for name, path in used]


# --- one part -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedPart:
    """The published weights of a part, not read yet, and the configuration that they have to fit.

    described: what messages call that configuration.
    """

    part: Part
    config: object
    source: sources.Source
    described: str

    def check(self) -> None:
        """Raise `UserError` unless names and shapes of all tensors fit."""
        entries = RULE_TABLES[self.part.name].rules(self.config, self.source.tensors)
        targets = parameters.named(self.part.abstract(self.config))
        rules.check(entries, self.source.tensors, targets)

    def read(self, dtype: str | None, say: Say) -> nnx.Module:
        """Return the filled module, and report what was read and ignored."""
        table, source = RULE_TABLES[self.part.name], self.source
        if source.taken:
            say(f"{source.path}: took {source.taken}")
        report = Progress(f"{table.what}: tensors", 0, every=2.0).report
        if dtype is None and table.storage_dtype is not None:
            dtype = table.storage_dtype(source.tensors)
        entries = table.rules(self.config, source.tensors)
        abstract = self.part.abstract(self.config)
        module, placement = rules.apply(entries, source.tensors, abstract, report, dtype)
        line = f"{table.what}: {len(placement.moves)} tensors read from {source.path},"
        line += f" {parameters.count(module):,} parameters"
        if table.ignored:
            line += f"; {len(placement.ignored)} {table.ignored} ignored"
        say(line)
        reasons = {} if table.ignored else dict.fromkeys(reason for _, reason in placement.ignored)
        for reason in reasons:
            names = [name for name, why in placement.ignored if why == reason]
            listed = f"{len(names)} tensors, {names[0]} to {names[-1]}"
            say(f"  ignored {some(names) if len(names) <= 8 else listed}: {reason}")
        return module


def _open_both(
    published: PublishedModel, configs: Mapping[str, object]
) -> dict[str, PublishedPart]:
    """Open the weights of transformer and codec."""
    parts, prefixes = published.family.parts, published.defaults.codec_prefixes
    given = published.source, published.source_key
    opened = {"transformer": _open_part(parts["transformer"], configs["transformer"], *given)}
    if published.tokenizer_source:
        given = published.tokenizer_source, published.tokenizer_source_key
    elif opened["transformer"].source.below(*prefixes) is None:
        raise UserError(
            f"--source: {published.source} has no image tokenizer (names that begin with"
            f" {' or '.join(prefixes)}):"
            " give the folder of the whole model, or a file with it as --tokenizer_source"
        )
    opened["codec"] = _open_part(parts["codec"], configs["codec"], *given, prefixes)
    return opened


def _open_part(
    part: Part, config: object, path: str, key: str | None, prefixes: Sequence[str] = ()
) -> PublishedPart:
    """Open the weights of a transformer or codec, unless they are visibly those of another part.

    prefixes: what may be before the names, if the file holds another part, too.
    """
    table = RULE_TABLES[part.name]
    source = sources.open_source(path, table.signature, key)
    source = source.below(*prefixes) or source
    _check_kind(table, path, source.tensors)
    return PublishedPart(part, config, source, f"the {table.what} configuration")


def _check_kind(table: RuleTable, path: str, names: Collection[str]) -> None:
    """Raise `UserError` unless a file with these names is of the kind of `table`, and draws."""
    similar = [t for t in RULE_TABLES.values() if sources.looks_like(names, t.signature)]
    lacking = {t.what: [n for n in t.needed(names) if n[0] not in names] for t in (table, *similar)}
    own, needed = lacking[table.what], table.needed(names)
    whole = [t for t in similar if t.needed(names) and not lacking[t.what]]
    # a part of what is needed: a file of this kind, unless it is a whole one of another
    if similar and table not in similar and (whole or not 0 < len(own) < len(needed)):
        kinds = whole or similar
        other = next((t for t in kinds if t.flag == table.flag), kinds[0])
        where = f"it belongs to {other.flag}" if other.flag != table.flag else "choose its --model"
        found = f"looks like {other.what} weights, not {table.what} weights"
        raise UserError(f"{table.flag}: {path} {found}: {where}")
    if own:
        absent = some(f"{what} ({name})" for name, what in own)
        raise UserError(
            f"{table.flag}: {path} lacks {absent}: it does not draw pictures, and may be a model"
            " that only reads pictures or text; give the folder of the whole model"
        )


def _open_network(part: Part, model: str, path: str, heads_path: str | None) -> PublishedPart:
    """Open the weights of a network of evaluation. Those of LPIPS come from two files."""
    source = sources.open_source(path, RULE_TABLES[part.name].signature)
    read = evaluation.inception_config
    if part.name == "LPIPS":
        read = partial(evaluation.lpips_config, model.removeprefix("lpips-"))
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
        taken = " ".join(filter(None, (source.taken, heads.taken)))
        tensors = {**source.tensors, **heads.tensors}
        source = sources.Source(source.path, tensors, (*source.files, *heads.files), taken)
    elif heads_path:
        raise UserError(f"--heads_source: {model} has no heads: drop it")
    with about(f"{path} does not fit {model}"):
        config = read(source.tensors)
    return PublishedPart(part, config, source, f"the {RULE_TABLES[part.name].what}")


def _open_text_encoder(folder: str) -> PublishedPart:
    signature = RULE_TABLES[TEXT_ENCODER.name].signature
    config, source = sources.open_t5_folder(folder, signature)
    return PublishedPart(TEXT_ENCODER, config, source, str(Path(folder) / sources.T5_CONFIG))


def _text_encoder_of(family: Family, transformer, folder: str) -> PublishedPart:
    """Open the text encoder, if it fits the configuration of the transformer."""
    if transformer.condition != "text":
        classes = transformer.condition == "labels"
        reason = "draws classes, not texts" if classes else "reads texts itself, as token ids"
        name = family.parts["transformer"].name
        raise UserError(f"--text_encoder_source: {name} {reason}: drop it")
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
