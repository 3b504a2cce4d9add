"""`experiments.plan`: arrays as promised, for any geometry, without weights."""

import hashlib
import json
import pathlib
import re

import numpy as np
import pytest

from experiments.run import __main__ as command
from tests import models_under_test as models
from varjax.models.loading import describe

HEATKV = pathlib.Path(__file__).parents[1] / "fixtures/policies/heatkv"
GEOMETRY = "--geometry=layers=3,heads=4,head_dim=16,schedule=1x1;2x3;4x4;5x6"
BY_TOKEN = "--geometry=layers=3,heads=4,head_dim=16,tokens=256"
HUGE = "--geometry=layers=10,heads=100,head_dim=1000000,schedule=1x1;64x64;64x64"


def test_saved_arrays(call, tmp_path):
    path = tmp_path / "plan.npz"
    flags = ("--policy=streaming", "--budget=0.5", "--policy_args=sinks=1", "--batch_size=2")
    status, out, err = call("plan", GEOMETRY, *flags, "--dtype=float32", f"--save={path}")
    assert status == 0, err
    assert "held per head" in out
    with np.load(path) as archive:
        plan = {name: archive[name] for name in archive.files}
    np.testing.assert_array_equal(plan["capacity"][:, 0, 0], [0, 1, 7, 11])
    assert plan["capacity"].shape == (4, 3, 4) and plan["live_tokens"].shape == (4, 3)
    np.testing.assert_array_equal(
        plan["live_tokens"][2], [4 * (11 + 7 + 7), 4 * (11 + 11 + 7), 4 * 33]
    )
    assert plan["dense_bytes"] == 2 * 2 * 23 * 12 * 32 * 4
    assert plan["num_bytes"] == 2 * 2 * plan["pool_tokens"] * 32 * 4 <= 0.5 * plan["dense_bytes"]
    assert plan["keep_scale"].shape == (4, 3, 4, 4)
    np.testing.assert_array_equal(plan["keep_count"][3, 0, 0], [1, 0, 10, 0])
    np.testing.assert_array_equal(plan["keep_scale"], plan["keep_count"] > 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model=var-d17",), "var-d16"),
        (("--model=var-d16", GEOMETRY), "exclude each other"),
        (("--geometry=layers=3",), "lacks"),
        ((GEOMETRY, "--size=1M"), "--size: --geometry says the schedule already"),
        (("--model=infinity-2b", "--size=9M"), "choose one of 0.06M"),
        ((GEOMETRY, "--policy=streaming", "--budget=0.01"), "smallest feasible"),
        ((GEOMETRY, "--calibration=file.json"), "no calibration"),
        (
            (GEOMETRY, "--policy=amskv", "--policy_args=layers=0", "--calibration=file.json"),
            "'amskv' with these arguments uses no calibration: leave out",
        ),
        (("--model=var-d16", "--target=a100:8"), "--target=a100:8: give a chip alone, --mesh says"),
        ((GEOMETRY, "--target=a100"), "--target is of models: a geometry has no weights"),
        ((GEOMETRY, "--fit"), "--fit is of models"),
        ((GEOMETRY, "--segments=2"), "--segments is of models"),
        (("--model=var-d16", "--mesh=model=3"), "choose a divisor of 16"),
        (("--model=var-d16", "--mesh=data=3", "--batch_size=4"), "a multiple of 3"),
        (("--model=var-d16", "--mesh=data=300", "--target=v5e"), "tpu-v5e has at most 256"),
        (("--model=var-d16", "--mesh=model=2", "--policy=headkv"), "use data only"),
        (("--model=var-d16", "--targets=l4"), "--targets belongs to --fit: add it"),
        (("--model=var-d16", "--fit", "--targets=l4,"), "unknown chip ''"),
        (("--model=var-d16", "--fit", "--targets=tpu-v5e:0"), "'0' is no number of devices"),
        (("--model=var-d16", "--fit", "--targets=h100:x"), "write 1 to 256, as h100:8"),
        (
            ("--model=var-d16", "--fit", "--budget=fit"),
            "--budget=fit does not go with --fit, which",
        ),
        (("--model=var-d16", "--fit", "--mesh=data=2"), "--mesh does not go with --fit"),
        (("--model=var-d16", "--fit", "--policy=linear"), "does not serve models"),
        ((GEOMETRY, "--policy=linear"), "does not serve models that draw scale by scale"),
        ((BY_TOKEN, "--policy=heatkv"), "which heads give up which scales"),
        ((BY_TOKEN, "--policy=headkv", "--policy_args=window=0"), "window=0 must be 1 to 254"),
        ((BY_TOKEN, "--policy=headkv", "--budget=0.01"), "smallest feasible"),
        ((GEOMETRY, "--batch_size=0"), "batch_size"),
        ((GEOMETRY, "--batch_size=99999999999999999999", "--save=x.npz"), "[1, 1000000]"),
        ((HUGE, "--batch_size=1000000", "--save=x.npz"), "lower --batch_size"),
        (("--checkpoint=/nowhere",), "no checkpoint"),
    ],
)
def test_bad_input(refused, flags, message):
    refused("plan", message, *flags)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "budget"), [("2b_b10", 0.1), ("8b_b20", 0.2)])
def test_published_heatkv_schedule(call, tmp_path, name, budget):
    """What the plan says attention may see is what the authors' planner left."""
    size, path = name.split("_")[0], tmp_path / "plan.npz"
    flags = ("--policy=heatkv", f"--budget={budget}", "--policy_args=accounting=tokens")
    orders = f"--calibration={HEATKV / f'orders_{size}.json'}"
    status, _, err = call("plan", f"--model=infinity-{size}", *flags, orders, f"--save={path}")
    assert status == 0, err
    with np.load(path) as plan, np.load(HEATKV / f"schedule_{name}.npz") as wanted:
        heads = plan["keep_scale"].shape[2]
        hidden = np.unpackbits(wanted["A_packed"], axis=-1, bitorder="little", count=heads) > 0
        scale = np.arange(len(hidden))
        keep = ~hidden & (scale[:, None] > scale)[:, :, None, None]
        np.testing.assert_array_equal(plan["keep_scale"], np.moveaxis(keep, 1, -1))
        held = np.einsum("kjln,j->kln", keep, wanted["scale_tokens"])
        np.testing.assert_array_equal(plan["capacity"], held)
        stored = wanted["cache_total_after_layer"][:-1]
        assert (plan["live_tokens"][:-1] <= stored).all()
        assert plan["live_tokens"].max() <= wanted["threshold_total_tokens"]


def test_run_records_the_calibration(call, tmp_path, monkeypatch):
    """Orders for the embedded model: the file is part of what identifies a run."""
    seen = []
    monkeypatch.setattr(command.run_results, "dry_run_text", seen.append)
    geometry = describe().geometry
    layers, heads = geometry.num_layers, geometry.num_heads
    order = [[head, layer] for layer in range(layers) for head in range(heads)]
    path = tmp_path / "orders.json"
    path.write_text(json.dumps([order] * (geometry.schedule.num_scales - 3)))
    flags = ("--dry_run", "--num_images=1", "--policy=heatkv", "--budget=0.3")
    status, _, err = call("run", *flags, f"--calibration={path}")
    assert status == 0, err
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert seen[0].describe()["calibration"] == digest
    assert any(line.startswith("speed     heatkv saves at most") for line in seen[0].remarks)
    assert call("run", *flags)[0] == 0  # the one in the model's folder
    own = describe().directory / "calibration.json"
    assert seen[1].describe()["calibration"] == hashlib.sha256(own.read_bytes()).hexdigest()
    bare = models.checkpoint_folder("b_k6_sharedaln")
    assert call("run", *flags, f"--checkpoint={bare}")[0] == 2
    assert call("run", "--dry_run", f"--calibration={path}")[0] == 2


@pytest.mark.parametrize(
    ("model", "preset", "batch_size", "line", "pool"),
    [
        ("var-d30", "d30-table3", 50, "4.770 GB of 22.412 GB, 78.72% saved", "33.76% of full"),
        ("var-d36", "d36-table3", 25, "15.264 GB of 53.156 GB, 71.28% saved", "52.90% of full"),
    ],
)
def test_published_amskv_memory(call, model, preset, batch_size, line, pool):
    flags = ("--policy=amskv", f"--policy_args=preset={preset}", f"--batch_size={batch_size}")
    status, out, err = call("plan", f"--model={model}", *flags)
    assert status == 0, err
    assert f"AMS-KV's count {line}" in out and pool in out
    assert f"({model}, recipe amskv-table3" in out  # what is known of its quality


@pytest.mark.parametrize("policy", ["heatkv", "scalekv", "amskv", "hack"])
def test_published_models_need_no_calibration(call, policy):
    """Layers and heads count as alike; with weights that could be measured it is an error."""
    flags = (f"--policy={policy}", "--budget=0.2")
    status, out, err = call("plan", "--model=var-d16", *flags)
    assert status == 0, err
    assert "count as alike" in out
    assert call("plan", GEOMETRY, *flags)[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "line"), [("2b", "3900 MB of 38550 MB"), ("8b", "8531 MB of 84328 MB")]
)
def test_published_heatkv_memory(call, size, line):
    """650 tokens per head of 6425, the paper's row for 10 %."""
    orders = f"--calibration={HEATKV / f'orders_{size}.json'}"
    flags = ("--policy=heatkv", "--budget=0.10117", orders, "--batch_size=8")
    status, out, err = call("plan", f"--model=infinity-{size}", *flags)
    assert status == 0, err
    assert f"HeatKV's count {line}" in out
    row = next(text for text in out.splitlines() if "HeatKV's table, 10%" in text)
    assert f"650 tokens per head = {line}; ours" in row
    assert int(row.split()[-2]) < 0.68 * int(line.split()[0])  # 16-bit keys: 4 bytes, not 6


@pytest.mark.parametrize(
    ("model", "budget", "rows"),
    [
        (
            "xl-384",
            "0.1667",
            ["HeadKV 12.34 (21.57 less), LineAR 12.62 (21.29 less)", "20.97 (43.7"],
        ),
        ("xl-384", "0.25", ["HeadKV 14.63 (19.28 less), LineAR 14.88 (19.03 less)", "25.51 (39.2"]),
        ("xl-384", "1", ["full cache 33.91; ours, keys and values: 25.31 of 25.31", "64.75; ours"]),
        ("xxl-384", "0.1667", ["LineAR 15.87 (35.50 less); ours, keys and values: 6.75 of 40.50"]),
        ("xl-384", "0.2", []),
        ("xl-256", "0.25", []),
    ],
)
def test_published_memory_of_token_models(call, model, budget, rows):
    """What the papers save is, within 5 %, what our bytes say."""
    flags = (f"--model=llamagen-{model}", "--policy=headkv", f"--budget={budget}")
    status, out, err = call("plan", *flags)
    assert status == 0, err
    lines = [line for line in out.splitlines() if "GiB in all" in line]
    assert len(lines) == len(rows) and all(map(str.__contains__, lines, rows)), lines
    for line in lines if budget != "1" else ():
        *printed, ours = (float(found) for found in re.findall(r"\(([\d.]+) less\)", line))
        assert all(0.95 * theirs < ours < theirs for theirs in printed)
