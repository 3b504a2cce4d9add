"""Small files that would become large or take for ever, in a process that may not."""

import io
import struct
import zipfile

import pytest

from tests.ported_weights.conftest import TorchZip, assemble, view
from tests.properties import limits

READ = """
import sys
from ported_weights.readers.sources import open_source, open_t5_folder
from varjax.errors import UserError
for path in sys.argv[1:]:
    try:
        for tensor in open_source(path).tensors.values():
            tensor.read().sum()
        print("read", path)
    except UserError as error:
        print("refused", path, str(error)[:200].replace(chr(10), " "))
"""


def _shared(width: int, depth: int) -> bytes:
    names = [b"X\x03\0\0\0" + f"{i:03d}".encode() for i in range(width)]
    pickled = b"\x80\2}q\0"
    for level in range(1, depth):
        inner = b"".join(n + b"h" + bytes([level - 1]) for n in names)
        pickled += b"}q" + bytes([level]) + b"(" + inner + b"u"
    return pickled + b"."


def _sparse(path, pickled: bytes, size: int) -> None:
    """A file of torch.save with a storage of `size` zeros that take no place on the disk."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        info = zipfile.ZipInfo("archive/data/0")
        archive.writestr(info, b"")
        info.file_size = info.compress_size = size
        archive.fp.seek(info.header_offset + 18)
        archive.fp.write(struct.pack("<II", size, size))
        archive.start_dir = archive.fp.seek(size, 2) and archive.fp.truncate()


@pytest.mark.parametrize(
    "few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_bombs_are_refused_in_little_memory_and_time(tmp_path, few):
    """Those of a few are the ones that are refused before a million operations were run."""
    compressed = io.BytesIO()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\2" + b"N" * 30_000_000 + b".")
    (tmp_path / "compressed").write_bytes(compressed.getvalue())
    programs = {
        "dictionaries": b"\x80\2" + b"}" * 30_000_000,
        "tuples": b"\x80\2)" + b"\x85" * 30_000_000,
        "marks": b"(" * 30_000_000,
        "numbers": b"\x80\2" + b"K\1" * 15_000_000,
        "memory": b"\x80\2}" + b"\x94" * 30_000_000,
        "texts": b"\x80\2" + (b"X\1\0\0\0a" * 5_000_000),
        "one_text": b"\x80\2X" + struct.pack("<I", 30_000_000) + "é".encode() * 15_000_000 + b".",
        "large": b"\x80\2" + b"N" * (40 * 2**20),
        "shared": _shared(600, 5),
        "integer": b"\x80\2\x8b" + struct.pack("<i", 30_000_000) + b"\x7f" * 30_000_000 + b".",
        "digits": b"\x80\2I" + b"7" * 30_000_000 + b"\n.",
    }
    for name in ("shared",) if few else programs:
        TorchZip.write(tmp_path / name, programs[name], {})
    tensor = view("FloatStorage", "0", 2**29 - 1, 0, (1,), (1,))
    _sparse(tmp_path / "sparse", b"\x80\2" + assemble({"w": tensor}) + b".", 2**31 - 4)
    expanded = view("FloatStorage", "0", 1, 0, (2**40,), (0,))
    pickled = b"\x80\2" + assemble({"w": expanded}) + b"."
    TorchZip.write(tmp_path / "expanded", pickled, {"0": bytes(4)})
    header = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}' + b" " * 2**25 + b"}"
    (tmp_path / "header").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    paths = sorted(str(path) for path in tmp_path.iterdir())
    ended = limits.run_limited("-c", READ, *paths, memory=2 * limits.GIB, seconds=90)
    assert ended.status == 0, ended.stderr[-2000:]
    assert ended.stdout.count("\nrefused") + 1 == len(paths), ended.stdout
    assert ended.peak_bytes < limits.GIB and ended.seconds < 60, ended
