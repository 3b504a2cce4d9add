"""Encoder folders, and prompts to features through a tokenizer."""

import json
import shutil

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from tests import text_encoder_under_test as small
from varjax.errors import UserError
from varjax.nn import parameters
from varjax.storage import manifest
from varjax.text import encoder as encoder_lib
from varjax.text.encoder import TEXT_ENCODER, TextEncoder

NAME = "text_encoder.json"
LONG = "a photo of a red apple on a wooden table, a cat and a dog below an old clock"


def test_prompts_to_features(text_encoder):
    """In any order and batch the same, each prompt as if it were alone; empty ones are marked."""
    prompts = ["a red apple", "", LONG, "  a cat ", LONG + LONG]
    found = text_encoder.encode(prompts, batch_size=2, warn=None)
    assert found.prompts == tuple(p.strip() for p in prompts)
    assert found.unconditional.tolist() == [False, True, False, False, False]
    ids = [text_encoder.tokenizer.encode(p, 512).ids for p in found.prompts]
    wanted = [len(i) if p else 1 for i, p in zip(ids, found.prompts, strict=True)]
    assert found.lens.tolist() == wanted and max(wanted) > 64
    assert {encoder_lib.padded_size(n) for n in wanted} >= {16, 64}
    batch = found.take(range(5))["kv"]
    alone = np.asarray(text_encoder.module(jnp.array([ids[3]]), jnp.array([len(ids[3])])))
    chex.assert_trees_all_close(batch[3, : len(ids[3])], alone[0], atol=2e-5, rtol=0)
    assert not batch[1].any()


def test_sizes_and_batches(text_encoder, monkeypatch):
    """One shape per size, whatever the number of texts."""
    shapes = []

    def noted(module, ids, lengths):
        shapes.append(ids.shape)
        return np.repeat(ids[..., None].astype(np.float32), 64, axis=-1)

    monkeypatch.setattr(encoder_lib, "_program", noted)
    texts = [[7] * n for n in (3, 40, 16, 17, 1, 2)]
    progress = []
    found = encoder_lib.encode_ids(
        text_encoder.module, texts, 3, lambda *counts: progress.append(counts)
    )
    assert shapes == [(3, 16), (3, 16), (3, 32), (3, 64)]
    assert [len(f) for f in found] == [3, 40, 16, 17, 1, 2]
    assert all((f == 7).all() for f in found)
    assert progress[-1] == (6, 6)


def test_negative_prompts(text_encoder):
    found = text_encoder.encode(["a cat", "a red pear"], ["a dog"])
    wanted = text_encoder.encode(["a dog"])
    chex.assert_trees_all_close(found.negative_kv, wanted.kv, atol=2e-5, rtol=0)
    assert found.negative_lens.tolist() == wanted.lens.tolist()
    assert text_encoder.encode(["a cat"], ["  "]).negative_kv is None
    with pytest.raises(UserError, match="negative prompt 1 is empty and others are not"):
        text_encoder.encode(["a", "b"], ["a dog", ""])
    with pytest.raises(UserError, match="3 negative prompts for 2 prompts"):
        text_encoder.encode(["a", "b"], ["c", "d", "e"])


def test_long_prompts_are_cut_and_named(text_encoder):
    lines = []
    found = text_encoder.encode(
        ["a cat", LONG], max_length=12, names=["line 1 of f", "line 2 of f"], warn=lines.append
    )
    full = len(text_encoder.tokenizer.encode(LONG, 512).ids)
    assert lines == [f"line 2 of f has {full} tokens: cut to 12"]
    assert found.lens[1] == 12 and found.text_maxlen == 12


def test_prompts_of_unknown_words_are_named(text_encoder):
    prompts = ["一只猫", "a cat", "一 二!", "", "a 猫"]
    with pytest.warns(UserWarning) as caught:
        found = text_encoder.encode(prompts, ["два"])
    said = [str(warning.message).partition(" has no word")[0] for warning in caught]
    assert said == ["prompt 0 ('一只猫')", "prompt 2 ('一 二!')", "negative prompt 0 ('два')"]
    assert len(found.lens) == 5


def test_only_empty_prompts(text_encoder):
    found = text_encoder.encode(["", "   "])
    assert found.unconditional.all() and found.take([0])["length"] == 1


@pytest.mark.parametrize("numbers", [{"max_length": 0}, {"batch_size": 0}])
def test_numbers_that_make_no_sense(text_encoder, numbers):
    with pytest.raises(UserError, match=f"{next(iter(numbers))}=0"):
        text_encoder.encode(["a cat"], **numbers)
    with pytest.raises(UserError, match="at least one text"):
        text_encoder.encode([])


def _described(folder) -> dict:
    return manifest.read_part(folder, "text_encoder", TEXT_ENCODER)


def test_folder_there_and_back(folder, random_encoder, text_encoder):
    found, wanted = (parameters.named(m) for m in (text_encoder.module, random_encoder))
    for name, array in wanted.items():
        chex.assert_trees_all_equal(found[name], array)
    content = _described(folder)
    assert content["parameters"] == parameters.count(random_encoder)
    assert "spiece.model" in content["files"] and content["dtype"] == "float32"
    assert sorted(p.name for p in folder.parent.iterdir()) == ["text_encoder"]


def test_loading_in_another_type(folder):
    chex.assert_type(TextEncoder.load(folder, "bfloat16").module, jnp.bfloat16)
    with pytest.raises(UserError, match="text encoder in float16: choose float32 or bfloat16"):
        TextEncoder.load(folder, "float16")


def test_nothing_is_left_of_a_failed_save(random_encoder, tmp_path, spiece):
    with pytest.raises(FileNotFoundError, match="spiece.model"):
        small.save(tmp_path / "out", random_encoder, tmp_path / "spiece.model")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        small.save(tmp_path / "there", random_encoder, spiece)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def _edited(**changes):
    def edit(folder):
        file = folder / NAME
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return edit


def _damage(folder):
    file = next(f for f in sorted((folder / "params").rglob("d/*")) if f.is_file())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


BROKEN = {
    "no description": (lambda f: (f / NAME).unlink(), "there is no text encoder in"),
    "no tokenizer": (lambda f: (f / "spiece.model").unlink(), "there is no tokenizer file"),
    "other tokenizer": (lambda f: (f / "spiece.model").write_bytes(b"x"), "cannot read"),
    "flipped bit": (_damage, "damaged or incomplete: .* has been altered"),
    "no parameters": (lambda f: shutil.rmtree(f / "params"), "damaged or incomplete"),
    "version": (_edited(format_version=2), "format version 2, this varjax"),
    "kind": (_edited(kind="clip"), "describes 'clip'"),
    "no configuration": (_edited(config=None), "entry 'config' is missing"),
    "configuration": (_edited(config={"feed_forward_proj": "relu"}), "entry 'config': .*'relu'"),
    "files": (_edited(files=["params"]), "entry 'files' is missing or malformed"),
    "no checksums": (_edited(files={}), "damaged or incomplete: there is no checksum of"),
    "count": (_edited(parameters=-1), "parameters: -1 in the description"),
    "other count": (_edited(parameters=7), "describes: parameters: 7 in the description, "),
    "type": (_edited(dtype="x"), "dtype: 'x' in the description"),
    "not JSON": (lambda f: (f / NAME).write_text("{"), "cannot read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_folders_that_are_refused(case, folder, tmp_path):
    edit, message = BROKEN[case]
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit(copy)
    with pytest.raises(UserError, match=message):
        TextEncoder.load(copy)


def test_other_sizes_than_described(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = _described(copy)
    _edited(config={**content["config"], "d_ff": 96})(copy)
    with pytest.raises(UserError, match=r"(?s)wrong shape: blocks/down/kernel is \[2, 128, 64\]"):
        TextEncoder.load(copy)
    with pytest.raises(UserError, match="there is no text encoder in .*nowhere"):
        TextEncoder.load(tmp_path / "nowhere")
