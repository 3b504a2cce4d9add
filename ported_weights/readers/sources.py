"""Opening PyTorch weights in any container, as names and tensors that are read when asked for.

The first bytes of a file tell its kind, not its name.
"""

import dataclasses
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ported_weights.readers.files import MAX_HEADER, TorchFile, read_safetensors, tensors
from ported_weights.readers.legacy import MAGIC, LegacyTorchFile
from ported_weights.readers.wrappers import unwrapped, without_wrappers
from varjax.core.errors import UserError, about, some
from varjax.storage import ordinary
from varjax.storage.manifest import is_text, read_json
from varjax.text.t5 import SPIECE_FILE, T5Config, Tokenizer

# Keys under which training scripts keep state dicts.
WELL_KNOWN = frozenset(
    "state_dict model module trainer vae_local var_wo_ddp vae var"
    " ema model_ema ema_state_dict model_state_dict net weights".split()
)
MAX_NESTING = 3
# Entries that the search for state dicts looks at. A dictionary may lie in many others.
MAX_ENTRIES = 2**18
T5_CONFIG = "config.json"
# Files of T5's weights, best first. Published folders hold several containers side by side.
T5_WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_ADVICE = "expected .safetensors, a .pth/.pt/.bin file of torch.save, or a folder of shards"


class Tensor(Protocol):
    """A tensor that is not read yet: what `rules` and the parts need of it."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Source:
    """The weights of one model.

    Attributes:
      path: the file or folder that was opened.
      tensors: {name: tensor}.
      files: all files that hold them.
      taken: which state dict was taken, and what was removed from names, in words.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]
    taken: str = ""

    def below(self, *prefixes: str) -> "Source | None":
        """Return the tensors whose names begin with the first of `prefixes` that any begins with,
        without it; None if there are none."""
        for prefix in prefixes:
            if own := [name for name in self.tensors if name.startswith(prefix)]:
                found = {name.removeprefix(prefix): self.tensors[name] for name in own}
                return dataclasses.replace(self, tensors=found)
        return None


def fingerprint(path: Path) -> dict:
    """Return name, size and SHA-256 of a file."""
    with ordinary.opened(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # a name may have any bytes, JSON holds only text
    name = os.fsencode(path.name).decode(errors="replace")
    return {"file": name, "size": path.stat().st_size, "sha256": digest}


def open_source(
    path: str | os.PathLike, signature: Sequence[str] = (), key: str | None = None
) -> Source:
    """Open a file or a folder of shards.

    Args:
      path: the file, the folder, or the index file of a folder.
      signature: names, some of which the wanted model has. They choose among several state dicts.
      key: where in the file the state dict is, such as `ema` or `trainer/var_wo_ddp`.

    Raises:
      UserError: the file is missing, damaged or unsafe, or holds no weights, or several that fit.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    if path.is_dir() or path.name.endswith(".index.json"):
        source = _open_folder(path)
    else:
        if path.suffix == ".distcp":
            _refuse_distributed(path.parent)
        content, taken = _open_file(path), ""
        if isinstance(content, TorchFile):
            taken, content = _choose(path, content.content, signature, key)
            key = None
        source = Source(path, content, (path,), taken)
    if key is not None:
        raise UserError(
            f"{path} has no state dict {key!r}: its tensors have no keys above their names; leave"
            " out --source_key (or --tokenizer_source_key), or give the torch file that has it"
        )
    found, said = without_wrappers(source.path, source.tensors)
    taken = f"{source.taken or 'its tensors'} ({said})" if said else source.taken
    return dataclasses.replace(source, tensors=found, taken=taken)


def _open_file(path: Path) -> Mapping[str, Tensor] | TorchFile:
    """Open a file by its first bytes: the tensors of safetensors, or a torch file."""
    if not path.is_file():
        raise UserError(f"{path} is no ordinary file: {_ADVICE}")
    with ordinary.opened(path) as file:
        head = file.read(512)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return TorchFile(path)
    if head.startswith(MAGIC):
        return LegacyTorchFile(path)
    # eight bytes of header length, then a JSON object
    if len(head) > 8 and head[8:9] == b"{":
        if (size := struct.unpack("<Q", head[:8])[0]) <= MAX_HEADER:
            return read_safetensors(path)
        raise UserError(f"{path} is damaged: its header would have {size} bytes")
    raise UserError(f"cannot read {path}: {_explain(head)}")


def _explain(head: bytes) -> str:
    """Say why a file with these first bytes is not read."""
    start = head.lstrip()[:64].lower()
    if not head:
        return "it is empty"
    if head[:1] == b"\x80" or head[257:262] == b"ustar":
        return (
            "it is a bare pickle or a tar, as only PyTorch before 0.4 reads, which is not safe;"
            " where you trust it, save it again with PyTorch:"
            " torch.save(torch.load(file, weights_only=True), new_file)"
        )
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the weights: run `git lfs pull` or download the file"
    if start.startswith((b"<!doctype", b"<html")):
        return "it is a web page, not the weights: download the file itself"
    return f"its content is not that of a weights file; {_ADVICE}"


# --- state dicts inside a torch file --------------------------------------------------------------


def _choose(
    path: Path, content: object, signature: Sequence[str], key: str | None
) -> tuple[str, Mapping[str, Tensor]]:
    """Return (where it is, state dict): the one asked for, else the only one that looks right."""
    found = dict(_state_dicts(path, content))
    if not found:
        raise UserError(f"{path} holds no tensors; expected a state dict as torch.save writes it")

    def listed(some_of_it: Mapping[str, Mapping]) -> str:
        return some(f"{k or '(top level)'} ({len(t)} tensors)" for k, t in some_of_it.items())

    if key is not None:
        if key not in found:
            raise UserError(f"{path} has no state dict {key!r}; it has {listed(found)}")
        return key, found[key]
    fitting = {k: t for k, t in found.items() if looks_like(map(unwrapped, t), signature)}
    known = {k: t for k, t in found.items() if all(p in WELL_KNOWN for p in k.split("/") if p)}
    choice = fitting or known or found
    if len(choice) > 1:
        raise UserError(
            f"{path} holds several state dicts: {listed(choice)}; name one with --source_key"
            " (or --tokenizer_source_key)"
        )
    return next(iter(choice.items()))


def looks_like(names: Iterable[str], signature: Sequence[str]) -> bool:
    """Whether some name, apart from prefixes, is in `signature`."""
    return any(name == s or name.endswith(f".{s}") for name in names for s in signature)


def _state_dicts(path: Path, content: object) -> Iterator[tuple[str, Mapping]]:
    """Yield every mapping with tensors in it, as (path of keys, tensors)."""
    level, entries = [("", content)], 0
    for depth in range(MAX_NESTING + 1):
        inner = []
        for where, found in level:
            entries += len(found) if isinstance(found, dict) else 0
            if entries > MAX_ENTRIES:
                raise UserError(f"{path}: refused, it has more than {MAX_ENTRIES} entries")
            if own := tensors(found):
                yield where, own
            if isinstance(found, dict) and depth < MAX_NESTING:
                inner += [
                    (f"{where}/{key}".lstrip("/"), value)
                    for key, value in found.items()
                    if isinstance(key, str) and isinstance(value, dict)
                ]
        level = inner


# --- shards ---------------------------------------------------------------------------------------


def _open_folder(path: Path) -> Source:
    """Open a folder with an index and its shards, or with a single weights file."""
    if path.is_dir():
        indices = sorted(path.glob("*.index.json"))
        if len(indices) > 1:
            indices = [i for i in indices if "safetensors" in i.name] or indices
        if len(indices) != 1:
            endings = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
            files = [f for f in sorted(path.iterdir()) if f.suffix in endings]
            _refuse_distributed(path, len(files) != 1)
            if indices or len(files) != 1:
                listed = some(f.name for f in indices or files) or "none"
                raise UserError(
                    f"{path} must hold one *.index.json with its shards, or one weights file;"
                    f" found: {listed}"
                )
            return open_source(files[0])
        path = indices[0]
    mapping = _read_index(path)
    names = sorted(set(mapping.values()))
    if missing := [n for n in names if not (path.parent / n).is_file()]:
        raise UserError(f"{path} refers to shards that are not there: {some(missing)}")
    shards = {name: _open_file(path.parent / name) for name in names}
    shards = {n: tensors(s.content) if isinstance(s, TorchFile) else s for n, s in shards.items()}
    wrong = [f"{n} is not in {f}" for n, f in sorted(mapping.items()) if n not in shards[f]]
    held = [(f, n) for f, found in sorted(shards.items()) for n in sorted(found)]
    wrong += [f"{n} of {f} is not in the index" for f, n in held if mapping.get(n) != f]
    if wrong:
        listed = some(wrong, between="\n  ")
        raise UserError(f"{path} does not fit its shards:\n  {listed}")
    found = {n: shards[file][n] for n, file in mapping.items()}
    return Source(path.parent, found, (path, *(path.parent / n for n in names)))


def _refuse_distributed(path: Path, deep: bool = False) -> None:
    """Refuse a folder of torch.distributed.checkpoint. deep: also one with such folders in it."""
    if shards := [*path.glob("*.distcp"), *(path.glob("*/*.distcp") if deep else ())]:
        folders = some(sorted({str(shard.parent) for shard in shards}))
        raise UserError(
            f"{path} holds shards of torch.distributed.checkpoint (.distcp), in {folders};"
            " make one file of the folder with the weights and give that: from"
            " torch.distributed.checkpoint.format_utils import dcp_to_torch_save;"
            " dcp_to_torch_save(FOLDER, 'weights.pth')"
        )


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's weight_map: {tensor name: file name}."""
    content = read_json(path)
    mapping = content.get("weight_map") if isinstance(content, dict) else None
    if not (isinstance(mapping, dict) and mapping and all(map(is_text, mapping.values()))):
        raise UserError(
            f"{path} is not an index of shards: weight_map must give a file name for every tensor"
        )
    files = set(mapping.values())
    plain = {f for f in files - {"", ".."} if Path(f).name == f and len(f.encode()) <= 255}
    if outside := sorted(f"{f:.80}" for f in files - plain):
        raise UserError(f"{path} refers to files outside its folder: {some(outside)}")
    return mapping


# --- folders of T5 --------------------------------------------------------------------------------


def open_t5_folder(path: str | os.PathLike, signature: Sequence[str]) -> tuple[T5Config, Source]:
    """Return the configuration and the weights, not read yet, of a T5. `UserError` if a file is
    missing or unusable; `MissingExtra` without `sentencepiece`.

    The folder is as Hugging Face publishes flan-t5: `config.json`, `spiece.model`, and the weights
    in any of their containers. The tokenizer is checked.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"{folder} is no folder: give that of a published T5 encoder, with {T5_CONFIG},"
            f" {SPIECE_FILE} and weights"
        )
    file = folder / T5_CONFIG
    if not file.exists():
        raise UserError(f"{folder} has no {T5_CONFIG}: take the one published with flan-t5")
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold names and values, as published with flan-t5")
    with about(file):
        config = T5Config.from_published(content)
    Tokenizer(folder / SPIECE_FILE, config.vocab_size)
    # the best container; without any the folder, of which is said what it holds
    held = (folder / name for name in T5_WEIGHTS)
    found = open_source(next(filter(Path.is_file, held), folder), signature)
    files = (file, folder / SPIECE_FILE, *found.files)
    return config, dataclasses.replace(found, files=files)
