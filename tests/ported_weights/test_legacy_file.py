"""The reader of torch's format before 1.6: the same tensors, the same refusals as for zip files."""

import struct

import numpy as np
import pytest

from ported_weights.readers.legacy import MAGIC
from ported_weights.readers.sources import open_source
from tests.experiments.evaluation import recipe
from varjax.core.errors import UserError

PROTOCOL = b"\x80\x02"
HEADS = {"lin0.model.1.weight": 64, "lin1.model.1.weight": 192, "lin2.model.1.weight": 384}
HEADS |= {"lin3.model.1.weight": 256, "lin4.model.1.weight": 256}


def test_a_file_of_torch():
    """Written by torch, its storages said to be on a GPU."""
    path = recipe.FIXTURES / "alex_heads.pth"
    assert b"cuda:0" in path.read_bytes()
    found = open_source(path).tensors
    assert {name: t.shape for name, t in found.items()} == {
        n: (1, c, 1, 1) for n, c in HEADS.items()
    }
    for name, tensor in found.items():
        wanted = (recipe.uniform(f"alex.{name}", tensor.shape, "eval-a/lpips") + 1) / HEADS[name]
        np.testing.assert_array_equal(tensor.read(), wanted.astype(np.float32))


@pytest.fixture
def legacy(torch_zip, tmp_path):
    """legacy(content, storages, ...): a file with this object and {key: values}."""

    def write(content=None, storages=None, *, version=1001, little=True, keys=None, identity=None):
        storages = {"7": np.arange(6, dtype="f4")} if storages is None else storages
        call, name = torch_zip.Call, torch_zip.Name
        if content is None:
            kind = name("torch", "FloatStorage")
            key = ("storage", kind, "7", "cuda:0", 6, None) if identity is None else identity
            storage = b"".join(torch_zip.assemble(part) for part in (key,)) + b"Q"
            shape = torch_zip.assemble((2, 3)) + torch_zip.assemble((3, 1))
            hooks = torch_zip.assemble(call(name("collections", "OrderedDict"), ()))
            function = torch_zip.assemble(name("torch._utils", "_rebuild_tensor_v2"))
            view = function + b"(" + storage + b"K\x00" + shape + b"\x89" + hooks + b"tR"
            content = b"}(" + torch_zip.assemble("w") + view + b"u"
        system = {"protocol_version": 1001, "little_endian": little, "type_sizes": {"int": 4}}
        parts = [torch_zip.assemble(version), torch_zip.assemble(system), content]
        parts.append(torch_zip.assemble(list(storages) if keys is None else keys))
        data = MAGIC + b"".join(PROTOCOL + part + b"." for part in parts)
        for values in storages.values():
            data += struct.pack("<q", values.size) + values.tobytes()
        path = tmp_path / "w.pth"
        path.write_bytes(data)
        return path

    return write


def test_views(legacy):
    (tensor,) = open_source(legacy()).tensors.values()
    np.testing.assert_array_equal(tensor.read(), np.arange(6, dtype="f4").reshape(2, 3))


def refused(path, problem):
    with pytest.raises(UserError, match=problem) as caught:
        open_source(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def test_what_is_refused(legacy, torch_zip):
    """Calls, storages that are views, other byte orders, other versions."""
    system = b"cos\nsystem\n(X\x02\0\0\0ls" + b"tR"
    refused(legacy(system), "refers to os.system")
    kind = torch_zip.Name("torch", "FloatStorage")
    part = ("storage", kind, "7", "cpu", 6, ("8", 0, 6))
    refused(legacy(identity=part), "storage 7 is a view of another one")
    refused(legacy(identity=part[:5]), "unknown kind of storage")
    refused(legacy(identity=(*part[:4], -1, None)), "size of storage 7 is not a number")
    refused(legacy(little=False), "big-endian")
    refused(legacy(version=1002), "its head is not that of torch.save")


def test_damaged_files(legacy):
    """Lengths fit to the byte, or it is said."""
    refused(legacy(storages={"7": np.arange(5, dtype="f4")}), "storage 7 has not 6 elements")
    other = {"8": np.arange(6, dtype="f4")}
    refused(legacy(storages=other), "its list of storages is not that of its tensors")
    refused(legacy(keys=[7]), "its list of storages")
    sound = legacy().read_bytes()
    for cut in (16, 40, 100, len(sound) - 1, len(sound) - 25):
        path = legacy()
        path.write_bytes(sound[:cut])
        refused(path, "damaged")
    path.write_bytes(sound + b"x")
    refused(path, "its storages end at byte")
