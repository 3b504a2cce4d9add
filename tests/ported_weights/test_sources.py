"""Opening weights: kinds of files, shards, and which state dict of a file is taken."""

import json

import chex
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ported_weights.readers.sources import open_source
from varjax.core.errors import UserError

ARRAYS = {
    "a.weight": np.ones((2, 3), "f4"),
    "b": np.arange(4, dtype="f4").astype(ml_dtypes.bfloat16),
}


def _same(source, arrays):
    assert list(source.tensors) == list(arrays)
    for name, array in arrays.items():
        tensor = source.tensors[name]
        assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
        chex.assert_trees_all_equal(tensor.read(), array)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w.bin"])
def test_content_decides_not_the_name(tmp_path, torch_zip, name):
    save_file(ARRAYS, tmp_path / name)
    _same(open_source(tmp_path / name), ARRAYS)
    torch_zip.save(tmp_path / name, ARRAYS)
    _same(open_source(tmp_path / name), ARRAYS)


def test_a_key_where_nothing_is_to_be_chosen_is_refused(tmp_path):
    """Weights without keys are not those of a key."""
    save_file(ARRAYS, tmp_path / "w.safetensors")
    for path in (tmp_path / "w.safetensors", tmp_path):
        _same(open_source(path), ARRAYS)
        with pytest.raises(UserError, match="no state dict 'ema'.*leave out --source_key"):
            open_source(path, (), "ema")


NOT_WEIGHTS = {
    "empty": (b"", "it is empty"),
    "legacy": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "the pickle inside is damaged"),
    "pickle": (b"\x80\x02}q\0.", "bare pickle.*torch.save"),
    "lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "web_page": (b"\n<!DOCTYPE html><html>", "web page"),
    "noise": (b"\x01\x02\x03\x04" * 9, "expected .safetensors"),
}


@pytest.mark.parametrize("case", NOT_WEIGHTS)
def test_other_files_are_refused_with_the_reason(tmp_path, case):
    data, reason = NOT_WEIGHTS[case]
    (tmp_path / "w.pth").write_bytes(data)
    with pytest.raises(UserError, match=reason):
        open_source(tmp_path / "w.pth")


# --- several state dicts in one file --------------------------------------------------------------


def test_the_part_with_the_right_names_is_taken(tmp_path, torch_zip):
    tokenizer, transformer = {"quant": np.zeros(2, "f4")}, {"pos": np.ones(2, "f4")}
    content = {
        "epoch": 3,
        "args": {"lr": 1e-4, "names": ["a", None]},
        "trainer": {"vae_local": tokenizer, "var_wo_ddp": transformer, "opt": {"state": {}}},
    }
    path = torch_zip.save(tmp_path / "w.pth", content)
    assert open_source(path, ["pos"]).taken == "trainer/var_wo_ddp"
    _same(open_source(path, ["quant"]), tokenizer)
    with pytest.raises(UserError, match="several state dicts.*vae_local.*var_wo_ddp"):
        open_source(path, ["neither"])


def test_ambiguity_is_an_error_unless_a_key_is_given(tmp_path, torch_zip):
    content = {"model": {"pos": np.zeros(2, "f4")}, "ema": {"pos": np.ones(2, "f4")}}
    path = torch_zip.save(tmp_path / "w.pth", content)
    with pytest.raises(UserError, match="--source_key"):
        open_source(path, ["pos"])
    _same(open_source(path, ["pos"], "ema"), content["ema"])
    with pytest.raises(UserError, match="no state dict 'emma'.*model.*ema"):
        open_source(path, ["pos"], "emma")


# --- shards ---------------------------------------------------------------------------------------


def _shards(folder, torch_zip, weight_map):
    save_file({"a.weight": ARRAYS["a.weight"]}, folder / "one")
    torch_zip.save(folder / "two", {"b": ARRAYS["b"]})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def test_shards_of_both_kinds(tmp_path, torch_zip):
    index = _shards(tmp_path, torch_zip, {"a.weight": "one", "b": "two"})
    for path in (tmp_path, index):
        source = open_source(path)
        _same(source, ARRAYS)
        assert [path.name for path in source.files] == [index.name, "one", "two"]


WRONG_MAPS = {
    "missing_shards": ({"a.weight": "one", "b": "three", "c": "four"}, "not there: four, three"),
    "missing_tensor": ({"a.weight": "one", "c": "two"}, "c is not in two\n.*b of two is not in"),
}


@pytest.mark.parametrize("case", WRONG_MAPS)
def test_wrong_indices(tmp_path, torch_zip, case):
    weight_map, reason = WRONG_MAPS[case]
    _shards(tmp_path, torch_zip, weight_map)
    with pytest.raises(UserError, match=reason):
        open_source(tmp_path)


def test_a_checkpoint_of_lightning(tmp_path, torch_zip):
    """With the states of its callbacks under their classes, an optimiser, and its arguments."""
    name = torch_zip.Name("pytorch_lightning.callbacks.model_checkpoint", "ModelCheckpoint")
    arguments = torch_zip.Name("pytorch_lightning.utilities.parsing", "AttributeDict")
    content = {
        "epoch": 3,
        "callbacks": {name: {"best_model_score": ARRAYS["b"], "dirpath": "/runs"}},
        "optimizer_states": [{"state": {0: {"step": 5}}}],
        "hyper_parameters": torch_zip.Instance(arguments, {"lr": 1e-4}),
        "state_dict": ARRAYS,
    }
    source = open_source(torch_zip.save(tmp_path / "vqgan.ckpt", content), ["b"])
    _same(source, ARRAYS)
    assert source.taken == "state_dict"
    _same(open_source(tmp_path, ["a.weight"]), ARRAYS)  # the folder
