"""Files made to take endless time or memory, or to mean two things: refused in one short line."""

import io
import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ported_weights import rules
from ported_weights.configurations import PublishedModel
from ported_weights.readers import files, pickle_program
from ported_weights.readers.files import TorchFile, tensors
from ported_weights.readers.sources import open_source
from varjax.core.errors import UserError
from varjax.storage import manifest
from varjax.storage.manifest import read_json

PROTOCOL = b"\x80\x02"


def _refused(path, match) -> None:
    with pytest.raises(UserError, match=match) as caught:
        open_source(path)
    assert len(str(caught.value)) < 1000


# --- pickles --------------------------------------------------------------------------------------


def test_endless_operations(tmp_path, torch_zip, monkeypatch):
    monkeypatch.setattr(pickle_program, "MAX_OPERATIONS", 10**4)
    pickled = PROTOCOL + b"}" * (pickle_program.MAX_OPERATIONS + 5) + b"."
    _refused(torch_zip.write(tmp_path / "a.pth", pickled, {}), "more than 10000 pickle operat")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA], ids=["zip", "lzma"])
def test_compressed_members(tmp_path, torch_zip, method):
    """30 MB of operations are 31 KB, and a storage of gigabytes is megabytes."""
    sound = torch_zip.save(tmp_path / "a.pth", {"a": np.zeros(10**5, "f4")})
    for which in ("data.pkl", "data/0"):
        with zipfile.ZipFile(sound) as old, zipfile.ZipFile(tmp_path / "b.pth", "w") as new:
            for name in old.namelist():
                packed = method if name.endswith(which) else zipfile.ZIP_STORED
                new.writestr(name, old.read(name), packed)
        with pytest.raises(UserError, match="compressed.*torch.save"):
            open_source(tmp_path / "b.pth").tensors["a"].read()


LONG = b"x" * 5_000_000
LONG_NAMES = {
    "key": b"}X" + struct.pack("<I", len(LONG)) + LONG + b"Ns.",
    "global": b"c" + LONG + b"\nname\n.",
    "instance": b"(i" + LONG + b"\nname\n.",
    "number": b"I" + LONG + b"\n.",
    "encoding": b"S" + LONG + b"\n.",
}


@pytest.mark.parametrize("case", LONG_NAMES)
def test_messages_do_not_repeat_megabytes(tmp_path, torch_zip, case):
    _refused(torch_zip.write(tmp_path / "a.pth", PROTOCOL + LONG_NAMES[case], {}), r"a\.pth")


# --- tensors and storages -------------------------------------------------------------------------


def _with(torch_zip, path, tensor, storages) -> Path:
    return torch_zip.write(path, PROTOCOL + torch_zip.assemble({"w": tensor}) + b".", storages)


def test_a_large_storage_of_which_little_is_used(tmp_path, torch_zip):
    """A slice keeps the storage of the whole: fine up to a point, and only the slice is read."""
    for count, fits in ((10**5, True), (files.MAX_UNUSED // 4 + 1, False)):
        tensor = torch_zip.view("FloatStorage", "0", count, 3, (1,), (1,))
        path = _with(torch_zip, tmp_path / "a.pth", tensor, {"0": bytes(4 * count)})
        found = tensors(TorchFile(path).content)["w"]
        if fits:
            value = found.read()
            assert value.shape == (1,) and value == np.float32(0)
        else:
            with pytest.raises(UserError, match="of which tensors use 4: save clones"):
                found.read()


def test_storages_have_the_size_that_is_said(tmp_path, torch_zip):
    tensor = torch_zip.view("FloatStorage", "0", 2, 0, (2,), (1,))
    _refused(_with(torch_zip, tmp_path / "a.pth", tensor, {"0": bytes(1000)}), "needs 8 bytes, 10")


# --- zip files ------------------------------------------------------------------------------------


def _zip_with(change, tmp_path, torch_zip) -> Path:
    path = torch_zip.save(tmp_path / "a.pth", {"a": np.arange(64, dtype="f4")})
    path.write_bytes(change(path.read_bytes()))
    return path


def _directory(data: bytes, name: bytes) -> int:
    """Where the entry of a member begins in the list of members."""
    return data.rindex(name) - 46


def _put(data: bytes, at: int, layout: str, *values: int) -> bytes:
    new = struct.pack(layout, *values)
    return data[:at] + new + data[at + len(new) :]


ZIPS = {
    "size_in_the_list": lambda d: _put(d, _directory(d, b"archive/data/0") + 20, "<II", 260, 260),
    "place_in_the_list": lambda d: _put(d, _directory(d, b"archive/data/0") + 42, "<I", 0),
    "outside": lambda d: _put(d, _directory(d, b"archive/data/0") + 42, "<I", 2**31),
    "overlapping": lambda d: d.replace(b"archive/data.pkl", b"archive/data/0\0\0"),
    "encrypted": lambda d: _put(d, _directory(d, b"archive/data/0") + 8, "<H", 1),
    "size_of_the_list": lambda d: _put(d, len(d) - 10, "<I", 2**31),
    "zip64": lambda d: _put(d, _directory(d, b"archive/data/0") + 20, "<II", 2**32 - 1, 2**32 - 1),
}


@pytest.mark.parametrize("case", ZIPS)
def test_zip_files_that_contradict_themselves(tmp_path, torch_zip, case):
    with pytest.raises(UserError, match=r"a\.pth"):
        open_source(_zip_with(ZIPS[case], tmp_path, torch_zip)).tensors["a"].read()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name(tmp_path, torch_zip):
    path = torch_zip.save(tmp_path / "a.pth", {"a": np.arange(64, dtype="f4")})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/0", bytes(256))
    _refused(path, "two of its members have the same name")


def test_a_list_of_members_without_end(tmp_path, monkeypatch, torch_zip):
    from ported_weights.readers import archive

    path = torch_zip.save(tmp_path / "a.pth", {str(i): np.zeros(1, "f4") for i in range(99)})
    monkeypatch.setattr(archive, "MAX_DIRECTORY", 1000)
    _refused(path, "list of its members is implausibly large")


# --- safetensors ----------------------------------------------------------------------------------


def _safetensors(path: Path, header: bytes, data: bytes = bytes(16), size: int | None = None):
    length = struct.pack("<Q", len(header) if size is None else size)
    path.write_bytes(length + header + data)
    return path


def _entry(shape, start, end, kind="F32") -> dict:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "overlapping": json.dumps({"a": _entry([4], 0, 16), "b": _entry([2], 0, 8)}),
    "gap": json.dumps({"a": _entry([1], 0, 4), "b": _entry([1], 12, 16)}),
    "large_side": json.dumps({"a": _entry([2**63, 2], 0, 16)}),
    "larger_side": json.dumps({"a": _entry([2**80], 0, 16)}),
    "negative_side": json.dumps({"a": _entry([-4], 0, 16)}),
    "negative_place": json.dumps({"a": _entry([4], -16, 0)}),
    "beyond_the_file": json.dumps({"a": _entry([2**40], 0, 2**42)}),
    "sides_and_bytes_differ": json.dumps({"a": _entry([5], 0, 16)}),
    "unknown_type": json.dumps({"a": _entry([4], 0, 16, "F33")}),
    "float8": json.dumps({"a": _entry([16], 0, 16, "F8_E4M3")}),
    "not_unicode": b'{"\xff": 1}'.decode("latin-1"),
    "deep": '{"a":' + "[" * 10**5,
    "long_name": json.dumps({"a" * 10**5: _entry([4], 0, 16)}),
    "list": '{"a": [4]}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_of_safetensors(tmp_path, case):
    _refused(_safetensors(tmp_path / "a.safetensors", HEADERS[case].encode("latin-1")), "a.safet")


# --- indices and other JSON -----------------------------------------------------------------------

NAMES = ["../one", "/one", "folder/../one", "..", ".", "", "a\0b", "x" * 300]
INDICES = {
    **{f"name {i}": json.dumps({"weight_map": {"a": n}}) for i, n in enumerate(NAMES)},
    "many": json.dumps({"weight_map": {f"t{i}": f"shard-{i}" for i in range(10**4)}}),
    "many_outside": json.dumps({"weight_map": {f"t{i}": f"../shard-{i}" for i in range(10**4)}}),
    "deep": "[" * 10**5,
    "list": "[]",
    "null": '{"weight_map": null}',
    "number": '{"weight_map": {"a": 1}}',
    "surrogate": '{"weight_map": {"a": "\\ud800"}}',
    "not_unicode": "\xff",
}


@pytest.mark.parametrize("case", INDICES)
def test_hostile_indices(tmp_path, case):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": np.zeros(2, "f4")}, tmp_path / "one")
    path = folder / "model.safetensors.index.json"
    path.write_bytes(INDICES[case].encode("latin-1"))
    for source in (path, folder):
        with pytest.raises(UserError, match="index") as caught:
            open_source(source)
        assert len(str(caught.value)) < 4000


def test_half_a_character_is_refused_at_the_door(tmp_path, torch_zip):
    """Written or shown it would fail when everything is done."""
    file = tmp_path / "names.json"
    file.write_text('["\\ud800"]')
    published = PublishedModel(model="var-custom", source="", class_names=str(file))
    with pytest.raises(UserError, match="names.json must hold a list of texts"):
        published.read_class_names(Classes)
    file.write_text('["\\ud83c\\udf4e"]')
    assert published.read_class_names(Classes) == ["🍎"]
    pickled = PROTOCOL + b"}X\3\0\0\0" + "\ud800".encode(errors="surrogatepass") + b"}s."
    _refused(torch_zip.write(tmp_path / "a.pth", pickled, {}), "pickle inside is damaged")
    manifest.write_manifest(tmp_path, {"note": "\ud800"})
    assert read_json(tmp_path / "model.json") == {"note": "\ud800"}


class Classes:
    num_classes = 1


# --- names of tensors -----------------------------------------------------------------------------


class _Lazy:
    shape, dtype = (1,), np.dtype("f4")


@pytest.mark.parametrize("digits", ["²", "٣", "9" * 1000])
def test_digits_that_are_none(digits):
    """Python's \\d and isdigit know more digits than those of ASCII."""
    table = [rules.Take(r"blocks\.(\d+)\.w", r"w", stack=1)]
    name = f"blocks.{digits}.w"
    with pytest.raises(UserError, match=rf"surplus: {name}"):
        rules.check(table, {name: _Lazy()}, {"w": np.zeros((5, 1), "f4")})


def test_members_that_share_bytes(tmp_path):
    """The same bytes as 1,000 members: a small file becomes large."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", PROTOCOL + b"}.")
        archive.writestr("archive/data/0", bytes(100))
    data = data.getvalue()
    start = _directory(data, b"archive/data/0")
    entry, end = data[start:-22], data[-22:]
    more = b"".join(entry.replace(b"data/0", f"data/{i}".encode()) for i in range(1, 10))
    head, end = data[: len(data) - 22] + more, _put(end, 8, "<HH", 11, 11)
    size = struct.unpack("<I", end[12:16])[0] + len(more)
    (tmp_path / "a.pth").write_bytes(head + _put(end, 12, "<I", size))
    _refused(tmp_path / "a.pth", "reaches into what follows it|not where the list says|Overlapped")
