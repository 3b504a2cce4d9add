"""Damaged weights and checkpoints: the values that belong there, or a `UserError`.

Of PyTorch's files the checksums of the zip cover every value; safetensors has none, so there only
its header can be found wrong. Our own checkpoints have checksums of all files of parameters.
"""

import json
import shutil
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from ported_weights.configurations import PublishedModel
from ported_weights.readers.sources import open_source
from tests.ported_weights.conftest import TorchZip, assemble, view
from tests.properties import mutations
from tests.properties.conftest import EXAMPLES
from varjax.codecs.vqvae import VQVAEConfig
from varjax.core.errors import LONGEST_MESSAGE, UserError
from varjax.core.sequence import Schedule
from varjax.models import registry
from varjax.models.var import VARConfig
from varjax.storage import checkpoint, parameters

# Of properties that read whole checkpoints there are fewer examples by default, to take seconds.
FEWER = settings() if settings().max_examples > EXAMPLES else settings(max_examples=6)
ARRAYS = {
    "a.weight": np.arange(12, dtype="f4").reshape(3, 4),
    "b": np.arange(5, dtype="i8"),
    "c": np.ones((2, 2), "f2"),
}


def _values(path) -> dict | None:
    """{name: values} of a file of weights; None if it is refused, in a message that is not long."""
    try:
        return {name: t.read() for name, t in open_source(path).tensors.items()}
    except UserError as error:
        assert len(str(error)) <= LONGEST_MESSAGE
        return None


def _same(found, wanted) -> bool:
    return list(found) == list(wanted) and all(map(_equal, found.values(), wanted.values()))


def _equal(a, b) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


# --- PyTorch's files ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_file(tmp_path_factory) -> bytes:
    return TorchZip.save(tmp_path_factory.mktemp("torch") / "a.pth", {"model": ARRAYS}).read_bytes()


@given(draw=st.data())
def test_bytes_of_torch_files(tmp_path, torch_file, draw):
    path = tmp_path / "a.pth"
    path.write_bytes(draw.draw(mutations.damaged_bytes(torch_file)))
    found = _values(path)
    assert found is None or _same(found, ARRAYS)


@given(draw=st.data())
def test_members_of_torch_files(tmp_path, torch_file, draw):
    """A member that was written anew has a checksum that fits it: then it is another file."""
    path = tmp_path / "a.pth"
    path.write_bytes(draw.draw(mutations.damaged_zip(torch_file)))
    _values(path)


_TENSOR = assemble(view("FloatStorage", "0", 12, 0, (3, 4), (4, 1)))
_WORDS = [
    *(b".", b"}", b"]", b")", b"(", b"t", b"l", b"d", b"u", b"s", b"a", b"e", b"R", b"Q", b"b"),
    *(b"\x85", b"\x86", b"\x87", b"\x93", b"\x94", b"\x88", b"0", b"2", b"N"),
    *(b"q\0", b"h\0", b"q\1", b"h\1", b"K\x05", b"M\xff\xff", b"J\xff\xff\xff\xff"),
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    *(b"X\1\0\0\0a", b"X\7\0\0\0storage", b"U\1x", b"I7\n", b"L7L\n", b"F1\n", b"G" + b"\x7f" * 8),
    *(b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nSize\n"),
    *(b"ccollections\nOrderedDict\n", b"cos\nsystem\n", b"\x95" + bytes(8), b"\x80\2", b"\xff"),
    *(_TENSOR, assemble(("storage", TorchZip.Name("torch", "FloatStorage"), "0", "cpu", 12))),
]


@given(words=st.lists(st.sampled_from(_WORDS), max_size=30), at_end=st.booleans())
def test_programs_of_pickle_operations(tmp_path, words, at_end):
    pickled = b"".join(words) + b"." * at_end
    path = TorchZip.write(tmp_path / "a.pth", pickled, {"0": bytes(48)})
    for values in (_values(path) or {}).values():
        assert values.size <= 12


@given(draw=st.data())
def test_damaged_pickles(tmp_path, draw):
    sound = assemble({"w": view("FloatStorage", "0", 12, 2, (2, 3), (4, 1)), "n": [1, (2.5, None)]})
    pickled = draw.draw(mutations.damaged_bytes(b"\x80\2" + sound + b"."))
    _values(TorchZip.write(tmp_path / "a.pth", pickled, {"0": bytes(48)}))


# --- safetensors ----------------------------------------------------------------------------------


@given(draw=st.data())
def test_bytes_of_safetensors(tmp_path, draw):
    """What is read has the shapes that are said and no more bytes than the file."""
    path, sound = tmp_path / "a.safetensors", save(ARRAYS)
    path.write_bytes(draw.draw(mutations.damaged_bytes(sound)))
    for name, tensor in open_source(path).tensors.items() if _values(path) is not None else ():
        found = tensor.read()
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), name
        assert found.nbytes <= len(sound) + 100


@given(draw=st.data())
def test_headers_of_safetensors(tmp_path, draw):
    sound = save(ARRAYS)
    (size,) = struct.unpack("<Q", sound[:8])
    header = draw.draw(mutations.damaged_json(json.loads(sound[8 : 8 + size])))
    text = json.dumps(header, ensure_ascii=draw.draw(st.booleans())).encode(errors="replace")
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + sound[8 + size :])
    _values(path)


@given(draw=st.data())
def test_indices_of_shards(tmp_path, draw):
    """Nothing outside the folder is read."""
    folder = mutations.emptied(tmp_path / "folder")
    (tmp_path / "x").write_bytes(save({"outside": np.zeros(1)}))
    (folder / "one").write_bytes(save({"a": ARRAYS["b"]}))
    (folder / "two").write_bytes(save({"b": ARRAYS["c"]}))
    index = draw.draw(mutations.damaged_json({"weight_map": {"a": "one", "b": "two"}}))
    (folder / "w.index.json").write_text(json.dumps(index))
    found = _values(folder)
    assert found is None or found.keys() <= {"a", "b"}


# --- configurations -------------------------------------------------------------------------------

SCHEDULE = Schedule(((1, 1), (1, 2), (2, 3)))
TRANSFORMER = VARConfig(
    num_classes=3, depth=1, embed_dim=8, num_heads=2, schedule=SCHEDULE, vocab_size=6, z_channels=2
)
CODEC = VQVAEConfig(vocab_size=6, z_channels=2, ch=32, ch_mult=(1,), schedule=SCHEDULE)
CONFIGS = {"transformer": TRANSFORMER, "codec": CODEC}


@given(draw=st.data())
def test_files_of_configurations(tmp_path, draw):
    for name, config in CONFIGS.items():
        value = draw.draw(mutations.damaged_json(config.to_published()))
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    paths = {
        "config": str(tmp_path / "transformer.json"),
        "tokenizer_config": str(tmp_path / "codec.json"),
    }
    try:
        published = PublishedModel(model="var-custom", source="", **paths)
        found, _ = published.configurations(lambda line: None)
    except UserError:
        return
    assert list(found) == list(CONFIGS)


# --- checkpoints of varjax ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, {part: {name: values}}) of a small checkpoint."""
    folder, rng, parts = tmp_path_factory.mktemp("saved") / "model", np.random.default_rng(0), {}
    for name, config in CONFIGS.items():
        abstract = registry.family("var").parts[name].abstract(config)
        leaves = parameters.named(abstract).items()
        drawn = {n: rng.standard_normal(leaf.shape).astype(leaf.dtype) for n, leaf in leaves}
        parts[name] = parameters.fill(abstract, drawn)
    metadata = {"class_names": ["a", "b", "c"], "sampling": {"cfg": 2.0}}
    checkpoint.save(folder, registry.FAMILIES["var"], parts, metadata=metadata)
    return folder, {name: parameters.named(part) for name, part in parts.items()}


def _check_loaded(folder, wanted) -> None:
    try:
        found, _ = checkpoint.load(folder, registry.CATALOGUE, on_host=True)
    except UserError:
        return
    for name, part in found.items():
        assert _same(parameters.named(part), wanted[name])


@FEWER
@given(draw=st.data())
def test_files_of_checkpoints(tmp_path, saved, draw):
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved[0], folder)
    draw.draw(mutations.damaged_folder(folder / "params"))
    _check_loaded(folder, saved[1])


@FEWER
@given(draw=st.data())
def test_descriptions_of_checkpoints(tmp_path, saved, draw):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder, dirs_exist_ok=True)
    content = json.loads((saved[0] / "model.json").read_text())
    value = draw.draw(mutations.damaged_json(content))
    (folder / "model.json").write_text(json.dumps(value))
    _check_loaded(folder, saved[1])
