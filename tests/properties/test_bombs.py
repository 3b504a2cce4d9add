"""Small files that would become large or take for ever, in a process that may not."""

import io
import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests.ported_weights.conftest import TorchZip, assemble, view
from tests.properties import limits

READ = """
import sys
from ported_weights.readers.sources import open_source, open_t5_folder
from varjax.core.errors import UserError
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


READ_ARRAYS = """
import sys
from pathlib import Path
import numpy as np
import varjax
from varjax.core.errors import UserError
from varjax.policies import Table, get_policy
from varjax.storage import npz
from varjax.text import features
from experiments.training import data, var_trainer
from tests.policies.test_registry import GEOMETRY as model

pictures = data.Dataset(*np.zeros((4, 8), np.uint8), 2)
bomb = sys.argv[1]
attempts = {
    "given": lambda: npz.load(bomb, ["tokens"]),
    "features": lambda: features.load(bomb),
    "table": lambda: varjax.plan(model, Table(path=bomb)),
    "pictures": lambda: data.load(bomb, 8),
    "tokens": lambda: var_trainer.read_tokens(Path(bomb), pictures, model.schedule),
    "calibration": lambda: varjax.plan(model, "full", calibration="/dev/zero"),
    "budgets": lambda: varjax.plan(model, get_policy("scalekv", 0.5, {"budgets": "/dev/zero"})),
    "pipe": lambda: varjax.plan(model, "full", calibration=sys.argv[2]),
    "budget pipe": lambda: varjax.plan(model, get_policy("scalekv", 0.5, {"budgets": sys.argv[2]})),
}
for name, attempt in attempts.items():
    try:
        attempt()
        print("read", name)
    except UserError as error:
        print("refused", name, error)
"""


def _packed_zeros(path: Path, names: list[str], size: int) -> None:
    """An npz file of bytes that are zero, of so many whole MiB each; it has 1/1000 of them."""
    header, squeezer = io.BytesIO(), zlib.compressobj(9, wbits=-15)
    content = {"descr": "|u1", "fortran_order": False, "shape": (size * 2**20,)}
    np.lib.format.write_array_header_1_0(header, content)
    start = squeezer.compress(header.getvalue()) + squeezer.flush(zlib.Z_FULL_FLUSH)
    block = squeezer.compress(bytes(2**20)) + squeezer.flush(zlib.Z_FULL_FLUSH)
    stream = start + block * size + squeezer.flush()
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            info = zipfile.ZipInfo(f"{name}.npy")
            archive.writestr(info, stream)
            info.compress_type = zipfile.ZIP_DEFLATED  # in the directory, which is written last
            info.file_size = size * 2**20 + len(header.getvalue())


def test_arrays_and_measurements_are_refused_in_little_memory(tmp_path):
    names = ["tokens", "kv", "lens", "keep_token", "images", "labels", "train", "val"]
    _packed_zeros(tmp_path / "bomb.npz", names, 1536)
    os.mkfifo(tmp_path / "pipe")
    paths = (str(tmp_path / "bomb.npz"), str(tmp_path / "pipe"))
    ended = limits.run_limited("-c", READ_ARRAYS, *paths, memory=6 * limits.GIB, seconds=60)
    assert ended.status == 0, ended.stderr[-2000:]
    assert len(ended.stdout.splitlines()) == ended.stdout.count("refused") == 9, ended.stdout
    assert ended.stdout.count("bytes packed into") == 5, ended.stdout
    assert ended.stdout.count("it is no ordinary file") == 4, ended.stdout
    assert ended.peak_bytes < limits.GIB and ended.seconds < 40, ended
