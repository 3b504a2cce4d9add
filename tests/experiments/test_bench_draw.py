"""`experiments.bench --draw` on a CPU: what its rows hold, its time limit, and what it says of
failures. And how profiles of devices are read, from events that are made up."""

import json
import re
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.bench import draw
from tests.often import often
from varjax.generation.generator import Generator
from varjax.generation.program import OutOfMemory

# images and budget
TASKS = {"var-d30-b1": (1, 1.0), "llamagen-xl-streaming-b8": (8, draw.SMALL_SHARE)}
PROGRAM = {
    *("seconds", "all_seconds", "peak_bytes", "profiled_seconds", "span_seconds"),
    *("kernel_seconds", "calls", "kernels", "scales"),
}


@pytest.mark.parametrize("count", often([1], [1, 2]))
def test_rows_are_whole(call, tmp_path, monkeypatch, count):
    """The time is up before the last one."""
    names = [*TASKS][:count]
    path = tmp_path / "chip.jsonl"
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests go on with theirs
    drawn_before_the_end(monkeypatch, count)
    asked = ",".join([*names, "infinity-2b-b64"])
    flags = f"--draw={asked}", "--repeats=2", "--minutes=1", f"--json={path}"
    status, out, err = call("bench", *flags)
    assert status == 0, err
    head, *rows, late = map(json.loads, path.read_text().splitlines())
    assert head["jax"] == jax.__version__ and head["device"] == "cpu"
    assert {row["task"]: (row["images"], row["budget"]) for row in rows} == {
        name: TASKS[name] for name in names
    }
    assert late["task"] == "infinity-2b-b64" and late["note"] == "not begun: the time is up"
    for row in rows:
        assert row["finite"] is True and row["compile_seconds"] > 0 and row["small"]
        assert row["compile_phases"]["backend_compile"] > 0
        for program in (row["codes"], row["pixels"]):
            check_program(program)
    found = re.findall(r"^(\S+) \(cut down\): compiled in [\d.]+ s", out, re.M)
    assert found == names and out.count("share  calls  kernel") == 2 * count
    assert out.splitlines()[-1] == "infinity-2b-b64: not begun: the time is up"
    status, _, err = call("bench", *flags)
    assert status == 2 and "exists already" in err


def drawn_before_the_end(monkeypatch, count):
    """Makes the clock of `draw.rows` jump to the end after so many tasks."""
    real, asked = draw.time.monotonic, iter(range(10**6))
    clock = SimpleNamespace(
        monotonic=lambda: real() + (3600 if next(asked) >= count else 0),
        perf_counter=draw.time.perf_counter,
    )
    monkeypatch.setattr(draw, "time", clock)


def check_program(program):
    assert program.keys() == PROGRAM
    times = [program[name] for name in PROGRAM if name.endswith("seconds")]
    assert len(program["all_seconds"]) == 2
    assert all(0 < s < 60 for s in np.hstack(times)) and program["peak_bytes"] > 0
    assert program["span_seconds"] <= program["profiled_seconds"]
    kernels = program["kernels"]
    assert sum(k["share"] for k in kernels) == pytest.approx(1, abs=1e-6)
    assert sum(k["calls"] for k in kernels) == program["calls"] > 10
    assert sum(k["us"] for k in kernels) == pytest.approx(1e6 * program["kernel_seconds"])
    assert len({k["name"] for k in kernels}) == len(kernels) > 10
    assert kernels[0]["us"] == max(k["us"] for k in kernels)


def test_a_task_that_fails_leaves_a_row(call, monkeypatch, tmp_path):
    """One fails, one does not fit, one gives no numbers."""

    def faulty(task, *_):
        if task.model == "var-d30":
            raise RuntimeError("no such instruction")
        programs = dict.fromkeys(("codes", "pixels"), draw.of_lines(1.0, []))
        for found in programs.values():
            found |= {"seconds": 1.0, "peak_bytes": 1}
        return {"finite": False, "compile_seconds": 1.0, "compilation_cache": "off", **programs}

    monkeypatch.setattr(draw, "drawn", faulty)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    path = tmp_path / "a.jsonl"
    status, out, err = call("bench", "--draw=var-d30-b1,llamagen-xl-b1", f"--json={path}")
    assert status == 1 and "var-d30-b1: RuntimeError: no such instruction" in out
    assert err.splitlines() == [
        "error: var-d30-b1: RuntimeError: no such instruction",
        "error: llamagen-xl-b1: pixels are not finite",
    ]
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("predicted", [True, False])
def test_what_does_not_fit_says_so(monkeypatch, predicted):
    if predicted:
        monkeypatch.setattr("varjax.generation.memory.available_bytes", lambda: 1000)
    else:

        def full(*_, **__):
            raise OutOfMemory("the device ran out of memory drawing")

        monkeypatch.setattr(Generator, "run_batch", full)
    found = draw.drawn(draw.TASKS["var-d30-b1"], small=True, repeats=1)
    assert found.keys() == {"note"} and found["note"].startswith("does not fit: ")


def test_clocks_are_what_the_tool_of_the_card_says(tmp_path, monkeypatch):
    monkeypatch.setattr(draw.shutil, "which", lambda name: None)
    with draw.clocks() as found:
        pass
    assert found == {}
    tool, said = tmp_path / "nvidia-smi", tmp_path / "said"
    rows = "1980, 650.5\\n1620, 690\\n1965, 300\\n"
    tool.write_text(f"#!/bin/sh\nprintf '{rows}'\ntouch {said}\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(draw.shutil, "which", lambda name: str(tool))
    with draw.clocks() as found:
        while not said.exists():
            time.sleep(0.01)
    assert found["clocks.sm"] == {"least": 1620, "median": 1965, "most": 1980}
    assert found["power.draw"]["most"] == 690


# --- profiles ---


def test_scales_end_with_the_choice_of_tokens():
    names = "add_and_normalize nvjet_a sample fusion add_and_normalize sample_2 add_and_normalize"
    events = [event(name, 100 * i, 1000 * (i + 1)) for i, name in enumerate(names.split())]
    first, second, third = draw.by_scale([events[::2], events[1::2]])
    assert first == {"norms": 1, "products": 2, "sample": 3, "other": 4}
    assert second == {"norms": 5, "sample": 6} and third == {"norms": 7}
    assert draw.by_scale([events[:2]]) == []


def event(name, start, duration):
    """An event as `jax.profiler` has it, of a CPU's kernel."""
    times = {"start_ns": start, "end_ns": start + duration, "duration_ns": duration}
    return SimpleNamespace(name=name, stats=[("hlo_op", name)], **times)


def plane(name, **lines):
    found = [
        SimpleNamespace(name=n.replace("_", " "), events=events) for n, events in lines.items()
    ]
    return SimpleNamespace(name=name, lines=found)


HOST = plane("/host:CPU", thread=[event("host", 0, 9000)])
GPU = plane(
    "/device:GPU:0",
    Stream_1=[event("gemm", 100, 50), event("norm", 200, 25), event("gemm", 300, 50)],
    Stream_2=[event("copy", 120, 25)],
    XLA_Ops=[event("fusion", 100, 250)],
)
TPU = plane(
    "/device:TPU:0",
    XLA_Modules=[event("jit_run", 0, 900)],
    XLA_Ops=[
        *(event("while.1", 100, 500), event("fusion", 100, 200), event("while.2", 310, 200)),
        *(event("fusion", 320, 100), event("copy", 650, 50)),
    ],
)


@pytest.mark.parametrize(
    ("planes", "span", "own"),
    [
        ([HOST, GPU], 250, {"gemm": (2, 100), "norm": (1, 25), "copy": (1, 25)}),
        (
            [HOST, TPU],
            600,
            {"while.1": (1, 100), "fusion": (2, 300), "while.2": (1, 100), "copy": (1, 50)},
        ),
        ([HOST], 9000, {"host": (1, 9000)}),
    ],
)
def test_kernels_are_those_of_the_device(planes, span, own):
    """Loops keep what their bodies leave; streams run side by side."""
    lines = draw.kernel_lines(SimpleNamespace(planes=planes))
    found = draw.of_lines(1.0, lines)
    assert found["span_seconds"] == pytest.approx(1e-9 * span)
    assert {k["name"]: (k["calls"], round(1e3 * k["us"])) for k in found["kernels"]} == own
    assert sum(k["share"] for k in found["kernels"]) == pytest.approx(1)
