"""Arrays that users give: what is read, and what is refused before it takes memory or time."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from varjax.core.errors import UserError
from varjax.storage import npz, ordinary
from varjax.storage.manifest import read_json

ARRAYS = {
    "a": np.arange(6.0).reshape(2, 3),
    "b": np.array(["x", "yy"]),
    "c": np.ones((2, 2), order="F"),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_writes_is_read(tmp_path, save):
    save(tmp_path / "f.npz", **ARRAYS)
    assert npz.names(tmp_path / "f.npz") == [*ARRAYS]
    found = npz.load(tmp_path / "f.npz", ["a", "b", "c", "d"])
    for name, array in ARRAYS.items():
        assert found.pop(name).tolist() == array.tolist()
    assert not found


def test_compressed_arrays_are_read_while_in_proportion(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "LARGEST", 2**10)
    np.savez_compressed(tmp_path / "f.npz", even=np.zeros(2**20), odd=np.arange(2**14))
    assert npz.load(tmp_path / "f.npz", ["odd"])["odd"][-1] == 2**14 - 1
    assert npz.load(tmp_path / "f.npz", ["even"], 2**24)["even"].size == 2**20
    with pytest.raises(UserError, match="'even' has 8388736 bytes packed into .* without compress"):
        npz.load(tmp_path / "f.npz", ["even"], npz.LARGEST)


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def _header(shape: tuple, descr: str = "<f8") -> bytes:
    file = io.BytesIO()
    content = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, content)
    return file.getvalue()


def _zip(path: Path, members: list[tuple[str, bytes]], method=zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)


REFUSED = {
    "objects": ([("a.npy", _npy(np.array([{}])))], "has type object"),
    "nothing each": ([("a.npy", _header((10**9,), "|V0"))], "has type"),
    "too short": ([("a.npy", _header((10**12,)))], "another size than its shape"),
    "too long": ([("a.npy", _npy(np.zeros(3)) + b"0")], "another size than its shape"),
    "negative": ([("a.npy", _header((-1, -1)) + bytes(8))], "cannot read"),
    "twice": ([("a.npy", _npy(np.zeros(3)))] * 2, "the same name"),
    "no array": ([("a.npy", b"text")], "cannot read .* plain arrays"),
    "header": ([("a.npy", b"\x93NUMPY\2\0\xff\xff\xff\3" + b" " * 2**26)], "cannot read"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    members, message = REFUSED[case]
    _zip(tmp_path / "f.npz", members)
    with pytest.raises(UserError, match=message) as refused:
        npz.load(tmp_path / "f.npz", ["a"])
    assert "\n" not in str(refused.value) and "f.npz" in str(refused.value)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_to_pack_are_refused(tmp_path, method):
    _zip(tmp_path / "f.npz", [("a.npy", _npy(np.zeros(3)))], method)
    with pytest.raises(UserError, match="NumPy does not use"):
        npz.load(tmp_path / "f.npz", ["a"])


def test_out_of_memory_is_one_message(tmp_path, monkeypatch):
    def full(*_, **__):
        raise MemoryError

    np.savez(tmp_path / "f.npz", **ARRAYS)
    monkeypatch.setattr(np.lib.format, "read_array", full)
    with pytest.raises(UserError, match="f.npz .*: MemoryError"):
        npz.load(tmp_path / "f.npz", ["a"])


@pytest.mark.parametrize("read", [lambda path: npz.load(path, ["a"]), read_json])
def test_only_ordinary_files_are_opened(tmp_path, read):
    (tmp_path / "large").write_bytes(b"12345")
    with pytest.raises(OSError, match="more than 4 bytes"):
        ordinary.read_file(tmp_path / "large", 4)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(UserError, match="cannot read"):
            read(path)
