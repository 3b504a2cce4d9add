"""Hypothesis strategies that damage what a program reads: bytes, JSON, zip files, folders.

Each takes the sound thing and gives a damaged one; what a reader must do with it is the test's.
"""

import io
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

SURROGATE = "\ud800"  # text that no encoding of files can hold
TEXTS = ["", " ", "\0", SURROGATE, "../x", "/x", "a/b", "</script>", "$", "{}", "%s", "x" * 5000]
NUMBERS = [0, -1, 1.5, 2**31, -(2**31) - 1, 2**63, 10**30, 1e308, float("nan"), float("inf")]


def hostile_values() -> st.SearchStrategy[Any]:
    """Values of JSON that a field may hold and should not."""
    scalars = st.sampled_from([None, True, False, *NUMBERS, *TEXTS])
    return st.recursive(
        scalars | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=4,
    )


@st.composite
def damaged_bytes(draw, data: bytes) -> bytes:
    """Cut, emptied, with bytes changed, taken out, doubled or put in; never `data` itself."""
    kind = draw(st.sampled_from(["cut", "empty", "flip", "remove", "double", "insert", "zero"]))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    length = draw(st.integers(1, 64))
    new = draw(st.binary(min_size=1, max_size=8))
    if kind == "flip" and data:
        mask = draw(st.integers(1, 255))
        return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
    found = {
        "cut": data[:at],
        "remove": data[:at] + data[at + length :],
        "double": data[: at + length] + data[at:],
        "insert": data[:at] + new + data[at:],
        "zero": data[:at] + bytes(len(data[at : at + length])) + data[at + length :],
    }.get(kind, b"")
    return found if found != data else data + new


@st.composite
def damaged_json(draw, value: Any) -> Any:
    """One place of a JSON value replaced, removed or added; the value itself is not touched."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        kind = draw(st.sampled_from(["inside", "inside", "inside", "remove", "add", "rename"]))
        rest = {k: v for k, v in value.items() if k != key}
        if kind == "remove":
            return rest
        if kind == "add":
            return value | {draw(st.text(max_size=6)): draw(hostile_values())}
        if kind == "rename":
            return rest | {draw(st.sampled_from(TEXTS)): value[key]}
        return value | {key: draw(damaged_json(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        kind = draw(st.sampled_from(["inside", "inside", "remove", "double"]))
        if kind == "remove":
            return value[:at] + value[at + 1 :]
        if kind == "double":
            return value[:at] + value[at:] + value[at:]
        return [*value[:at], draw(damaged_json(value[at])), *value[at + 1 :]]
    return draw(hostile_values())


@st.composite
def damaged_zip(draw, data: bytes) -> bytes:
    """A zip file with a member damaged, removed, renamed, doubled or compressed, or whose own bytes
    are damaged."""
    kinds = ["bytes", "member", "member", "member", "remove", "rename", "double", "compress"]
    kind = draw(st.sampled_from(kinds))
    if kind == "bytes":
        return draw(damaged_bytes(data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    chosen, method = draw(st.sampled_from(sorted(members))), zipfile.ZIP_STORED
    content = members[chosen]
    if kind == "member":
        members[chosen] = draw(damaged_bytes(content))
    elif kind in ("remove", "rename"):
        del members[chosen]
    if kind == "rename":
        name = draw(st.sampled_from(["x", "../x", "/x", chosen + "x", chosen.upper()]))
        members[name] = content
    elif kind == "compress":
        method = zipfile.ZIP_DEFLATED
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", method) as archive:
        for name, inside in members.items():
            archive.writestr(name, inside)
        if kind == "double":
            archive.writestr(chosen + "2", content)
    return found.getvalue()


@st.composite
def damaged_folder(draw, folder: Path) -> str:
    """Damages `folder` in place; says what it did.

    A file is cut, changed, removed, replaced by a folder or a link, or a foreign file is added.
    """
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    kinds = ["bytes", "bytes", "remove", "folder", "link", "stray", "stray_folder"]
    kind = draw(st.sampled_from(kinds)) if files else "stray"
    if kind.startswith("stray"):
        path = folder / draw(st.sampled_from(["notes.txt", "main-x.npz", ".hidden", "x.npz", "0"]))
        if not path.exists():
            path.mkdir() if kind == "stray_folder" else path.write_bytes(draw(st.binary()))
        return f"{kind} {path.name}"
    path = folder / draw(st.sampled_from(files))
    if kind == "bytes":
        path.write_bytes(draw(damaged_bytes(path.read_bytes())))
        return f"bytes {path.name}"
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":  # to a file outside, with the same content: must not be written through
        outside = folder.with_name(f"{folder.name}.outside-{len(files)}")
        outside.write_bytes(content)
        os.symlink(outside, path)
    return f"{kind} {path.name}"


def emptied(folder: Path) -> Path:
    """A new empty folder in the place of `folder`: fixtures are shared by all examples."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
