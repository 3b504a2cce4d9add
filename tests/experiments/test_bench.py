"""`experiments.bench` on a CPU: it measures, checks and refuses; what it says of a chip is not
tested."""

import json

import jax
import numpy as np
import pytest

from experiments import bench_table
from pallas_kernels import arg_specs
from pallas_kernels.chips import get_chip
from pallas_kernels.ragged_attention import bench, config, tune

SMALL = ("--shape=var-d30-t1", "--rows=1", "--budget=1", "--repeats=1")


def test_timings(call, tmp_path):
    path = tmp_path / "bench.json"
    status, out, err = call("bench", *SMALL, f"--json={path}")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[1].split()[:2] == ["shape", "operation"]
    assert lines[-1].startswith("attend at budget 1: reference takes")
    rows = json.loads(path.read_text())["rows"]
    ways = [(row["operation"], row["way"]) for row in rows]
    assert ways == [
        ("attend", "reference"),
        ("attend", "dense xla"),
        ("attention_moments", "reference"),
        ("write", "reference"),
    ]
    for row in rows:
        assert 0 < row["seconds"] < 1 and row["bytes_per_s"] > 0
        assert row["error"] is None or row["error"] < 1e-5
    status, _, err = call("bench", *SMALL, f"--json={path}")
    assert status == 2 and "exists already" in err


def test_check(call):
    flags = ("--check", "--shape=var-d30-t1", "--op=attend,write")
    status, out, err = call("bench", *flags, "--implementation=triton-interpret")
    assert status == 0, err
    assert out.splitlines()[-1] == "triton-interpret on cpu: 5 of 5 right"


def test_check_finds_a_wrong_kernel(call, monkeypatch):
    monkeypatch.setattr(bench, "errors", lambda *_: {"out": 0.0, "lse": float("nan")})
    flags = ("--check", "--shape=var-d30-t1", "--op=attend")
    status, out, _ = call("bench", *flags, "--implementation=triton-interpret")
    assert status == 1 and "WRONG" in out and "0 of 4 right" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--check"], "cpu has none: choose --implementation=triton-interpret"),
        (["--tune"], "run it on the GPU or TPU"),
        (["--tune", "--implementation=triton-interpret"], "run it on the GPU or TPU"),
        (["--implementation=triton"], "triton needs a GPU, this machine offers cpu"),
        (["--implementation=triton-interpret"], "only --check takes it"),
        (["--tune", "--check"], "exclude each other"),
        (["--model=var-d31"], "unknown model 'var-d31'"),
        (["--shape=var"], "unknown shape 'var'"),
        (["--op=read"], "unknown operation 'read'"),
        (["--dtype=float64"], "unknown type 'float64'"),
        (["--budget=0.5,2"], "--budget=0.5,2: shares above 0, at most 1"),
        (["--budget=x"], "--budget=x"),
    ],
)
def test_wrong_flags(call, flags, message):
    status, out, err = call("bench", *flags)
    assert status == 2 and message in err and not out


def test_work_counts_what_is_moved():
    spec = arg_specs.SPECS["var-d30-t36"]  # 16 rows, 30 heads of 64, 36 of 64 tokens
    found = bench.work("attend", spec, keys=64)
    assert found.flops == 4 * 16 * 30 * 36 * 100 * 64
    assert found.bytes == 16 * 30 * (4 * 36 + 2 * 64) * 64 * 2
    moments = bench.work("attention_moments", spec, keys=64)
    assert moments.bytes == 16 * 30 * ((2 * 36 + 64) * 64 * 2 + 4 * 36 + 4 * 100)


def test_a_share_of_the_cache_is_owned():
    spec = arg_specs.SPECS["var-d30-t256"]
    assert bench.compressed(spec, 0.1).entries == 3
    table = bench.compressed(spec.reduced(), 0.01).arguments(poison=False).table
    assert table.ids.shape[-1] == 1 and np.asarray(table.stop == spec.block_size).all()


def test_chips_of_device_kinds():
    for kind, name in [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
    ]:
        assert bench.chip(kind) is get_chip(name)
    for kind in ("cpu", "NVIDIA L40S", "NVIDIA GeForce GTX 1080", "NVIDIA A100-PCIE-40GB"):
        assert bench.chip(kind) is None


def test_table_shows_shares_of_the_peak():
    spec = arg_specs.SPECS["var-d30-t36"]
    work = bench.Work(flops=98.94e9, bytes=2.4e9)
    shared = {"error": None, "note": ""}
    rows = [
        bench_table.Row.of("attend", spec, 1.0, "triton", work, seconds=1e-3, **shared),
        bench_table.Row.of("attend", spec, 1.0, "reference", work, seconds=2e-3, **shared),
        bench_table.Row.of("attend", spec, 1.0, "dense xla", work, seconds=None, error=None),
    ]
    lines = bench_table.table(rows, get_chip("h200")).splitlines()
    assert "2.4e+03 ( 50%)" in lines[1] and "98.9 ( 10%)" in lines[1]
    assert "%" not in bench_table.table(rows, None)
    [line] = bench_table.summary(rows, "triton")
    assert line.startswith("attend at budget 1: triton takes 0.50 of the time of reference")


def test_tuning_takes_the_fastest_right_tiles(monkeypatch):
    """The kernel runs interpreted here, so times mean nothing and are made up."""
    spec = arg_specs.SPECS["var-d30-t1"].reduced(rows=1, heads=1)
    call = tune.call_of("attend", spec)
    every = tune.tiles(call, "triton")
    assert every[0] == config.heuristic(call, "triton") and len(every) == len(set(every)) > 10
    assert all(tile.block_q == 16 for tile in every)
    monkeypatch.setattr(tune, "tiles", lambda *_: every[:3])
    seconds = iter([3.0, 1.0])
    monkeypatch.setattr(bench, "measure", lambda *_: next(seconds))
    real = tune._run

    def run(kernel, operation, tile, *args, **options):
        if tile == every[2]:
            raise RuntimeError("refused")
        return real(interpreted, operation, tile, *args, **options)

    def interpreted(*args, interpret, **options):
        from pallas_kernels.ragged_attention import triton

        return triton.attend(*args, interpret=True, **options)

    monkeypatch.setattr(tune, "_run", run)
    found = list(tune.trials("attend", spec, "triton", repeats=1))
    assert [(tile, time) for tile, time, _ in found] == [
        (every[0], 3.0),
        (every[1], 1.0),
        (every[2], float("inf")),
    ]
    assert "refused" in found[2][2]


def test_measured_loops_run_the_operation_every_time():
    """A loop whose body does not depend on what goes before would be computed once."""
    spec = arg_specs.SPECS["var-d30-t36"].reduced(rows=1, heads=1)
    candidate = bench.prepare("attend", spec, 1.0, "reference")

    def loop(carry, arguments):
        return jax.lax.fori_loop(0, 9, lambda i, c: candidate.step(c, *arguments), carry)

    text = jax.jit(loop).lower(candidate.carry, candidate.arguments).compile().as_text()
    body = text.split("while(")[0]
    entry = text[text.index("ENTRY") :]
    assert "gather" in body and "gather" not in entry
