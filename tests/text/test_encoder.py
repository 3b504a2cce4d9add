"""Encoder folders, and prompts to features through a tokenizer."""

import shutil

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from varjax.core.errors import UserError
from varjax.storage import manifest, parameters
from varjax.text import encoder as encoder_lib
from varjax.text.encoder import TEXT_ENCODER, TextEncoder
from varjax.text.t5 import END

NAME = "text_encoder.json"
LONG = "a photo of a red apple on a wooden table, a cat and a dog below an old clock"


def test_prompts_to_features(text_encoder):
    """In any order and batch the same, each prompt as if it were alone; empty ones are marked."""
    prompts = ["a red apple", "", LONG, "  a cat ", LONG + LONG]
    found = text_encoder.encode(prompts, batch_size=2, warn=None)
    assert found.prompts == tuple(p.strip() for p in prompts)
    assert found.unconditional.tolist() == [False, True, False, False, False]
    ids = [text_encoder.tokenizer.ids(p) for p in found.prompts]
    assert all(i[-1] == END and END not in i[:-1] for i in ids)
    wanted = [len(i) if p else 1 for i, p in zip(ids, found.prompts, strict=True)]
    assert found.lens.tolist() == wanted and max(wanted) > 64
    assert {encoder_lib.padded_size(n) for n in wanted} >= {16, 64}
    batch = found.take(range(5))["kv"]
    alone = np.asarray(text_encoder.module(jnp.array([ids[3]]), jnp.array([len(ids[3])])))
    chex.assert_trees_all_close(batch[3, : len(ids[3])], alone[0], atol=2e-5, rtol=0)
    assert not batch[1].any()


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
    full = len(text_encoder.tokenizer.ids(LONG))
    assert lines == [f"line 2 of f has {full} tokens: cut to 12"]
    assert found.lens[1] == 12 and found.text_maxlen == 12


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
}


@pytest.mark.parametrize("case", BROKEN)
def test_folders_that_are_refused(case, folder, tmp_path):
    edit, message = BROKEN[case]
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit(copy)
    with pytest.raises(UserError, match=message):
        TextEncoder.load(copy)
