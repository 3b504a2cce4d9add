"""Prompt files in the formats that benchmarks publish.

| kind | what is given |
| --- | --- |
| `lines` | a text file, one prompt per line; empty ones are the unconditional text |
| `geneval` | GenEval: `evaluation_metadata.jsonl`, objects with prompt, tag, include |
| `dpg` | DPG-Bench: a folder with one .txt file per prompt |
| `hpsv2` | HPSv2: a JSON list of prompts (a style), or the folder with those of all styles |
| `coco` | COCO: `captions_val2014.json` and the like, the first caption of every image |
| `coco-captions` | the same file, all captions |

`auto` takes folders and endings as published: .jsonl is GenEval, .json HPSv2 or COCO by what is in
it, any other file `lines`.
"""

import enum
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path

from varjax.core.errors import UserError, choose, show
from varjax.storage import ordinary, values
from varjax.storage.manifest import parse_json


class PromptFormat(enum.StrEnum):
    """Formats of prompt files; the values are those of the flag."""

    LINES = "lines"
    GENEVAL = "geneval"
    DPG = "dpg"
    HPSV2 = "hpsv2"
    COCO = "coco"
    COCO_CAPTIONS = "coco-captions"


AUTO = "auto"
KINDS = (AUTO, *(kind.value for kind in PromptFormat))
IMAGES_PER_PROMPT = {PromptFormat.GENEVAL: 4, PromptFormat.DPG: 4}  # as published; others 1
HPSV2_STYLES = ("anime", "concept-art", "paintings", "photo")  # in the published order
LARGEST_FILE = 2**27  # bytes; COCO's captions are 2**26
MOST_PROMPTS = 10**6
_GENEVAL_ENTRIES = {"prompt": str, "tag": str, "include": list}


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    text: what the encoder reads. name: unique in the set; image files are named after it.
    where: file and line, for messages. metadata: what else the file says, as JSON data.
    """

    text: str
    name: str
    where: str
    metadata: Mapping = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their file."""

    prompts: tuple[Prompt, ...]
    kind: PromptFormat
    images_per_prompt: int

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def texts(self) -> list[str]:
        """Texts that the encoder reads, prompt by prompt."""
        return [prompt.text for prompt in self.prompts]

    @property
    def names(self) -> list[str]:
        """Names of the prompts in messages, by file and line."""
        return [prompt.where for prompt in self.prompts]


def read_prompts(path: str | os.PathLike, kind: str = AUTO) -> PromptSet:
    """Read a prompt file or folder. kind: one of `KINDS`. `UserError` for no path, no such file,
    another format, a bad entry (named with file and line), no prompts or too many."""
    path = Path(values.path("prompts", path))
    choose("kind of prompts", kind, KINDS)
    if not path.exists():
        raise UserError(f"there is no prompt file or folder {path}")
    found = _recognise(path) if kind == AUTO else PromptFormat(kind)
    if path.is_dir() and found not in (PromptFormat.DPG, PromptFormat.HPSV2):
        raise UserError(f"{path} is a folder: prompts of the kind {found} are a file")
    if path.is_file() and found is PromptFormat.DPG:
        raise UserError(f"{path} is a file: prompts of DPG-Bench are a folder of .txt files")
    prompts = tuple(islice(_READERS[found](path), MOST_PROMPTS + 1))
    if not prompts:
        raise UserError(f"{path} holds no prompts")
    if len(prompts) > MOST_PROMPTS:
        raise UserError(f"{path} holds more than {MOST_PROMPTS} prompts: divide it")
    return PromptSet(prompts, found, IMAGES_PER_PROMPT.get(found, 1))


def _recognise(path: Path) -> PromptFormat:
    if path.is_dir():
        found = {PromptFormat.DPG: _dpg_files(path), PromptFormat.HPSV2: _styles(path)}
        kinds = [kind for kind, files in found.items() if files]
        if len(kinds) == 1:
            return kinds[0]
        both, joint = ("both", "and") if kinds else ("neither", "nor")
        raise UserError(
            f"{path} holds {both} .txt files (DPG-Bench) {joint} style lists such as"
            f" {HPSV2_STYLES[0]}.json (HPSv2): give the folder of one of them"
        )
    if path.suffix == ".json":
        content = _json(_read(path), path)
        if isinstance(content, list):
            return PromptFormat.HPSV2
        if isinstance(content, dict) and "annotations" in content:
            return PromptFormat.COCO
        raise UserError(
            f"{path} is neither a list of prompts (HPSv2) nor a COCO file with `annotations`"
        )
    return PromptFormat.GENEVAL if path.suffix == ".jsonl" else PromptFormat.LINES


# --- formats --------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[Prompt]:
    for i, line in enumerate(_text_lines(path)):
        where = f"{path}, line {i + 1}"
        yield Prompt(_plain(line, where).strip(), f"{i:05d}", where)


def _geneval(path: Path) -> Iterator[Prompt]:
    for prompt in _lines(path):
        entry = _json(prompt.text, prompt.where)
        for name, kind in _GENEVAL_ENTRIES.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
                raise UserError(
                    f"{prompt.where}: expected an object with {', '.join(_GENEVAL_ENTRIES)}, as in"
                    f" GenEval's evaluation_metadata.jsonl; {name!r} is missing or malformed"
                )
        try:  # metadata.jsonl repeats the line, and its readers may be strict
            json.dumps(entry, allow_nan=False)
        except ValueError:
            raise UserError(
                f"{prompt.where} holds NaN or an infinite number, which JSON lacks"
            ) from None
        yield replace(prompt, text=_filled(entry["prompt"], prompt.where), metadata=entry)


def _dpg_files(folder: Path) -> list[Path]:
    """Return the files by name, 2 before 10."""

    def natural(file: Path) -> list:
        parts = re.split(r"(\d+)", file.stem)
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]

    found = (f for f in folder.glob("*.txt") if f.is_file() and not ordinary.is_hidden(f.name))
    return sorted(found, key=natural)


def _dpg(path: Path) -> Iterator[Prompt]:
    for file in _dpg_files(path):
        yield Prompt(_filled(" ".join(_text_lines(file)), str(file)), file.stem, str(file))


def _styles(folder: Path) -> list[Path]:
    files = [folder / f"{style}.json" for style in HPSV2_STYLES]
    return [file for file in files if file.is_file()]


def _hpsv2(path: Path) -> Iterator[Prompt]:
    """Read a list, or a folder of lists; the name of the file is the style."""
    for file in [path] if path.is_file() else _styles(path):
        content = _json(_read(file), file)
        if not isinstance(content, list):
            raise UserError(f"{file} must hold a JSON list of prompts, as HPSv2 publishes them")
        for i, text in enumerate(content):
            where, style = f"{file}, entry {i}", file.stem
            yield Prompt(_filled(text, where), f"{style}/{i:05d}", where, {"style": style})


def _coco(path: Path) -> Iterator[Prompt]:
    """Yield each image's caption with the lowest number, by the number of the image."""
    for image, prompts in groupby(_coco_captions(path), key=lambda p: p.metadata["image_id"]):
        yield replace(next(prompts), name=f"{image:012d}")


def _coco_captions(path: Path) -> list[Prompt]:
    content, prompts = _json(_read(path), path), {}
    entries = content.get("annotations") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise UserError(f"{path} is no COCO file of captions: it has no list `annotations`")
    for i, entry in enumerate(entries):
        where, entry = f"{path}, annotations[{i}]", entry if isinstance(entry, dict) else {}
        image, number = key = entry.get("image_id"), entry.get("id")
        if any(type(n) is not int or n < 0 for n in key):
            raise UserError(f"{where}: expected an object with image_id, id and caption")
        if key in prompts:
            raise UserError(f"{where}: caption {number} of image {image} is there twice")
        metadata = {"image_id": image, "caption_id": number}
        text = _filled(entry.get("caption"), where)
        prompts[key] = Prompt(text, f"{image:012d}_{number}", where, metadata)
    return [prompts[key] for key in sorted(prompts)]


_READERS: Mapping[PromptFormat, Callable[[Path], Iterable[Prompt]]] = {
    PromptFormat.LINES: _lines,
    PromptFormat.GENEVAL: _geneval,
    PromptFormat.DPG: _dpg,
    PromptFormat.HPSV2: _hpsv2,
    PromptFormat.COCO: _coco,
    PromptFormat.COCO_CAPTIONS: _coco_captions,
}


# --- files ----------------------------------------------------------------------------------------


def _filled(text: object, where: str) -> str:
    """Return the text on one line. Benchmarks have no empty prompts."""
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: expected a prompt, found {show(text)}")
    return " ".join(_plain(text, where).split("\n")).strip()


def _plain(text: str, where: str) -> str:
    """Return the text; `UserError` if it has characters that no UTF-8 text can hold."""
    for found, what in ("\0", "a NUL character"), ("[\ud800-\udfff]", "half of a surrogate pair"):
        if re.search(found, text):
            raise UserError(f"{where}: {text!a:.60} holds {what}, which is no text")
    return text


def _text_lines(path: Path) -> list[str]:
    """Return the lines without their ends. A line feed at the end of the file begins no line."""
    text = _read(path)
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    return lines if text else []


def _read(path: Path) -> str:
    try:
        data = ordinary.read_file(path, LARGEST_FILE)
    except OSError as error:
        raise UserError(f"cannot read the prompts in {path}: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line} is not UTF-8 text: save the file as UTF-8") from None


def _json(text: str, where: str | Path):
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
