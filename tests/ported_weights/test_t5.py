"""The text encoder's port: numbers of the original through a ported folder, names, refusals."""

import importlib
import json
import shutil
from functools import partial

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.cli import command_line
from ported_weights import convert
from tests import text_encoder_under_test as small
from varjax.core.errors import UserError
from varjax.storage import manifest, parameters
from varjax.text.encoder import TEXT_ENCODER, TextEncoder, encode_ids

HIDDEN = 1e-4  # float32 against the original in float32, whose own error is 5e-6
HERE = "t5"


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    return small.write_tokenizer(tmp_path_factory.mktemp("spiece") / "spiece.model")


@pytest.fixture
def published(tmp_path, fixtures_dir, spiece):
    """A folder as it is published, with safetensors."""
    folder = tmp_path / "published"
    folder.mkdir()
    shutil.copy(fixtures_dir / HERE / "t5_tiny.safetensors", folder / "model.safetensors")
    shutil.copy(fixtures_dir / HERE / "t5_tiny_config.json", folder / "config.json")
    shutil.copy(spiece, folder / "spiece.model")
    return folder


def _ported(source, out, **options) -> TextEncoder:
    lines = []
    convert.convert_part("flan-t5", source, out, say=lines.append, **options)
    assert len(lines) == 1 and "21 tensors read" in lines[0], lines
    return TextEncoder.load(out, "float32")


def _weights(published) -> dict:
    return {n: a.astype(np.float32) for n, a in load_file(published / "model.safetensors").items()}


@pytest.fixture(scope="module")
def io(fixtures_dir):
    with np.load(fixtures_dir / HERE / "t5_tiny_io.npz") as archive:
        return dict(archive)


def test_numbers_of_the_original(published, tmp_path, io):
    """Position bias, first layer, all layers; then the path that prompts take, whose padding is
    another than the original's 512."""
    encoder = _ported(published, tmp_path / "out")
    ids, lengths = io["input_ids"], io["attention_mask"].sum(1)

    @jax.jit
    def run(module, ids, lengths):
        bias = module.score_bias(lengths, ids.shape[1])
        first = jax.tree.map(lambda leaf: leaf[0], module.blocks)
        inside = module.layer(first, module.embedding[...][ids], bias)
        return bias, inside, module(ids, lengths)

    bias, inside, features = run(encoder.module, ids, lengths)
    keys, length = io["rel_offset"], ids.shape[1]
    for query in (0, 70, length - 1):
        offsets = np.arange(length) - query - keys[0]
        chex.assert_trees_all_equal(bias[0, :, query], io["rel_bias"][:, offsets])
    chex.assert_trees_all_close(inside, io["hidden_after_block0"], atol=HIDDEN, rtol=0)
    chex.assert_trees_all_close(features, io["last_hidden_state"], atol=HIDDEN, rtol=0)
    starts = io["enc_cu_seqlens"]
    texts = [io["enc_ids"][a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
    found = encode_ids(encoder.module, [*texts, None, texts[0]], 2)
    assert [len(f) for f in found[:2]] == io["enc_lens"].tolist()
    chex.assert_trees_all_close(
        np.concatenate(found[:2]), io["enc_kv_compact"], atol=HIDDEN, rtol=0
    )
    chex.assert_trees_all_close(found[3], found[0], atol=HIDDEN, rtol=0)
    chex.assert_shape(found[2], (1, 64))
    assert not found[2].any()


def _command(capsys, module, *flags):
    """(exit status, standard output, standard error) of a command, in this process."""
    with pytest.raises(SystemExit) as stopped:
        command_line.run(importlib.import_module(module).main, [module, *flags])
    return stopped.value.code, *capsys.readouterr()


@pytest.mark.slow
def test_the_encoder_alone_by_command(published, tmp_path, capsys):
    """Converted, it encodes; copied into a checkpoint it would be found there."""
    out, port = tmp_path / "out", partial(_command, capsys, "ported_weights.__main__")
    flags = ("--model=flan-t5", f"--source={published}", f"--out={out}")
    status, said, err = port(*flags, "--dtype=float32")
    assert status == 0 and "21 tensors read" in said, err
    assert f"experiments.encode_text --checkpoint={out}" in said
    assert sorted(p.name for p in out.iterdir()) == ["params", "spiece.model", "text_encoder.json"]
    assert manifest.read_part(out, "text_encoder", TEXT_ENCODER)["dtype"] == "float32"
    (tmp_path / "checkpoint").mkdir()
    shutil.copytree(out, tmp_path / "checkpoint" / "text_encoder")
    features = []
    for place in (out, tmp_path / "checkpoint"):
        save = tmp_path / f"{place.name}.npz"
        given = (f"--checkpoint={place}", "--prompts=a red apple", f"--save={save}")
        status, _, err = _command(capsys, "experiments.encode_text", *given)
        assert status == 0, err
        features.append(np.load(save)["kv"])
    chex.assert_trees_all_equal(*features)
    status, _, err = _command(capsys, "experiments.plan", f"--checkpoint={out}")
    assert status == 2 and "is a text encoder alone" in err
    status, said, err = port(*flags)
    assert status == 2 and "exists already" in err and not said


def test_flags_of_other_models(published, tmp_path, capsys):
    given = ["--model=flan-t5", f"--source={published}", f"--out={tmp_path / 'out'}"]
    given += ["--tokenizer_source=a", "--config=b"]
    status, said, err = _command(capsys, "ported_weights.__main__", *given)
    assert status == 2 and not said
    assert "--model=flan-t5 takes no --tokenizer_source, --config: drop them" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["published"]


def test_all_containers_give_the_same(published, tmp_path, torch_zip):
    """A torch file of a whole language model; shards with an index, in which the other name of the
    embedding is kept. Both are preferred as published: safetensors, then torch."""
    wanted = parameters.named(_ported(published, tmp_path / "a").module)
    weights = _weights(published)
    (published / "model.safetensors").unlink()
    decoder = {"lm_head.weight": np.ones((128, 64), np.float32)}
    decoder["decoder.block.0.layer.0.SelfAttention.q.weight"] = np.ones((64, 64), np.float32)
    torch_zip.save(published / "pytorch_model.bin", {**weights, **decoder})
    found = parameters.named(_ported(published, tmp_path / "b").module)
    for name, array in wanted.items():
        chex.assert_trees_all_equal(found[name], array)

    del weights["shared.weight"]
    names = sorted(weights)
    parts = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, members in parts.items():
        save_file({n: weights[n] for n in members}, published / file)
    index = {"weight_map": {n: file for file, members in parts.items() for n in members}}
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    (published / "pytorch_model.bin").write_bytes(b"not read")
    found = parameters.named(_ported(published, tmp_path / "c").module)
    for name, array in wanted.items():
        chex.assert_trees_all_equal(found[name], array)


def _lacking(name):
    return lambda folder: (folder / name).unlink()


def _config(**changes):
    def edit(folder):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **changes}))

    return edit


def _tensor(name, change):
    def edit(folder):
        weights = _weights(folder)
        change(weights, name)
        save_file(weights, folder / "model.safetensors")

    return edit


_Q = "encoder.block.1.layer.0.SelfAttention.q.weight"
REFUSED = {
    "no config": (_lacking("config.json"), "has no config.json"),
    "no tokenizer": (_lacking("spiece.model"), "there is no tokenizer file .*spiece.model"),
    "no weights": (_lacking("model.safetensors"), "one weights file; found: none"),
    "version 1.0": (_config(feed_forward_proj="relu"), "config.json: .*'relu'"),
    "more layers": (_config(num_layers=3), "(?s)does not fit .*missing: encoder.block.2.layer.0"),
    "another width": (_config(d_model=32), r"(?s)does not fit .*wrong shape: .*\[128, 64\]"),
    "two tables": (
        _tensor("shared.weight", lambda w, n: np.bitwise_xor.at(w[n].view("u4"), (127, 63), 1)),
        "wrong value: encoder.embed_tokens.weight is not the same table as shared.weight",
    ),
    "not finite": (_tensor(_Q, lambda w, n: w[n].fill(np.nan)), "not finite: .*4096 values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_nothing(case, published, tmp_path):
    edit, message = REFUSED[case]
    edit(published)
    with pytest.raises(UserError, match=message):
        convert.convert_part("flan-t5", published, tmp_path / "out", say=[].append)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["published"]
