"""Torch-like zip files without torch: a small pickle assembler that can also write odd ones."""

import json
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ported_weights.configurations import PublishedModel
from ported_weights.convert import convert

FIXTURES = Path(__file__).parents[1] / "fixtures" / "var"
STORAGE_NAMES = {"f4": "Float", "f2": "Half", "f8": "Double", "i8": "Long", "i4": "Int"}
STORAGE_NAMES |= {"i2": "Short", "i1": "Char", "u1": "Byte", "b1": "Bool"}


@dataclass(frozen=True)
class Name:
    """A global of the pickle."""

    module: str
    attribute: str


@dataclass
class Call:
    """A call of a global, with optional state (BUILD)."""

    function: Name
    arguments: tuple
    state: object = None


@dataclass
class Instance:
    """An object of a class, made without arguments, with its attributes (NEWOBJ, BUILD)."""

    kind: Name
    attributes: dict


@dataclass
class Storage:
    """A persistent id."""

    kind: str
    key: str
    count: int


def assemble(value) -> bytes:
    """Pickle operations that push `value`."""
    if isinstance(value, Name):
        return f"c{value.module}\n{value.attribute}\n".encode()
    if isinstance(value, Call):
        state = b"" if value.state is None else assemble(value.state) + b"b"
        return assemble(value.function) + assemble(value.arguments) + b"R" + state
    if isinstance(value, Instance):
        return assemble(value.kind) + b")\x81" + assemble(value.attributes) + b"b"
    if isinstance(value, Storage):
        name = Name("torch", value.kind)
        return assemble(("storage", name, value.key, "cpu", value.count)) + b"Q"
    if isinstance(value, dict):
        items = b"".join(assemble(k) + assemble(v) for k, v in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, (tuple, list)):
        items = b"(" + b"".join(map(assemble, value))
        return items + b"t" if isinstance(value, tuple) else b"](" + items[1:] + b"e"
    if isinstance(value, bool) or value is None:
        return {True: b"\x88", False: b"\x89", None: b"N"}[value]
    if isinstance(value, int):
        return b"\x8a\x08" + struct.pack("<q", value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    text = value.encode()
    return b"X" + struct.pack("<I", len(text)) + text


def view(kind, key, count, offset, shape, stride) -> Call:
    """A tensor as `torch.save` describes it."""
    storage = Storage(kind, key, count)
    arguments = (
        storage,
        offset,
        shape,
        stride,
        False,
        Call(Name("collections", "OrderedDict"), ()),
    )
    return Call(Name("torch._utils", "_rebuild_tensor_v2"), arguments)


def write_zip(path: Path, pickled: bytes, storages: dict[str, bytes], **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
        for name, data in {"byteorder": b"little", "version": b"3\n", **members}.items():
            archive.writestr(f"archive/{name}", data)
    return path


def save(path: Path, content) -> Path:
    """Write nested dictionaries of arrays and plain values as `torch.save` would."""
    storages: dict[str, bytes] = {}

    def described(value):
        if isinstance(value, dict):
            return {k: described(v) for k, v in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        key, value = str(len(storages)), np.array(value, order="C")
        storages[key] = value.tobytes()
        code = value.dtype.str.lstrip("<|")
        kind = ("BFloat16" if value.dtype.name == "bfloat16" else STORAGE_NAMES[code]) + "Storage"
        stride = tuple(s // value.itemsize for s in value.strides)
        return view(kind, key, value.size, 0, value.shape, stride)

    return write_zip(path, b"\x80\x02" + assemble(described(content)) + b".", storages)


class TorchZip:
    """The functions above, for tests."""

    Name, Call, Storage, Instance = Name, Call, Storage, Instance
    assemble, view, save = map(staticmethod, (assemble, view, save))
    write = staticmethod(write_zip)


@pytest.fixture(scope="session")
def torch_zip():
    return TorchZip


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return FIXTURES


def convert_request(request: dict, say) -> None:
    """`convert` with the flags of a request."""
    files = dict(request)
    out, options = files.pop("out"), {n: files.pop(n) for n in ("dtype", "overwrite") if n in files}
    convert(PublishedModel(**files), out, say=say, **options)


@pytest.fixture
def request_for(tmp_path):
    """Flags of the command for one of the fixtures; keyword arguments replace them."""

    def make(name: str, ending: str = "pth", **changes) -> dict:
        codec = FIXTURES / json.loads((FIXTURES / name / "config.json").read_text())["vae"]
        fields = {
            "model": "var-custom",
            "source": str(FIXTURES / name / f"var.{ending}"),
            "tokenizer_source": str(next(codec.glob("vae.*"))),
            "config": str(FIXTURES / name / "config.json"),
            "tokenizer_config": str(codec / "config.json"),
            "out": str(tmp_path / "out"),
        }
        return {**fields, **changes}

    return make
