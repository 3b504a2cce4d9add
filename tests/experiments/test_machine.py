"""`experiments.bench --machine` on a CPU: its steps, what they find, what is printed of it. What it
says of a chip is not tested."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from experiments import step_files
from experiments.bench import (
    checks,
    device,
    kernel_steps,
    machine,
    machine_report,
    program_steps,
    random_models,
    sanitizer,
    scope,
    steps,
)
from experiments.bench.kernel_steps import NothingCompared, WrongResult
from experiments.bench.rows import Call, Row
from experiments.work_folder import FINISHED
from pallas_kernels import bench, implementations
from pallas_kernels.chips import get_chip

CPU = "cpu, 20"  # how its table begins
ROW = Row(Call("attend", "var-d30-t1", "mosaic", "bfloat16", 8, 1.0), 1e-3, 989.4e8, 2.4e9)


# --- the whole of it ---


def test_a_quick_run_on_a_cpu(call, tmp_path):
    """Every kind of step, in a process of its own."""
    path = tmp_path / "machine.json"
    flags = "--machine", "--quick", "--minutes=60", f"--json={path}"
    status, out, err = call("bench", *flags)
    assert status == 0, err
    assert CPU in out and "its peaks are not known" in out and "not run" not in out
    found = json.loads(path.read_text())
    assert [s["status"] for s in found["steps"]] == ["finished"] * len(found["steps"])
    assert found["quick"] and found["device"]["versions"]["jax"] == jax.__version__
    assert [s["name"] for s in found["steps"]] == [s.name for s in steps.listed(scope.here(True))]
    rows = [Row.read(row) for row in found["rows"]]
    kinds = {row.call.operation.split()[0] for row in rows}
    assert kinds == {"check", "attend,", "tune", *scope.SMALLEST, "starts", "products"} | {
        "codes",
        "pixels",
    }
    for row in rows:
        assert (row.seconds or 0) > 0 or " right, largest error" in row.note or " us + " in row.note
    assert len(found["tuned"]) == 1 and list(tmp_path.iterdir()) == [path]

    status, _, err = call("bench", "--machine", "--quick", f"--json={path}")
    assert status == 2 and "exists already: choose another --json or add --overwrite" in err
    status, _, err = call("bench", f"--adopt={path}")
    assert status == 2 and "it was measured on a CPU" in err


@pytest.mark.slow
def test_a_whole_run_on_a_cpu(call, tmp_path):
    path = tmp_path / "machine.json"
    status, out, err = call("bench", "--machine", "--minutes=240", f"--json={path}")
    assert status == 0, err
    found = json.loads(path.read_text())
    assert {s["status"] for s in found["steps"]} == {"finished"}
    shapes = {row["call"]["shape"] for row in found["rows"]}
    assert set(scope.MODELS) <= shapes
    notes = [row["note"] for row in found["rows"]]
    assert any("dB from float32" in note for note in notes)
    assert not any("Error" in note for note in notes), notes


def test_a_step_alone(call):
    status, out, _ = call("bench", "--machine", "--quick", "--step=starts")
    assert status == 0 and out.startswith("starts 256 kernels")
    status, _, err = call("bench", "--machine", "--quick", "--step=stars")
    assert status == 2 and "unknown step 'stars'" in err and "did you mean 'starts'" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quick"], "--quick belongs to --machine"),
        (["--minutes=3"], "--minutes belongs to --machine"),
        (["--step=starts"], "--step belongs to --machine"),
        (["--worker=x"], "--worker belongs to --machine"),
        (["--machine", "--check"], "leave --check and --tune out"),
        (["--skip=x"], "--skip belongs to --machine"),
        (["--machine", "--adopt=x"], "--adopt does not take --machine: leave it out; it takes"),
        (["--adopt=x", "--quick"], "--adopt does not take --quick"),
        (["--adopt=x", "--json=y"], "--adopt does not take --json"),
        (["--machine", "--model=nonsense"], "--machine does not take --model: leave it out"),
        (["--machine", "--op=zzz"], "--machine does not take --op"),
        (["--machine", "--dtype=float99"], "--machine does not take --dtype"),
        (["--machine", "--rows=3"], "--machine does not take --rows"),
        (["--machine", "--skip=x"], "--machine does not take --skip"),
        (["--machine", "--step=starts", "--minutes=3"], "--step does not take --minutes"),
        (["--machine", "--step=starts", "--json=m.json"], "--step does not take --json"),
        (["--machine", "--worker=x", "--step=starts"], "--worker does not take --step"),
        (["--machine", "--minutes=0"], "--minutes=0 is not valid"),
        (["--machine", "--json=missing/m.json"], "there is no folder"),
        (["--machine", "--json=."], "is a folder"),
    ],
)
def test_wrong_flags(call, flags, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, out, err = call("bench", *flags)
    assert status == 2 and message in err and not out and not list(tmp_path.iterdir())


# --- steps ---


def test_steps_of_a_chip(monkeypatch):
    """Names are file names, checks come first, and every published model is drawn."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(implementations.target, "platform", lambda: "gpu")
    monkeypatch.setattr(implementations.target, "capability", lambda: "9.0")
    monkeypatch.setattr(sanitizer, "available", lambda: True)
    monkeypatch.setattr(bench, "fits", lambda spec: True)
    here = replace(scope.here(False), chip=get_chip("h200"))
    assert here.best == "mosaic" and here.images == (1, 8, 64) and not here.small
    every = steps.listed(here)
    names = [step.name for step in every]
    assert len(set(names)) == len(names)
    for name in names:
        assert FINISHED.fullmatch(step_files.path_of(Path(), name).name)
    first = [step.name for step in every[: names.index("slope")]]
    assert all(step.checks for step in every[: len(first)]) and names[0] == "sanitizer"
    assert first[1:] == [f"check-{n}-mosaic" for n in scope.CHECKED if f"check-{n}-mosaic" in names]
    assert names[-1].startswith("check-") and names[-1].endswith("-triton")
    draws = [f"draw-{m}-{p}-{i}" for p in steps.POLICIES for i in (1, 8, 64) for m in scope.MODELS]
    assert [n for n in names if n.startswith("draw")] == draws
    assert "check-attend-triton" in names and "check-finish-mosaic" in names
    quick = [step.name for step in steps.listed(replace(scope.here(True), chip=here.chip))]
    assert set(quick) < set(names) and not any("tune" in n or "triton" in n for n in quick)


def test_a_check_compares_what_is_published():
    here = replace(scope.here(False), small=False, dtype="bfloat16", shapes=("var-d30-t256",))
    here = replace(here, types=(("bfloat16", None), ("bfloat16", "int8")))
    found = list(kernel_steps.cases(here, "attend", "mosaic"))
    assert len(found) == 2 * len(bench.OPERATIONS["attend"].fillings) + 1
    assert {case.spec.heads for case in found} == {3, 30}
    assert all((case.spec.tokens, case.spec.entries) == (256, 27) for case in found)
    other = list(kernel_steps.cases(replace(here, shapes=("var-d36-t9",)), "attend", "mosaic"))
    assert [case.spec.heads for case in other] == [3, 36]


def test_a_wrong_number_names_the_input_and_its_command(call, monkeypatch):
    """The command that is printed finds the same."""
    here, seen = scope.here(True), []

    def errors(operation, spec, name):
        seen.append(spec)
        return {"out": float("nan"), "lse": 1e-4}

    monkeypatch.setattr(bench, "errors", errors)
    with pytest.raises(WrongResult) as wrong:
        kernel_steps.check(here, "attend", "triton-interpret")
    for part in ("attend by triton-interpret", "var-d30-t1", "bfloat16", "tables random"):
        assert part in wrong.value.words
    assert "error out nan  lse 1.0e-04, allowed is less than 1e-02" in wrong.value.words
    words = wrong.value.command.split()
    assert words[:3] == ["python", "-m", "experiments.bench"]
    status, out, _ = call("bench", *words[3:])
    assert status == 1 and out.startswith("WRONG  attend  var-d30-t1  bfloat16")
    assert seen[-1] == replace(seen[-2], kv_dtype="bfloat16")


def test_a_kernel_that_fails_is_wrong(monkeypatch):
    def errors(*_):
        raise RuntimeError("an illegal instruction")

    monkeypatch.setattr(bench, "errors", errors)
    with pytest.raises(WrongResult, match="RuntimeError: an illegal instruction"):
        kernel_steps.check(scope.here(True), "write", "tpu-interpret")


def test_a_kernel_may_refuse_shapes_but_not_all(call, monkeypatch):
    """A check in which nothing was compared is none; the command it names says the same."""
    refused = ["bfloat16"]

    def errors(operation, spec, name):
        if spec.dtype in refused:
            raise NotImplementedError("heads of 64")
        return {"out": 1e-6}

    monkeypatch.setattr(bench, "errors", errors)
    here = scope.here(True)
    with pytest.raises(
        NothingCompared, match="0 right, .* 1 refused; the first: heads of 64"
    ) as no:
        kernel_steps.check(here, "write", "tpu-interpret")
    status, out, _ = call("bench", *str(no.value).split("experiments.bench ")[1].split())
    assert status == 1 and out.startswith("REFUSED") and "0 of 1 right, 1 refused" in out
    both = replace(here, types=(("bfloat16", None), ("float32", None)), quick=False)
    [row] = kernel_steps.check(both, "write", "tpu-interpret").rows
    assert re.fullmatch(r"(\d) right, largest error 1.0e-06, \1 refused", row.note), row.note
    flags = "--check", "--op=write", "--shape=var-d30-t1", "--implementation=tpu-interpret"
    status, out, _ = call("bench", *flags, "--dtype=bfloat16,float32", "--filling=random")
    assert status == 0 and "1 of 2 right, 1 refused" in out


@pytest.mark.parametrize("reference_fits", [False, True])
def test_only_the_reference_may_not_fit(monkeypatch, reference_fits):
    def errors(operation, spec, name):
        if name == "reference" and reference_fits:
            return {"out": 0.0}
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(bench, "errors", errors)
    expected = WrongResult if reference_fits else NothingCompared
    with pytest.raises(expected, match="RESOURCE_EXHAUSTED" if reference_fits else "1 did not fit"):
        kernel_steps.check(scope.here(True), "write", "tpu-interpret")


def test_what_cannot_be_timed_says_why(monkeypatch):
    def prepare(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench, "prepare", prepare)
    here = scope.here(True)
    spec = checks.resized(kernel_steps.arg_specs.SPECS["var-d30-t1"], True)
    assert "out of memory" in kernel_steps.timed(here, "write", spec, 1.0).note
    assert "a pool of" in kernel_steps.timed(here, "write", replace(spec, rows=10**8), 1.0).note


@pytest.mark.parametrize(
    ("status", "output", "said"),
    [
        (0, "", "nothing found"),
        (127, "no libsanitizer", "not run: compute-sanitizer does not start: no libsanitizer"),
        (5, "Error: Device not supported", "not run: .* Device not supported"),
        (sanitizer.FOUND, "========= Invalid __global__ read of size 4", "Invalid __global__ read"),
        (sanitizer.FOUND, "Invalid read, then Internal Sanitizer Error", "Invalid read"),
        (1, "WRONG  attend_token", "WRONG  attend_token"),
        (2, "error: unknown shape", "it ended with 2: error: unknown shape"),
        (5, "", "it ended with 5: it says nothing; if the tool is at fault, leave it out of PATH"),
        (-11, "", "it ended with -11"),
    ],
)
def test_the_sanitizer(monkeypatch, tmp_path, status, output, said):
    tool = tmp_path / sanitizer.TOOL
    end = f"exit {status}" if status >= 0 else f"kill {status} $$"
    tool.write_text(f"#!/bin/sh\necho '{output}'\n{end}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert sanitizer.available()
    if said.startswith(("nothing", "not run")):
        assert re.match(said, sanitizer.check().rows[0].note)
        return
    with pytest.raises(WrongResult, match=said) as wrong:
        sanitizer.check()
    assert wrong.value.command.startswith("compute-sanitizer --error-exitcode=99 python -m exper")


def test_a_sanitizer_that_cannot_be_started_is_noted(monkeypatch, tmp_path):
    tool = tmp_path / sanitizer.TOOL
    tool.write_text("#!/no/such/shell\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "does not start: " in sanitizer.check().rows[0].note


def test_bytes_beside_the_weights_are_those_of_the_decoder(monkeypatch):
    """The program holds the codec only, and the transformer is larger than it needs."""
    here = scope.here(True)
    model = random_models.with_weights(random_models.abstract("var-d30", True), "float32")
    shown = []
    monkeypatch.setattr(program_steps, "show_bytes", lambda n: shown.append(n) or f"{n} B")
    code_map = jax.numpy.zeros((1, *model.code_map))
    row, pixels = program_steps._decoded(here, model, code_map, "float32", None)
    [held] = shown
    assert pixels.nbytes <= held < 2**24 and row.note == f"{held} B beside the weights"


# --- what it prints ---


def content(*rows, chip="h200", status="finished"):
    device_ = {"kind": "NVIDIA H200", "chip": chip, "versions": {"jax": "1", "varjax": "2"}}
    return {
        **machine.FORMAT,
        "date": "2026-01-02",
        "quick": False,
        "revision": "abc",
        "device": {"platform": "gpu", **device_},
        "driver": "580.1",
        "clocks": {"before": [{"name": "GPU", "clocks.sm": "1980 MHz"}], "after": None},
        "steps": [{"name": "a", "status": status, "seconds": 1.0, "note": "because"}],
        "rows": [row.as_json() for row in rows],
        "tuned": [],
    }


def test_the_table():
    rows = ROW, replace(ROW, modelled=5e-4, expected=8e-4), replace(ROW, seconds=None, note="why")
    lines = machine_report.text(content(*rows)).splitlines()
    assert lines[0] == "NVIDIA H200, 2026-01-02, driver 580.1"
    assert "before: clocks.sm 1980 MHz" in lines
    assert "peaks of h200: 989.4 TFLOP/s in bfloat16, 4800 GB/s" in lines
    first, second, third = (line for line in lines if line.startswith("attend"))
    assert "2.4e+03 ( 50%)" in first and "98.9 ( 10%)" in first
    assert second.split()[6:11] == ["1.00", "ms", "500.0", "us", "2.00"] and "800.0 us" in second
    assert third.endswith("-  why")
    assert lines[-1] == "" or "not run" not in lines[-1]
    for status, said in (("failed", "failed: a: because"), ("not run", "not run, the time was up")):
        assert said in machine_report.text(content(status=status))


def test_the_table_of_an_unknown_chip():
    """Its times are real, unlike those of a CPU."""
    found = content(ROW, chip=None)
    text = machine_report.text(found)
    assert "its peaks are not known" in text and "The peaks of this chip are not known" in text
    assert "CPU" not in text and "2.4e+03" in text
    found["device"]["platform"] = "cpu"
    assert "On a CPU kernels are interpreted" in machine_report.text(found)


def test_clocks_come_from_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.clocks() is None and device.driver(None) is None
    tool = tmp_path / device.NVIDIA_SMI
    fields = ", ".join(f"{n} of it" for n in device.ASKED)
    for text, found in ((f"echo '{fields}'", True), ("exit 9", False), ("echo a, b", False)):
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
        if not found:
            assert not device.clocks()
            continue
        [gpu] = device.clocks()
        assert gpu["clocks.sm"] == "clocks.sm of it"
        assert device.driver([gpu]) == "driver_version of it"
