"""Notes that training scripts leave beside weights: passed over, whatever they are, never made."""

import argparse
import collections
import datetime
import fractions
import pathlib
import pickle
import types
import uuid

import chex
import numpy as np
import pytest

from ported_weights.readers.sources import open_source

OBJECTS = {
    "scalars": [np.float64(0.4), np.int64(3), np.bool_(True), np.str_("a"), np.datetime64("now")],
    "arrays": [
        np.arange(3),
        np.array([1, "a"], object),
        np.zeros(2, [("a", "i4")]).T,
        np.ma.ones(2),
    ],
    "random_states": [np.random.get_state(), np.random.default_rng(0), np.random.RandomState(0)],
    "sets": [{1, 2}, frozenset("a"), set(), {"of": {(1, 2)}}],
    "dictionaries": [collections.Counter("aab"), collections.defaultdict(list, a=[1])],
    "lists": [collections.deque([1, 2], 3), range(3), slice(1, 2), bytearray(b"a"), b"a", b""],
    "namespaces": [argparse.Namespace(a={1}), types.SimpleNamespace(a=np.float32(1))],
    "paths": [pathlib.Path("/runs"), pathlib.PureWindowsPath("c:/runs")],
    "times": [datetime.datetime.now(datetime.UTC), datetime.date.max, datetime.timedelta(1)],
    "numbers": [1j, fractions.Fraction(1, 3), uuid.UUID(int=0), ...],
    "types": [int, dict, type(None), np.float32, np.dtype("f4")],
    "keys": [{(1, 2): 3, np.int64(4): 5, frozenset("a"): 6, int: 7}],
}


def _beside(torch_zip, path, note: bytes):
    """A file with operations that push a note, then weights."""
    tensor = torch_zip.assemble(torch_zip.view("FloatStorage", "0", 2, 0, (2,), (1,)))
    pickled = b"\x80\x02}(" + torch_zip.assemble("args") + note + torch_zip.assemble("w") + tensor
    return torch_zip.write(path, pickled + b"u.", {"0": np.float32([3, 4]).tobytes()})


def _check(path) -> None:
    found = {name: tensor.read() for name, tensor in open_source(path).tensors.items()}
    chex.assert_trees_all_equal(found, {"w": np.float32([3, 4])})


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("case", OBJECTS)
def test_notes_of_python_and_numpy_are_passed_over(tmp_path, torch_zip, case, protocol):
    note = pickle.dumps(OBJECTS[case], protocol).removesuffix(b".")
    _check(_beside(torch_zip, tmp_path / "a.pth", note))


TRAINERS = {  # none of these modules is there: importing one would fail
    "device": ("torch.device", b"X\x04\0\0\0cudaK\x01\x86R"),
    "version": ("torch.torch_version.TorchVersion", b"X\x03\0\0\x002.9\x85\x81"),
    "dtype": ("torch.float8_e4m3fn", b""),
    "old_numpy": ("numpy.core.multiarray.scalar", b"N\x85R"),
    "lightning": ("lightning.pytorch.nowhere.AttributeDict", b")\x81}(X\x01\0\0\0aK\x01ub"),
    "enum": ("transformers.nowhere.IntervalStrategy", b"X\x05\0\0\0steps\x85R"),
    "sharding": ("torch.distributed.fsdp.api.ShardingStrategy", b"K\x01\x85R"),
    "keywords": ("omegaconf.nowhere.DictConfig", b")}\x92}(X\x08\0\0\0_contentNub"),
    "dictionary": ("easydict.EasyDict", b")\x81(X\x01\0\0\0aK\x01u}b"),
    "list": ("mmengine.nowhere.List", b")\x81(K\x01K\x02e"),
}


@pytest.mark.parametrize("case", TRAINERS)
def test_notes_of_trainers_are_passed_over(tmp_path, torch_zip, case):
    name, operations = TRAINERS[case]
    note = "c{}\n{}\n".format(*name.rsplit(".", 1)).encode() + operations
    _check(_beside(torch_zip, tmp_path / "a.pth", note))
