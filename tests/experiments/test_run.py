"""`experiments.run` as a user meets it: results, errors, interruption."""

import re
import sys

import numpy as np
import pytest
from PIL import Image

from experiments import images
from experiments.evaluation import metrics
from experiments.run import __main__ as run_module
from experiments.run import files, results
from experiments.run.files import Shown
from tests.experiments.conftest import flags_as_text, report_of
from tests.experiments.html_page import Page
from varjax import policies

FIELDS = "policy budget policy_args model schedule seed dtype device versions".split()
KV = ("dense_bytes", "planned_bytes", "allocated_bytes", "fraction", "peak_live_fraction")
TIME = ("compile_s", "first_run_s", "steady_s_per_image")


def test_results(call, checkpoint, tmp_path):
    """Pictures, arrays and every promised field; numbers agree with each other."""
    out = tmp_path / "out"
    flags = "--policy=headkv --budget=0.5 --labels=3,7,7 --batch_size=2 --compare".split()
    flags += ("--save_arrays", "--save_kept")
    status, text, err = call("run", checkpoint, *flags, f"--out={out}")
    assert status == 0, err
    assert "allocated KV" in text and "token agreement" in text
    files = "arrays.npz compare.html compare.png grid.png kept.npz kept.png report.json samples.npz"
    assert sorted(p.name for p in out.iterdir()) == files.split() == report_of(out)["files"]
    check_pairs(out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    report = report_of(out)
    assert all(f in report for f in FIELDS) and all(f in report["kv"] for f in KV)
    assert all(report["time"][f] > 0 for f in TIME)
    # two batches of each: the full cache's time is measured, too
    assert f" s (full cache: {report['time']['full_s_per_image']:.3f} s)" in text
    assert {"psnr", "ssim", "token_agreement"} <= set(report["fidelity"])
    assert report["decode_dtype"] == "float32"  # what auto is on a CPU
    kv = report["kv"]
    assert kv["allocated_bytes"] == kv["planned_bytes"] <= 0.5 * kv["dense_bytes"]
    assert kv["fraction"] == pytest.approx(kv["allocated_bytes"] / kv["dense_bytes"])
    with np.load(out / "samples.npz") as samples, np.load(out / "arrays.npz") as arrays:
        assert samples["arr_0"].shape == (3, 16, 16, 3) and samples["arr_0"].dtype == np.uint8
        np.testing.assert_array_equal(samples["arr_1"], [3, 7, 7])
        assert arrays["tokens"].shape == (3, 130) and arrays["code_map"].shape == (3, 8, 8, 8)
        assert arrays["images"].shape == (3, 3, 16, 16) and arrays["logits"].shape == (3, 130, 128)
        assert (arrays["tokens"][1] != arrays["tokens"][2]).any()  # same label, own key
        rounded = np.floor(np.moveaxis(arrays["images"], 1, -1) * 255 + 0.5)
        np.testing.assert_array_equal(samples["arr_0"], rounded)
    with np.load(out / "kept.npz") as found:
        keep, drawn = found["keep"], found["drawn"]
    assert keep.shape[0] == 3 and keep.shape[-1] == 130 and len(drawn) == keep.shape[1]
    assert (keep[1] != keep[2]).any() and keep[:, -1].any() and not keep[..., drawn[-1] :].any()
    assert keep[:, -1].sum((1, 2, 3)).max() <= 0.5 * keep[0, 0, ..., : drawn[-1]].size


def test_kept_tokens_that_cannot_be_told(call, checkpoint, tmp_path, monkeypatch):
    flags = (checkpoint, "--policy=headkv", "--budget=0.5", "--save_kept")
    monkeypatch.setattr(run_module, "LARGEST_KEPT", 2**15)
    status, _, err = call("run", *flags, "--num_images=4", f"--out={tmp_path}/o")
    assert status == 2 and "4 images take" in err and "draw fewer" in err
    assert not any(tmp_path.iterdir())


def check_pairs(out):
    """The page is one sound file with a slider and three pairs; pictures are below the full
    cache's, enlarged."""
    page = Page((out / "compare.html").read_text(encoding="utf-8"))
    assert not page.unbalanced and not page.open and page.tags.count("input") == 1
    assert [r[:11] for r in page.resources] == ["data:,", *["data:image/"] * 3]
    assert sum(bool(re.fullmatch(r"class \d: (\d+.\d dB|identical)", t)) for t in page.texts) == 3
    picture = np.asarray(Image.open(out / "compare.png"))  # 16 pixels and white, eight times
    below = picture[images.CAPTION_HEIGHT + 8 * 17 :][: 8 * 16 : 8, : 8 * 16 : 8]
    np.testing.assert_array_equal(below, np.load(out / "samples.npz")["arr_0"][0])


MINE = """
from varjax.policies import Streaming, register

@register("my_streaming")
class Mine(Streaming):
    summary = "two sinks"
"""


def test_a_policy_of_my_own(call, checkpoint, tmp_path):
    """It is a value of --policy, wherever its module stands, and listed in errors."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    module = f"--plugin={file}"
    flags = (checkpoint, "--policy=my_streaming", "--budget=0.5", "--dry_run")
    before = list(policies.POLICIES)
    try:
        assert call("run", *flags)[0] == 2
        status, out, err = call("run", *flags, module)
        assert status == 0 and "my_streaming, budget 0.5" in out, err
        status, _, err = call("run", checkpoint, module, "--policy=my_streming")
        assert status == 2 and "did you mean 'my_streaming'?" in err
        status, _, err = call("plan", "--plugin=/nowhere.py")
        assert status == 2 and "/nowhere.py" in err
    finally:
        for name in set(policies.POLICIES) - set(before):
            del policies.POLICIES[name]


BAD = [
    (("--policy=headvk",), "headvk"),
    (("--policy=headkv", "--budget=0"), "outside (0, 1]"),
    (("--policy=headkv", "--budget=1.01"), "outside (0, 1]"),
    (("--policy=streaming", "--budget=0.01"), "smallest feasible"),
    (("--policy=streaming", "--policy_args=sinks=3", "--budget=0.1"), "smallest feasible"),
    (("--policy=headkv", "--policy_args=windw=2"), "did you mean 'window'"),
    (("--policy=headkv", "--policy_args=window"), "key=value"),
    (("--policy=table",), "path=KEEP.npz"),
    (("--policy=table", "--policy_args=path=/nowhere.npz"), "no file"),
    (("--labels=3,10",), "labels 10"),
    (("--labels=-1",), "labels -1"),
    (("--labels=three",), "no class is called 'three'"),
    (("--labels=1", "--num_images=2"), "exclude each other"),
    (("--num_images=0",), "choose 1 to"),
    (("--num_images=1000000000000",), "choose 1 to 10000000"),
    (("--top_k=-1",), "top_k=-1"),
    (("--top_p=1.2",), "top_p=1.2"),
    (("--cfg=-1",), "cfg=-1"),
    (("--seed=-1",), "--seed=-1"),
    (("--batch_size=0",), "--batch_size=0"),
    (("--batch_size=1000000",), "are available"),
    (("--batch_size=100000000",), "choose 1 to 1000000"),
    (("--segments=7",), "1 to 6"),
    (("--segments=many",), "1 to 6"),
    (("--attention=triton",), "needs a GPU"),
    (("--attention=mosaic",), "needs a GPU"),
    (("--decode_dtype=tf32",), "--decode_dtype=tf32: a CPU has no TF32"),
    (("--decode_dtype=float16",), "auto, bfloat16, tf32, float32"),
    (("--mesh=data=3",), "takes 3 devices, this machine has at most"),
    (("--mesh=pipe=3",), "unknown axis 'pipe'"),
    (("--weights_dtype=fp8",), "--weights_dtype=fp8 needs a chip that multiplies fp8 numbers"),
    (("--weights_dtype=w8a8",), "cpu does not: choose int8"),
    (("--prompts=file.txt",), "class-conditional"),
    (("--given_tokens=/nowhere.npz",), "cannot read"),
    (("--given_tokens=/dev/zero",), "no ordinary file"),
    (("--policy=heatkv", "--calibration=/dev/zero"), "no ordinary file"),
    (("--policy=scalekv", "--policy_args=budgets=/dev/zero"), "no ordinary file"),
    (("--given_scales=2",), "--given_tokens"),
    (("--checkpoint=",), "is empty"),
    (("--policy=headkv", "--policy_args=window=1000000"), "window=1000000"),
    (("--policy=headkv", "--policy_args=sinks=1,"), "key=value"),
    (("--no_such_flag=1",), "no_such_flag"),
    (("stray",), "stray"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=flags_as_text)
def test_bad_input(refused, checkpoint, tmp_path, flags, message):
    refused("run", message, checkpoint, f"--out={tmp_path / 'out'}", *flags)


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "no checkpoint folder"), ("empty", "not a varjax checkpoint")],
)
def test_bad_checkpoints(call, tmp_path, folder, message):
    (tmp_path / "empty").mkdir()
    status, _, err = call("run", f"--checkpoint={tmp_path / folder}", f"--out={tmp_path / 'out'}")
    assert status == 2 and message in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--checkpoint=var-d30",), "--dry_run"),
        (("--model=var-d30",), "--dry_run"),
        (("--model=var-d31", "--dry_run"), "var-d30"),
        (("--model=var-d30", "--checkpoint=x", "--dry_run"), "exclude each other"),
    ],
)
def test_published_name_without_weights(refused, flags, message):
    refused("run", message, *flags)


def test_without_pillow_the_arrays_are_there(tmp_path, monkeypatch, capsys):
    """Standard output is for results; the remark goes to standard error."""
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    shown = Shown(numbers=np.arange(2), captions=None, prompts=None, each=1, seed=0, arrays=None)
    files.write_pictures(tmp_path, shown, np.zeros((2, 4, 4, 3), np.uint8))
    captured = capsys.readouterr()
    assert "no picture files are written: " in captured.err and not captured.out
    assert [path.name for path in tmp_path.iterdir()] == ["samples.npz"]


def test_identical_images_count_as_100_db():
    same = {"images": np.full((2, 16, 16, 3), 0.5, np.float32), "tokens": np.zeros((2, 3), int)}
    close = results.fidelity(metrics.compare_images(same, same), {})
    assert close["psnr"] == 100 and close["identical_images"] == 2
    assert close["ssim"] == pytest.approx(1) and close["token_agreement"] == 1


def test_dry_run_allocates_nothing(call, monkeypatch, tmp_path):
    monkeypatch.setattr(run_module.Run, "load_model", lambda *a: pytest.fail("weights were read"))
    monkeypatch.chdir(tmp_path)
    flags = ("--policy=headkv", "--budget=0.1", "--batch_size=16", "--dtype=bfloat16", "--dry_run")
    for name in ("--checkpoint=var-d36", "--model=var-d36"):
        status, out, _ = call("run", name, *flags)
        assert status == 0 and "KV pool" in out and "2353.9 M" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--compare", "--lpips=nowhere"), "--lpips=nowhere: there is no folder nowhere"),
        (("--out=/dev/null/x",), "/dev/null"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(refused, checkpoint, flags, message):
    for more in ((), ("--dry_run",)):
        refused("run", message, checkpoint, "--num_images=1", *flags, *more)


@pytest.mark.parametrize("model", ["var-d30", "llamagen-xl-384"])
def test_dry_run_shows_the_pool_that_the_budget_is_about(call, model):
    """What else the cache carries, positions and sums for policies, has a row of its own."""
    flags = (f"--model={model}", "--policy=h2o", "--budget=0.3", "--batch_size=2")
    status, out, err = call("run", *flags, "--dry_run")
    assert status == 0, err
    share = float(re.search(r"KV pool .*\((.*)% of full\)", out)[1])
    assert 29 < share <= 30
    assert re.search(r"bookkeeping +[1-9]", out)
