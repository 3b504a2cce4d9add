"""The reader of torch files: views, element types, damage, and pickles that try to do something."""

import builtins
import enum
import os
import pickle
import subprocess
import zipfile

import chex
import ml_dtypes
import numpy as np
import pytest

from ported_weights.readers.files import TorchFile, tensors
from varjax.core.errors import UserError

DTYPES = ["f4", "f2", "f8", "i8", "i4", "i2", "i1", "u1", "?", ml_dtypes.bfloat16]


def _read(path):
    return {name: tensor.read() for name, tensor in tensors(TorchFile(path).content).items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_element_types(tmp_path, torch_zip, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = _read(torch_zip.save(tmp_path / "a.pth", {"a": array}))["a"]
    chex.assert_type(found, array.dtype)
    chex.assert_trees_all_equal(found, array)


VIEWS = {
    "contiguous": (0, (2, 3), (3, 1)),
    "offset": (7, (4,), (1,)),
    "transposed": (0, (3, 2), (1, 3)),
    "expanded": (5, (4, 3), (0, 1)),
    "scalar": (11, (), ()),
    "empty": (0, (0, 5), (5, 1)),
    "every_second": (1, (5,), (2,)),
}


@pytest.mark.parametrize("case", VIEWS)
def test_views_into_one_storage(tmp_path, torch_zip, case):
    flat = np.arange(12, dtype="f4")
    offset, shape, stride = VIEWS[case]
    content = {
        "all": torch_zip.view("FloatStorage", "0", 12, 0, (12,), (1,)),
        "part": torch_zip.view("FloatStorage", "0", 12, offset, shape, stride),
    }
    pickled = b"\x80\x02" + torch_zip.assemble(content) + b"."
    found = _read(torch_zip.write(tmp_path / "a.pth", pickled, {"0": flat.tobytes()}))
    strides = tuple(4 * s for s in stride)
    expected = np.lib.stride_tricks.as_strided(flat[offset:], shape, strides)
    chex.assert_trees_all_equal(found["part"], expected)
    chex.assert_trees_all_equal(found["all"], flat)


def test_parameters_and_notes_of_a_state_dict(tmp_path, torch_zip):
    ordered = torch_zip.Name("collections", "OrderedDict")
    tensor = torch_zip.view("FloatStorage", "0", 2, 0, (2,), (1,))
    parameter = torch_zip.Call(
        torch_zip.Name("torch._utils", "_rebuild_parameter"), (tensor, True, {})
    )
    notes = torch_zip.Call(ordered, (), {"_metadata": {"": {"version": 1}}})
    pickled = torch_zip.assemble(notes) + b"(" + torch_zip.assemble("p")
    pickled += torch_zip.assemble(parameter) + b"u."
    path = torch_zip.write(tmp_path / "a.pth", b"\x80\x02" + pickled, {"0": b"\0" * 8})
    chex.assert_trees_all_equal(_read(path)["p"], np.zeros(2, "f4"))


# --- hostile pickles ------------------------------------------------------------------------------


class Hostile:
    """Pickles to a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Plain:
    """Pickles to an instance of a class that a weights file has no business with."""


class Mode(enum.Enum):
    """Pickles to a call of a class that nobody but its owner knows."""

    TRAIN = "train"


HOSTILE = {
    "os.system": (lambda f: Hostile(os.system, f"touch {f}"), rf"{os.system.__module__}\.system"),
    "eval": (lambda f: Hostile(eval, f"open({str(f)!r}, 'w')"), r"\.eval"),
    "exec": (lambda f: Hostile(exec, f"open({str(f)!r}, 'w')"), r"\.exec"),
    "getattr": (lambda f: Hostile(getattr, "text", "upper"), r"\.getattr"),
    "import": (lambda f: Hostile(builtins.__import__, "os"), r"__import__"),
    "popen": (lambda f: Hostile(subprocess.Popen, ["touch", str(f)]), r"Popen"),
    "nested": (lambda f: {"state_dict": {"w": [(Hostile(os.system, f"touch {f}"),)]}}, "system"),
    "unknown_class": (
        lambda f: {"w": Plain()},
        r"test_torch_file\.Plain|copy_?reg\._reconstructor",
    ),
    "function": (lambda f: {"w": len}, r"\.len"),
    "own_enum": (lambda f: {"w": Mode.TRAIN}, r"test_torch_file\.Mode"),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused_by_name(tmp_path, torch_zip, case, protocol):
    marker = tmp_path / "marker"
    data = pickle.dumps(HOSTILE[case][0](marker), protocol)
    path = torch_zip.write(tmp_path / "a.pth", data, {})
    with pytest.raises(UserError, match=HOSTILE[case][1]) as caught:
        TorchFile(path)
    assert "refused" in str(caught.value) and not marker.exists()
    assert "save its weights alone" in str(caught.value)


def _call(torch_zip, name, *arguments):
    return torch_zip.Call(torch_zip.Name(*name.rsplit(".", 1)), arguments)


REBUILD = "torch._utils._rebuild_tensor_v2"
MALFORMED = {
    "tensor_without_arguments": lambda z: _call(z, REBUILD),
    "tensor_of_text": lambda z: _call(z, REBUILD, "storage", 0, (1,), (1,)),
    "text_as_shape": lambda z: _call(z, REBUILD, z.Storage("FloatStorage", "0", 4), 0, "a", "b"),
    "negative_offset": lambda z: z.view("FloatStorage", "0", 4, -1, (1,), (1,)),
    "negative_stride": lambda z: z.view("FloatStorage", "0", 4, 3, (2,), (-1,)),
    "ranks_differ": lambda z: z.view("FloatStorage", "0", 4, 0, (2, 2), (1,)),
    "beyond_the_storage": lambda z: z.view("FloatStorage", "0", 4, 2, (3,), (1,)),
    "beyond_the_file": lambda z: z.view("FloatStorage", "0", 5, 0, (5,), (1,)),
    "missing_storage": lambda z: z.view("FloatStorage", "7", 4, 0, (4,), (1,)),
    "storage_outside": lambda z: z.view("FloatStorage", "../data.pkl", 4, 0, (4,), (1,)),
    "unknown_storage": lambda z: z.view("QInt8Storage", "0", 4, 0, (4,), (1,)),
    "huge_size": lambda z: z.view("FloatStorage", "0", 2**62, 0, (2**62,), (1,)),
    "dictionary_from_pairs": lambda z: _call(z, "collections.OrderedDict", [("a", 1)]),
    "size_of_text": lambda z: _call(z, "torch.Size", "abc"),
    "calling_a_type": lambda z: _call(z, "torch.float32", 1),
    "state_on_a_tensor": lambda z: z.Call(z.Name("torch", "Size"), ((1,),), {"shape": 1}),
    "parameter_of_text": lambda z: _call(z, "torch._utils._rebuild_parameter", "x", True, {}),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_content_is_a_user_error(tmp_path, torch_zip, case):
    pickled = b"\x80\x02" + torch_zip.assemble({"w": MALFORMED[case](torch_zip)}) + b"."
    path = torch_zip.write(tmp_path / "a.pth", pickled, {"0": b"\0" * 16})
    with pytest.raises(UserError, match=r"a\.pth|refused"):
        TorchFile(path)


BROKEN_PICKLES = {
    "empty": b"",
    "stack_underflow": b"\x80\x02R.",
    "extension_code": b"\x80\x02\x82\x01.",
    "instance": b"\x80\x02(S'touch x'\nios\nsystem\n.",
    "persistent_text": b"Pstorage\n.",
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("case", BROKEN_PICKLES)
def test_broken_pickles_are_user_errors(tmp_path, torch_zip, case):
    path = torch_zip.write(tmp_path / "a.pth", BROKEN_PICKLES[case], {})
    with pytest.raises(UserError, match=r"a\.pth"):
        TorchFile(path)


def test_deep_nesting_does_not_exhaust_the_stack(tmp_path, torch_zip):
    depth = 200_000
    path = torch_zip.write(tmp_path / "a.pth", b"\x80\x02" + b")" + b"\x85" * depth + b".", {})
    assert isinstance(TorchFile(path).content, tuple)
    keyed = b"\x80\x02})" + b"\x85" * depth + b"K\x01s."
    assert TorchFile(torch_zip.write(tmp_path / "b.pth", keyed, {})).content == {}


# --- damaged files --------------------------------------------------------------------------------


def test_big_endian_and_other_archives_are_refused(tmp_path, torch_zip):
    pickled = b"\x80\x02}."
    with pytest.raises(UserError, match="big-endian"):
        TorchFile(torch_zip.write(tmp_path / "a.pth", pickled, {}, byteorder=b"big"))
    with pytest.raises(UserError, match="TorchScript"):
        TorchFile(torch_zip.write(tmp_path / "b.pth", pickled, {}, **{"code/x.py": b""}))
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(UserError, match="not one written by torch.save"):
        TorchFile(tmp_path / "c.zip")
