"""`experiments.encode_text`: prompts to a file of features, once."""

import dataclasses
import shutil

import numpy as np
import pytest

from tests import text_encoder_under_test as small
from varjax.models import registry
from varjax.storage import manifest
from varjax.text import features

LONG = "a photo of a red apple on a wooden table"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint as far as this command looks at it."""
    path = tmp_path_factory.mktemp("checkpoint")
    small.write_folder(path / "text_encoder")
    return path


@pytest.fixture
def encode(call, checkpoint, tmp_path):
    """encode("text of the file", "--flag=..."): what `call` returns; features go to f.npz."""

    def invoke(content, *flags):
        (tmp_path / "prompts.txt").write_text(content, encoding="utf-8")
        given = [f"--checkpoint={checkpoint}", f"--prompts={tmp_path / 'prompts.txt'}"]
        names = {flag.split("=")[0] for flag in flags}
        given = [flag for flag in given if flag.split("=")[0] not in names]
        return call("encode_text", *given, f"--save={tmp_path / 'f.npz'}", *flags)

    return invoke


def test_prompts_to_a_file(encode, tmp_path):
    """One warning names the file and line that is cut; what is there is not replaced."""
    status, out, err = encode(f"a cat\n\n{LONG}\n", "--prompt_tokens=14", "--batch_size=2")
    assert status == 0, err
    assert "3 prompts" in out and "longest 14, width 64" in out and "1 empty prompts" in out
    assert err.count("cut to 14") == 1 and f"{tmp_path / 'prompts.txt'}, line 3 has" in err
    found = features.load(tmp_path / "f.npz", 64, 512)
    assert found.prompts == ("a cat", "", LONG) and found.lens[2] == 14
    assert found.unconditional.tolist() == [False, True, False]
    with np.load(tmp_path / "f.npz") as archive:  # the layout that is promised
        assert archive["kv"].dtype == np.float32 and archive["kv"].shape[0] == archive["lens"].sum()
    before = (tmp_path / "f.npz").read_bytes()
    status, _, err = encode("a dog")
    assert status == 2 and "exists already" in err
    assert (tmp_path / "f.npz").read_bytes() == before


def test_prompts_of_unknown_words_are_named(encode, tmp_path):
    status, _, err = encode("一只猫\na cat\n两只狗\n")
    assert status == 0 and err.count("warning: ") == err.count("has no word") == 2, err
    for line, text in ((1, "一只猫"), (3, "两只狗")):
        assert f"{tmp_path / 'prompts.txt'}, line {line} ('{text}') has no word that" in err


def test_texts_are_as_long_as_the_model_takes(encode, checkpoint, tmp_path):
    """Without --prompt_tokens the checkpoint says so."""
    preset = registry.preset("infinity-2b")
    transformer = dataclasses.replace(preset.configs["transformer"], text_maxlen=9)
    configs = {**preset.configs, "transformer": transformer}
    content = manifest.compose(registry.family(preset.family), configs, {"x": np.zeros(1, "f4")})
    shutil.copytree(checkpoint, tmp_path / "whole")
    manifest.write_manifest(tmp_path / "whole", content | {"files": {}})
    status, _, err = encode(f"{LONG}\n", f"--checkpoint={tmp_path / 'whole'}")
    assert status == 0 and "line 1 has" in err and "cut to 9" in err, err
    assert features.load(tmp_path / "f.npz").lens.tolist() == [9]


def test_negative_prompts_and_the_encoder_alone(encode, checkpoint, tmp_path):
    (tmp_path / "negative.txt").write_text("a blue cup\n")
    status, out, err = encode(
        "a cat\na dog",
        f"--negative_prompts={tmp_path / 'negative.txt'}",
        f"--checkpoint={checkpoint / 'text_encoder'}",
        "--dtype=bfloat16",
    )
    assert status == 0 and "1 negative prompts" in out, err
    assert len(features.load(tmp_path / "f.npz").negative_lens) == 1


REFUSED = {
    "no prompts": (("--prompts=nowhere.txt",), "there is no prompt file"),
    "no encoder": (("--checkpoint=.",), "has no text encoder"),
    "kind": (("--prompts=geneval:IN/prompts.txt",), "line 1 is not JSON"),
    "type": (("--dtype=float16",), "must be one of bfloat16, float32"),
    "place": (("--save=nowhere/f.npz",), "there is no folder"),
}


def test_refused_before_the_encoder_is_read(encode, call, checkpoint, tmp_path):
    gap = tmp_path / "gap.txt"
    gap.write_text("a dog\n\n")
    status, _, err = encode("a cat\na dog\n", f"--negative_prompts={gap}")
    assert status == 2 and f"{gap}, line 2 is empty" in err and "reading" not in err
    status, _, err = call("encode_text", f"--checkpoint={checkpoint}", f"--save={gap}.npz")
    assert status == 2 and "give --prompts=TEXT or --prompts=FILE" in err
    folder = shutil.copytree(checkpoint, tmp_path / "copy") / "text_encoder"
    (folder / "spiece.model").write_bytes(b"no model")
    status, _, err = encode("a cat\n", f"--checkpoint={folder}")
    assert status == 2 and "spiece.model as a SentencePiece model" in err and "reading" not in err


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_flags(case, encode, tmp_path):
    flags, message = REFUSED[case]
    flags = [flag.replace("IN/", f"{tmp_path}/") for flag in flags]
    status, _, err = encode("a cat\n", *flags)
    assert status == 2 and message in err
    assert not (tmp_path / "f.npz").exists()
