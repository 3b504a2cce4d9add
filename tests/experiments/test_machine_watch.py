"""The process of `experiments.bench --machine` that watches the one that uses the device: it goes
on without a step that fails or hangs, says what ends a run, and puts the results together."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments import own_process, step_files
from experiments.bench import device, machine, watch, worker
from experiments.bench.rows import Call, Found, Row
from experiments.bench.watch import Refused, Watch
from experiments.work_folder import WorkFolder
from varjax.errors import UserError

ROW = Row(Call("attend", "var-d30-t1", "mosaic", "bfloat16", 8, 1.0), 1e-3, 989.4e8, 2.4e9)


def said(*events):
    """A program that says these events, one number meaning seconds to sleep."""
    lines = ["import time, sys"]
    for event in events:
        line = f"time.sleep({event})"
        if not isinstance(event, (int, float)):
            line = f"print({worker.MARK + json.dumps(event)!r}, flush=True)"
        lines.append(event if isinstance(event, str) else line)
    return [sys.executable, "-c", "\n".join(lines)]


BEGIN = {"event": "begin", "steps": ["a", "b"], "done": [], "kind": "chip"}
START = {"event": "start", "name": "a", "limit": 30, "checks": False}
CHECK = {**START, "checks": True}
CASE = {"event": "case", "words": "attend, shape s", "command": "python -m one"}
DONE = {"event": "finished", "name": "a", "seconds": 1.0}


def follow(*events, seconds=60.0):
    found = Watch()
    again = found.follow(said(*events), dict(os.environ), time.monotonic() + seconds)
    return again, found


def test_a_process_that_is_done():
    again, found = follow(BEGIN, START, DONE, {**START, "name": "b"}, {**DONE, "name": "b"})
    assert not again and found.done == ["a", "b"] and not found.left and not found.failed


def test_a_step_that_fails_is_left_out():
    failed = {"event": "failed", "name": "a", "why": "no memory"}
    again, found = follow(BEGIN, START, failed, f"sys.exit({worker.AGAIN})")
    assert again and found.failed == {"a": "no memory"} and found.left == ["b"]


def test_a_check_that_compares_nothing_is_left_out():
    """It is neither finished nor a wrong result."""
    empty = {"event": "empty", "name": "a", "why": "nothing was compared: 0 right"}
    again, found = follow(BEGIN, CHECK, empty, {**START, "name": "b"}, {**DONE, "name": "b"})
    assert not again and not found.wrong and found.done == ["b"]
    assert found.failed == {"a": "nothing was compared: 0 right"}


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("sys.exit(7)", "the process ended with 7"),
        ("import os; os.abort()", "the process ended with -6"),
        (60, "it did not end within 1 s"),
    ],
)
def test_a_step_that_ends_its_process_or_hangs(end, why):
    again, found = follow(BEGIN, {**START, "limit": 1}, end)
    assert again and why in found.failed["a"] and found.left == ["b"] and not found.wrong


@pytest.mark.parametrize("end", ["sys.exit(7)", 60])
def test_a_check_that_ends_its_process_or_hangs_is_wrong(end):
    again, found = follow(BEGIN, {**CHECK, "limit": 1}, CASE, end)
    assert not again and found.wrong.command == "python -m one"
    assert found.wrong.words.startswith("attend, shape s: ")


def test_the_time_is_up():
    start = time.monotonic()
    again, found = follow(BEGIN, START, DONE, {**START, "name": "b"}, 60, seconds=3)
    assert not again and found.left == ["b"] and time.monotonic() - start < 30


def test_a_process_that_does_not_begin(monkeypatch):
    with pytest.raises(Refused) as refused:
        follow("sys.exit(2)")
    assert refused.value.status == 2
    with pytest.raises(Refused, match="ended with -6") as refused:
        follow("import os; os.abort()")
    assert refused.value.status == 1
    with pytest.raises(Refused, match="the device did not answer before the time was up"):
        follow(60, seconds=1)
    monkeypatch.setattr(watch, "BEGIN_SECONDS", 1)
    for events in ([60], [BEGIN, 60]):
        with pytest.raises(Refused, match="the device did not answer within 1 s"):
            monkeypatch.setattr(watch, "BETWEEN_SECONDS", 1)
            follow(*events)


@pytest.mark.parametrize("end", [1, 0, 7])
def test_a_process_that_ends_between_two_steps(end):
    """It has not said why: another one might do the same, for ever."""
    with pytest.raises(Refused, match=f"ended with {end}: , between two of them") as refused:
        follow(BEGIN, START, DONE, f"sys.exit({end})")
    assert refused.value.status == max(1, end)


@pytest.mark.parametrize("status", [worker.WRONG, worker.AGAIN, 0])
def test_a_status_is_not_believed_while_a_step_runs(status):
    again, found = follow(BEGIN, START, f"sys.exit({status})")
    assert again and f"ended with {status}" in found.failed["a"]


@pytest.mark.parametrize("event", [DONE, {"event": "failed", "name": "a", "why": "no memory"}])
def test_there_is_a_limit_between_steps(event, monkeypatch):
    monkeypatch.setattr(watch, "BETWEEN_SECONDS", 1)
    start = time.monotonic()
    again, found = follow(BEGIN, START, event, 60)
    assert again and found.left == ["b"] and time.monotonic() - start < 30


PARENT = """
import os, sys, time
from experiments.bench.watch import Watch
Watch().follow([sys.executable, "-c", sys.argv[1]], dict(os.environ), time.monotonic() + 300)
"""
WORKER = """
import os, pathlib, subprocess, sys, time
from experiments.bench.lifeline import end_with_parent
end_with_parent()
child = subprocess.Popen(["sleep", "300"])
work = pathlib.Path({path!r} + ".work")
work.write_text(f"{{os.getpid()}} {{child.pid}}")
work.rename({path!r})
time.sleep(300)
"""


def test_the_worker_ends_when_the_other_process_is_killed(tmp_path):
    """It hangs, and is in a session of its own, with a process that it has started."""
    path = tmp_path / "pids"
    command = [sys.executable, "-c", PARENT, WORKER.format(path=str(path))]
    parent = subprocess.Popen(command, env=own_process.environment())
    try:
        assert until(path.exists, 60), "it did not start"
        pids = [int(text) for text in path.read_text().split()]
        assert all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert until(lambda: not any(map(alive, pids)), 10), "the worker lives on"
    finally:
        parent.kill()
        for pid in map(int, path.read_text().split() if path.exists() else ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition holds within so many seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def alive(pid: int) -> bool:
    """Whether the process runs: one that has ended may wait for somebody to ask for its status."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


# --- the whole again, with made-up processes ---


@pytest.fixture
def measured(monkeypatch, tmp_path, capsys):
    """measured(*events, keep=names, **options): (status, output, errors) of a run whose process
    says these events and keeps these steps."""
    monkeypatch.setattr(device, "clocks", lambda: [{"name": "GPU", "driver_version": "580.1"}])
    path = tmp_path / "m.json"
    settings = {"format": 1, "quick": False, **device.describe(), "kind": "NVIDIA H200"}
    settings |= {"platform": "gpu", "chip": "h200"}

    def invoke(*events, keep=(), **options):
        def command(folder, quick, overwrite, skip):
            work = WorkFolder(folder, settings)
            work.start()
            for name in keep:
                found = Found([replace(ROW, call=replace(ROW.call, shape=name))])
                content = {"seconds": 1.0, **found.as_json()}
                step_files.write(folder, name, work.digest, content)
            return said(*events)

        monkeypatch.setattr(machine, "command", command)
        options = {"quick": False, "minutes": None, "overwrite": False, **options}
        return machine.measure(path, **options), *capsys.readouterr(), path

    return invoke


def test_what_was_not_run_is_listed_and_runs_later(measured, monkeypatch):
    monkeypatch.setitem(machine.MINUTES, False, 0.05)
    status, out, _, path = measured(BEGIN, START, DONE, {**START, "name": "b"}, 60, keep=["a"])
    assert status == 0 and "not run, the time was up: b" in out
    assert "the same command goes on" in out
    found = json.loads(path.read_text())
    assert [s["status"] for s in found["steps"]] == ["finished", "not run"]
    assert found["driver"] == "580.1" and found["device"]["kind"] == "NVIDIA H200"
    begin, monkeypatched = {**BEGIN, "done": ["a"]}, {**START, "name": "b"}
    monkeypatch.setitem(machine.MINUTES, False, 1)
    ends = begin, monkeypatched, {**DONE, "name": "b"}
    status, out, _, path = measured(*ends, keep=["b"])
    assert status == 0 and "not run" not in out
    assert [r["call"]["shape"] for r in json.loads(path.read_text())["rows"]] == ["a", "b"]
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(UserError, match="exists already"):
        measured(*ends)


def test_a_wrong_result_writes_nothing(measured):
    found = {"event": "wrong", "name": "a", "words": "attend: error 1", "command": "python -m x"}
    status, out, err, path = measured(BEGIN, CHECK, found, "sys.exit(1)")
    assert status == 1 and not path.exists()
    assert "error: wrong result in step a: attend: error 1\nrepeat: python -m x\n" in err


def test_a_failed_step_is_listed(measured):
    events = BEGIN, START, {"event": "failed", "name": "a", "why": "no memory"}
    events += {**START, "name": "b"}, {**DONE, "name": "b"}
    status, out, _, path = measured(*events, keep=["b"])
    assert status == 1 and "failed: a: no memory" in out and path.exists()


def test_a_full_disk_is_one_message(measured):
    stopped = {"event": "stopped", "why": "step b cannot be kept: No space left: /x: make room"}
    events = BEGIN, START, DONE, {**CHECK, "name": "b"}, CASE, stopped
    status, out, err, path = measured(*events, "sys.exit(2)", keep=["a"])
    assert status == 2 and not out.startswith("NVIDIA") and not path.exists()
    assert err.count("error:") == 1 and "error: step b cannot be kept" in err
    assert "wrong" not in err and "1 of 2 steps are kept" in err
    assert (path.parent / "m.json.partial" / "step-a.json").exists()


def test_the_time_is_up_before_the_device_answers(measured, monkeypatch):
    monkeypatch.setitem(machine.MINUTES, False, 0.02)
    status, out, err, path = measured(60)
    assert status == 1 and not out and not path.exists()
    assert err == (
        "error: the device did not answer before the time was up: see whether others use it\n"
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("shutil.rmtree(f)", "settings.json was lost or changed .*: there is no file"),
        ("(f / 'settings.json').write_text('[]')", "does not say what the machine is"),
        ("(f / 'step-a.json').unlink()", "a had been kept there; the same command runs them again"),
    ],
)
def test_a_folder_that_is_damaged_during_the_run(measured, tmp_path, damage, message):
    code = f"import pathlib, shutil; f = pathlib.Path({str(tmp_path)!r}) / 'm.json.partial'"
    events = BEGIN, START, DONE, {**START, "name": "b"}, {**DONE, "name": "b"}
    with pytest.raises(UserError, match=message):
        measured(*events, f"{code}; {damage}", keep=["a", "b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "varjax machine", "steps": [1]}', "exists already: choose another --json"),
        ('{"format": "varjax machine", "steps": 5}', "exists already: choose another --json"),
        ("null", "exists already: choose another --json or add --overwrite"),
        ('{"format": "varjax', "cannot read .* as JSON: .*; choose another --json or add --over"),
    ],
)
def test_a_damaged_file_of_results_is_not_replaced(measured, tmp_path, text, message):
    path = tmp_path / "m.json"
    path.write_text(text)
    path.with_name("m.json.partial").mkdir()
    (path.with_name("m.json.partial") / "settings.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        measured(BEGIN)
    assert path.read_text() == text


def test_two_at_once(measured, tmp_path):
    with WorkFolder(tmp_path / "m.json.partial", {}).held():
        with pytest.raises(UserError, match="another run is writing to .*, or choose --json"):
            measured(BEGIN)
