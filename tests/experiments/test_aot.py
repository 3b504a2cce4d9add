"""`experiments.aot`: flags, tables and failures, without compilers; one real compilation of a small
model for each platform whose compiler is here."""

import inspect
import json
import stat
import sys
import time
from functools import partial

import jax
import pytest

from experiments.aot import program as aot_program
from experiments.aot import worker
from pallas_kernels import chips
from tests import models_under_test as models
from varjax.core.state import KVState
from varjax.generation import api
from varjax.models.loading import load
from varjax.storage import checkpoint

COMPILED = {
    "status": "compiled",
    "batch_size": 8,
    "attention": "triton",
    "segments": [[0, 6, 16]],
    "layers": "scan",
    "decode_dtype": "bfloat16",
    "devices": 1,
    "parameter_bytes": 3 << 30,
    "kv_pool_bytes": 1 << 30,
    "bookkeeping_bytes": 0,
    "peak_bytes": 5 << 30,
    "peak_of": "codes",
    "memory_bytes": 80 << 30,
    "fits": True,
    "promised_bytes": 4 << 30,
    "peak_over_promised": 1.25,
    "aliased": True,
    "copies": {},
    "flops": 4e13,
    "kernel_flops": 1e13,
    "loops_of_unknown_length": 0,
    "floor_s": 0.125,
    "floor_bound": "FLOPs",
    "floor_images_per_s": 64.0,
    "compile_s": 30.0,
    "programs": {
        name: {
            "temporary_bytes": 1 << 29,
            "kernels": 48.0,
            "kernels_by_operation": {"attend/sort": 30.0},
            "kernels_of_ours": {"finish": {"calls": 6.0, "flops": 1e12, "bytes": 2048.0}},
            "copied_weight_bytes": 1 << 20,
            "collectives": [],
            "largest_temporaries": [
                {
                    "bytes": 1 << 27,
                    "shape": "f32[4,8]{1,0}",
                    "instruction": "fusion.1",
                    "source": f"{name}/dot_general",
                }
            ],
        }
        for name in ("codes", "pixels")
    },
}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target=v5litepod",), "choose one of tpu-v4, tpu-v5e"),
        (("--target=h200,",), "unknown chip ''"),
        (("--model=var-d17",), "var-d16"),
        (("--model=var-d16", "--checkpoint=x"), "exclude each other"),
        (("--checkpoint=/nowhere",), "no checkpoint"),
        (("--target=h200,v5e", "--attention=triton"), "tpu-v5e offers tpu"),
        (("--target=h200", "--attention=tpu"), "h200 offers gpu"),
        (("--target=b200,a100", "--attention=mosaic"), "that of a100 is 8.0"),
        (("--target=h200,v5e", "--decode_dtype=tf32"), "--decode_dtype=tf32: a TPU has no TF32"),
        (("--decode_dtype=int8",), "auto, bfloat16, tf32, float32"),
        (("--target=h200,a100", "--weights_dtype=fp8"), "h100, h200, b200), and a100 does not"),
        (("--target=v5e", "--weights_dtype=fp8"), "choose int8"),
        (("--target=tpu7x", "--weights_dtype=w8a8"), "--weights_dtype=w8a8 needs a chip"),
        (("--attention=cudnn",), "auto, reference, mosaic, triton, tpu"),
        (("--mesh=date=8",), "did you mean 'data'"),
        (("--mesh=data=3",), "multiple of 3"),
        (("--mesh=data=512", "--batch_size=512"), "at most 256"),
        (("--mesh=model=3",), "divisor of"),
        (("--batch_size=0",), "batch_size"),
        (("--segments=99",), "segments"),
        (("--policy=streaming", "--budget=1e-9"), "smallest feasible"),
        (("--calibration=file.json",), "no calibration"),
        (("--cfg=-1",), "cfg"),
        (("--json=/nowhere/x.json",), "no folder /nowhere"),
        (("--json=there.json",), "--overwrite"),
    ],
)
def test_bad_input(call, compilers, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("precious")
    status, out, err = call("aot", *flags)
    assert status == 2 and message in err and not out
    assert (tmp_path / "there.json").read_text() == "precious"


def test_missing_compilers_are_named_together(call, monkeypatch):
    """All that the targets need, in one message with one command."""
    monkeypatch.setattr("pallas_kernels.chips._version", {"jaxlib": "0.10.2"}.get)
    monkeypatch.setattr("pallas_kernels.chips._has_ptxas", lambda: False)
    status, out, err = call("aot", "--target=v5e,v6e,h200")
    assert status == 2 and not out and err.count("\n") == 1
    assert "cannot compile for tpu-v5e, tpu-v6e: libtpu is not installed; h200: JAX's CUDA" in err
    assert "ptxas is not here" in err and err.count("run `make aot-venv`") == 1
    assert "cannot compile for tpu-v5e: libtpu is" in call("aot", "--target=v5e")[2]
    # nobody should install them for what a chip cannot do
    err = call("aot", "--target=a100", "--weights_dtype=fp8")[2]
    assert "and a100 does not: choose int8" in err


def results(monkeypatch, **of):
    """The results of each target, whichever process compiles for it."""

    def result(target):
        return {"target": target, "platform": chips.get_chip(target).platform, **of[target]}

    monkeypatch.setattr(worker, "apart", lambda target, flags: result(target))
    monkeypatch.setattr(worker, "here", lambda chip, work: result(chip.name))


def test_table(call, compilers, monkeypatch, tmp_path):
    copies = {"kv_pool": ["%copy.1 = bf16[4] copy(%x)"], "position": ["%copy.2", "%copy.3"]}
    bad = {**COMPILED, "fits": False, "copies": copies, "loops_of_unknown_length": 2}
    results(monkeypatch, h200=COMPILED, a100=bad)
    target = tmp_path / "results.json"
    status, out, err = call("aot", "--target=h200,a100,h200", f"--json={target}", "--verbose")
    assert status == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert ["h200", "a100"] in lines and ["KV", "pool", "1", "GiB", "1", "GiB"] in lines
    assert ["fits", "yes", "NO"] in lines
    assert "in place yes NO: copies: 1 of kv_pool, 2 of position".split() in lines
    assert ["kernels", "25.0%", "25.0%"] in lines
    assert "kernels started, codes 48 48".split() in lines
    assert "weights copied, codes 1 MiB 1 MiB".split() in lines
    assert ["floor,", "seconds", *(2 * ["0.125", "(FLOPs)"])] in lines
    assert "h200, codes: 48 kernels, most of them by\n        30 x  attend/sort\n" in out
    assert "         6 x      2 KiB         1 TFLOP  finish" in out
    assert "128 MiB  f32[4,8]                     pixels/dot_general" in out
    assert "a100: copy of kv_pool: %copy.1" in out and "a100: 2 loops" in out
    assert "a100: copy of position: %copy.3" in out
    written = json.loads(target.read_text())
    assert [r["target"] for r in written["results"]] == ["h200", "a100"]
    of = "batch 8, peak 5 GiB of 80 GiB, at least 0.125 s (FLOPs)"
    assert out.endswith(f"\n\nh200: fits: {of}\na100: does not fit: {of}\n")
    results(monkeypatch, h200={**COMPILED, "largest_batch": 8})
    out = call("aot", "--target=h200")[1]
    assert "fits: batch 8, the largest batch that fits, peak" in out and "attend/sort" not in out


def test_refused_and_failed_targets(call, compilers, monkeypatch):
    sizes = {"batch_size": 8, "needed_bytes": 18 << 30, "memory_bytes": 15 << 30}
    refused = {"status": "refused", "error": "Ran out of memory", **sizes}
    failed = {"status": "failed", "error": "the compiler's process ended with -6:\n  abort"}
    results(monkeypatch, **{"tpu-v5e": refused, "h200": COMPILED, "a100": failed})
    status, out, err = call("aot", "--target=v5e,h200,a100")
    assert status == 1, err
    assert "NO: asks for 18 GiB" in out and "FAILED" in out
    assert "tpu-v5e: does not fit: batch 8 asks for 18 GiB of 15 GiB (Ran out of memory)" in out
    assert "a100: failed: the compiler's process ended with -6" in out
    assert call("aot", "--target=v5e")[0] == 0  # not to fit is a result


def test_progress_while_a_compiler_works(monkeypatch, capsys):
    """A line every ten seconds; here every hundredth of one. None when it is done."""
    assert inspect.signature(worker.still_there).parameters["every"].default == 10
    monkeypatch.setattr(worker, "still_there", partial(worker.still_there, every=0.01))
    # what only a process of its own may change
    monkeypatch.setattr(worker.os, "environ", {})
    monkeypatch.setattr(worker.jax.config, "update", lambda *_: None)

    def work(chip):
        while "h200: still compiling, 0 s so far" not in capsys.readouterr().err:
            time.sleep(0.01)
        return {"status": "compiled"}

    assert worker.here(chips.get_chip("h200"), work)["status"] == "compiled"


def test_a_compiler_that_aborts(monkeypatch, tmp_path, capfd):
    """Its last words are seen, and it is a result of one target."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'LLVM ERROR' >&2\nkill -6 $$\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    result = worker.apart("h200", [])
    assert result["target"] == "h200" and result["status"] == "failed"
    assert "ended with -6" in result["error"] and capfd.readouterr().err == "LLVM ERROR\n"


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
            " hbm. Used 18.50G of 15.75G hbm. Exceeded hbm capacity by 2.75G.",
            int(18.5 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (18.00G) exceeds available HBM (15.75G)",
            18 * 2**30,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M", None),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded", None),
        ("INVALID_ARGUMENT: hbm", None),
    ],
)
def test_messages_about_memory(message, needed):
    assert aot_program.memory_asked(message) == needed


def test_arrays_to_look_at(unchecked):
    """The pool, and what is large enough beside it; an index of a few numbers is not."""
    on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = partial(jax.ShapeDtypeStruct, sharding=on)
    state = KVState(
        kv_pool=leaf((2, 10, 8, 128), "int8"),
        kv_scale=leaf((2, 10, 16), "float32"),
        position=leaf((2, 80), "int32"),
        regions=leaf((2, 2, 4), "int32"),
        policy_state={"keys": leaf((3, 2, 4, 16), "bfloat16"), "count": leaf((3,), "int32")},
    )
    carried = aot_program.carried_arrays(state, (state.kv_pool, state.kv_scale))
    found = {a.name: (a.dtype, a.flat) for a in carried}
    assert found == {
        "kv_pool": (None, False),
        "kv_scale": ("float32", False),
        "position": ("int32", True),
        "policy_state['keys']": ("bfloat16", False),
    }


@pytest.mark.parametrize(
    ("target", "attention"), [("tpu-v5e", "reference"), ("h200", "reference"), ("h200", "auto")]
)
def test_compiles(call, target, attention, tmp_path):
    """The whole command on a small model: bytes add up, the cache is donated, and a GPU updates it
    in place.

    The kernel for GPUs takes heads of 16 and more, which the demo has. The other model's pool is 24
    numbers wide: the TPU compiler copies it into another layout, so nothing is claimed there.
    """
    if why := chips.why_unavailable(target):
        pytest.skip(why)
    folder, written = checkpoint.embedded("demo", "model.json"), tmp_path / "found.json"
    if attention == "reference":
        folder = models.checkpoint_folder("b_k6_sharedaln")
    flags = (f"--checkpoint={folder}", "--segments=1", "--greedy", f"--attention={attention}")
    status, out, err = call(
        "aot", f"--target={target}", *flags, "--batch_size=2", f"--json={written}"
    )
    assert status == 0, err
    (found,) = json.loads(written.read_text())["results"]
    assert found["attention"] == ("mosaic" if attention == "auto" else "reference")
    ours = found["programs"]["codes"]["kernels_of_ours"]
    assert bool(ours) == bool(found["kernel_flops"]) == (attention == "auto")
    assert found["fits"] and found["aliased"]
    assert target == "tpu-v5e" or found["copies"] == {}
    plan = api.plan(load(folder, "float32"))
    assert found["kv_pool_bytes"] == plan.num_bytes(2, "bfloat16")
    assert found["peak_bytes"] >= found["parameter_bytes"] + found["kv_pool_bytes"]
    assert 0 < found["floor_s"] < 1 and found["flops"] > 1e6
    assert found["programs"]["codes"]["largest_temporaries"]
