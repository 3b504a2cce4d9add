"""Commands on a model that draws from text: what they write, and what they refuse."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from experiments.cli.flags import CommandFlags
from experiments.flags.condition import ConditionFlags
from tests import models_under_test as models
from tests import text_encoder_under_test as encoder
from tests.experiments.conftest import flags_as_text
from varjax.generation.api import Generator
from varjax.models.loading import describe

CASE = "infinity_A_gen_1.5_b2"
FAST = ("--segments=1", "--dtype=float32")


@pytest.fixture(scope="module")
def checkpoint():
    return f"--checkpoint={models.checkpoint_folder('infinity_a')}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The original's inputs as files, and prompts."""
    folder, arrays = tmp_path_factory.mktemp("inputs"), models.infinity_fixture(CASE)
    np.savez(folder / "text.npz", kv=arrays["text_kv"], lens=arrays["text_lens"])
    four = np.repeat(np.arange(4.0, dtype=np.float32)[:, None], arrays["text_kv"].shape[1], 1)
    np.savez(folder / "four.npz", kv=four, lens=[1, 1, 1, 1], prompts=["a", "b", "a cat", "d"])
    (folder / "four.txt").write_text("a\nb\nc\nd\n")
    np.savez(folder / "wide.npz", kv=np.zeros((3, 32), np.float32), lens=[3])
    np.savez(folder / "bits.npz", bits=arrays["gt_bits"])
    np.savez(folder / "short.npz", bits=arrays["gt_bits"][:, :3])
    (folder / "prompts.txt").write_text("a red apple\n\nthree dogs\n")
    return folder


def numbers(values) -> str:
    return ",".join(f"{value:g}" for value in values)


@pytest.mark.slow
def test_the_original_through_the_command(call, checkpoint, files, tmp_path):
    """Greedy bits are identical: aspect, size, lists per scale, given bits, ragged texts."""
    arrays, out = models.infinity_fixture(CASE), tmp_path / "out"
    flags = (f"--text_features={files / 'text.npz'}", "--aspect=1.45", "--size=0.06M", "--greedy")
    flags += (f"--cfg={numbers(arrays['cfg'])}", f"--tau={numbers(arrays['tau'])}")
    flags += (f"--given_bits={files / 'bits.npz'}", f"--given_scales={arrays['gt_leak']}")
    flags += (f"--cfg_insertion_layer={numbers(arrays['cfg_insertion_layer'])}", "--save_arrays")
    flags += ("--matmul_precision=highest", "--program=decode_batch=1", *FAST)
    status, _, err = call("run", checkpoint, *flags, f"--out={out}")
    assert status == 0, err
    with np.load(out / "arrays.npz") as found, np.load(out / "samples.npz") as samples:
        np.testing.assert_array_equal(found["bits"], arrays["bits"])
        np.testing.assert_allclose(found["code_map"], arrays["summed_codes"], rtol=0, atol=1e-4)
        assert found["bits"].dtype == np.uint8 and found["logits"].shape[2:] == (16, 2)
        np.testing.assert_array_equal(samples["arr_1"], [0, 1])
        assert samples["arr_0"].shape == (2, *found["images"].shape[2:], 3)
    assert sorted(p.name for p in (out / "images").iterdir()) == ["00000.png", "00001.png"]
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["schedule"] == arrays["schedule"].tolist()
    assert report["memory"]["decode_batch"] == 1
    phases = report["memory"]["phases"]
    assert phases["text"] is None and phases["transformer"] > report["kv"]["allocated_bytes"]
    assert phases["decode"] > 0


@pytest.mark.slow
def test_prompts_become_a_benchmarks_folder(call, files, tmp_path):
    """The checkpoint's encoder runs first; images lie where GenEval's scorer looks."""
    folder, out = tmp_path / "with_encoder", tmp_path / "out"
    shutil.copytree(models.checkpoint_folder("infinity_a"), folder)
    width = models.fixture_model("infinity_a").config.text_channels
    encoder.write_folder(
        folder / "text_encoder", dataclasses.replace(encoder.CONFIG, d_model=width)
    )
    prompts = tmp_path / "evaluation_metadata.jsonl"
    entries = [{"prompt": text, "tag": "color", "include": []} for text in encoder.SENTENCES[:2]]
    prompts.write_text("\n".join(map(json.dumps, entries)))
    (tmp_path / "avoid.txt").write_text("a dog\n")
    (tmp_path / "three.txt").write_text("a dog\na cat\na fly\n")
    flags = (f"--checkpoint={folder}", f"--prompts={prompts}", f"--out={out}", "--batch_size=2")
    flags += ("--num_images=1/prompt", *FAST)
    wrong = call("run", *flags, f"--negative_prompts={tmp_path / 'three.txt'}")
    assert wrong[0] == 2 and "3 negative prompts for 2 prompts" in wrong[2]
    flags += (f"--negative_prompts={tmp_path / 'avoid.txt'}",)
    status, text, err = call("run", *flags, "--policy=headkv", "--budget=0.3")
    assert status == 0, err
    assert "encoding 2 prompts" in err and "allocated KV" in text
    assert (out / "images/00001/samples/0000.png").is_file()
    assert json.loads((out / "images/00001/metadata.jsonl").read_text()) == entries[1]
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert [entry["prompt"] for entry in manifest["images"]] == list(encoder.SENTENCES[:2])
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["text"]["negative_prompts"] == 1 and report["memory"]["phases"]["text"] > 0
    assert report["memory"]["decode_batch"] == 2  # without the flag: what really happened


BAD = [
    ((), "give --prompts=TEXT, --prompts=FILE or --text_features=FILE.npz"),
    (("--labels=3",), "--labels: infinity_a draws from text; give --prompts=TEXT, --prompts=FILE"),
    (("--num_images=3",), "draws from text"),
    (("--prompts=IN/prompts.txt",), "has no text encoder: convert one with"),
    (("--text_features=IN/wide.npz",), "32 wide"),
    (("--text_features=IN/bits.npz",), "kv and lens missing"),
    (("--text_features=/nowhere.npz",), "no file /nowhere.npz"),
    (("TEXT", "--prompts=IN/prompts.txt"), "holds 2 texts, there are 3 prompts"),
    (("--prompts=a", "--prompts=IN/prompts.txt"), "is a file, and the flag is given 2 times"),
    (("--prompts=geneval:IN/prompts.txt",), "line 1 is not JSON"),
    (("--prompts=no/where.txt",), "there is no prompt file or folder no/where.txt"),
    (("--prompts=\udcff",), "is not UTF-8 text"),
    (
        ("--prompts=a", "--prompts=b", "--negative_prompts=c", "--negative_prompts="),
        "number 2 is empty and others",
    ),
    (("TEXT", "--negative_prompts=b"), "--negative_prompts: --text_features holds its own"),
    (("--text_features=IN/four.npz", "--prompts=IN/four.txt"), "was made of 'a cat', but"),
    (("TEXT", "--num_images=0/prompt"), "choose 1 to"),
    (("TEXT", "--num_images=2"), "write 2/prompt for so many of each"),
    (("TEXT", "--prompt_tokens=10000"), "takes at most"),
    (("TEXT", "--aspect=9"), "nearest template is taken from 0.333, 0.400"),
    (("TEXT", "--aspect=wide"), "height / width"),
    (("TEXT", "--size=2M"), "choose one of 0.06M, 0.25M, 0.60M, 1M"),
    (("TEXT", "--cfg=1,2"), "cfg lists 2 numbers, the schedule has 7 scales"),
    (("TEXT", "--cfg=1,two"), "--cfg=1,two: write numbers"),
    (("TEXT", "--tau=0"), "tau=0"),
    (("TEXT", "--cfg_insertion_layer=-4"), "choose 0 (on the logits) or -1 to -3"),
    (("TEXT", "--cfg_insertion_layer=0.5"), "write whole numbers"),
    (("TEXT", "--more_smooth"), "more_smooth"),
    (("TEXT", "--given_tokens=IN/bits.npz"), "draws bits: use --given_bits"),
    (("TEXT", "--given_bits=IN/short.npz"), "bits have the shape (2, 3, 16)"),
    (("TEXT", "--given_bits=IN/text.npz"), "cannot read array `bits`"),
    (("TEXT", "--given_scales=2"), "together with --given_bits=FILE"),
    (("TEXT", "--program=decode_batch=0"), "positive integer"),
    (("TEXT", "--policy=heatkv"), "needs measurements"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=flags_as_text)
def test_bad_input(refused, checkpoint, files, flags, message):
    flags = [f.replace("TEXT", "--text_features=IN/text.npz") for f in flags]
    refused("run", message, checkpoint, *(f.replace("IN", str(files)) for f in flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "tokens"),
    [("infinity-2b", "2204.6", 64), ("infinity-8b", "8375.8", 512)],
)
def test_dry_run_of_published_sizes(call, name, parameters, tokens):
    """Without weights; the pool follows the schedule, the text its padded length."""
    flags = (f"--model={name}", "--policy=streaming", "--budget=0.1", "--dry_run")
    flags += () if tokens == 512 else (f"--prompt_tokens={tokens}",)
    status, out, err = call("run", *flags, "--batch_size=2")
    assert status == 0, err
    assert f"keys and values of {tokens} tokens" in out and "48x48;64x64" in out
    line = next(x for x in out.splitlines() if x.startswith("parameters"))
    assert line.split()[1] == parameters
    status, small, _ = call("run", *flags, "--aspect=0.5", "--size=0.06M")
    assert status == 0 and "schedule          1x1;2x2;2x4;3x6;5x10;8x16;11x22\n" in small


def test_prompts_on_the_command_line(checkpoint, files):
    """As lines of a file: order, names of images, captions, the empty ones."""
    texts = ("a red apple", " three\ndogs ", "", "--seed=1", "été")

    def resolved(*given):
        flags = CommandFlags()
        condition = ConditionFlags(flags)
        flags.parse(["run", *given])
        return condition.resolve(describe(checkpoint.partition("=")[2]), weights=False)

    (files / "same.txt").write_text("a red apple\nthree dogs\n\n--seed=1\nété\n", encoding="utf-8")
    typed = resolved(*(f"--prompts={text}" for text in texts))
    read = resolved(f"--prompts={files / 'same.txt'}")
    assert typed.captions == read.captions == ["a red apple", "three dogs", "", "--seed=1", "été"]
    assert [p.name for p in typed.prompts.prompts] == [p.name for p in read.prompts.prompts]
    assert typed.prompts.names[1] == "--prompts number 2"
    twice = resolved("--prompts", "a cat", "--num_images=2/prompt", "--negative_prompts= a dog ")
    assert twice.captions == ["a cat", "a cat"] and twice.negative.texts == ["a dog"]


def test_an_encoder_of_another_width(call, files, tmp_path, monkeypatch):
    monkeypatch.setattr(Generator, "compile", lambda *a, **k: pytest.fail("compiled"))
    folder = tmp_path / "checkpoint"
    shutil.copytree(models.checkpoint_folder("infinity_a"), folder)
    encoder.write_folder(folder / "text_encoder")
    flags = (f"--checkpoint={folder}", f"--prompts={files / 'prompts.txt'}")
    status, _, err = call("run", *flags, f"--out={tmp_path / 'out'}")
    assert status == 2 and "features of width 64, checkpoint takes 256" in err
    assert not (tmp_path / "out").exists()
