"""The process of `experiments.bench --machine` that uses the device: it keeps what it finished and
says what ended it. `test_machine_watch` has the one that watches it."""

import errno
import json
from dataclasses import replace

import pytest

from experiments import step_files
from experiments.bench import device, scope, steps, worker
from experiments.bench.kernel_steps import NothingCompared, WrongResult
from experiments.bench.rows import Call, Found, Row
from experiments.bench.steps import Step
from pallas_kernels.ragged_attention import config
from varjax.errors import UserError

ROW = Row(Call("attend", "var-d30-t1", "mosaic", "bfloat16", 8, 1.0), 1e-3, 989.4e8, 2.4e9)


@pytest.fixture
def fake(monkeypatch):
    """fake(name=function, ...): the steps of this machine are these; returns names that ran."""
    ran = []

    def use(**functions):
        def step(name, function):
            def run(**_):
                ran.append(name)
                function()
                return Found([replace(ROW, call=replace(ROW.call, shape=name))])

            return Step(name, run, checks=name.startswith("check"))

        found = [step(*item) for item in functions.items()]
        monkeypatch.setattr(steps, "listed", lambda here: found)
        return ran

    return use


def nothing():
    pass


def wrong():
    raise WrongResult("attend, shape s: error 1", "python -m again")


def broken():
    raise RuntimeError("launch failure")


def run(folder, quick=True, overwrite=False, skip=()):
    return worker.work(folder, quick=quick, overwrite=overwrite, skip=skip)


def test_finished_steps_are_kept(fake, tmp_path, capsys):
    ran = fake(one=nothing, two=broken, three=nothing)
    assert run(tmp_path) == worker.AGAIN and ran == ["one", "two"]
    assert '"failed"' in capsys.readouterr().out
    assert run(tmp_path, skip=["two"]) == 0 and ran == ["one", "two", "three"]
    fake(one=nothing, two=nothing, three=nothing)
    assert run(tmp_path) == 0 and ran == ["one", "two", "three", "two"]
    assert '"done": ["one", "three"]' in capsys.readouterr().out
    (tmp_path / "step-one.json").write_text("{")  # damaged: it runs again
    ran = fake(one=nothing)
    assert run(tmp_path) == 0 and ran[-1] == "one"


def test_a_wrong_result_ends_the_process(fake, tmp_path, capsys):
    ran = fake(check_one=wrong, two=nothing)
    assert run(tmp_path) == worker.WRONG and ran == ["check_one"]
    last = capsys.readouterr().out.splitlines()[-1].removeprefix(worker.MARK)
    said = {"name": "check_one", "words": "attend, shape s: error 1", "command": "python -m again"}
    assert json.loads(last) == {"event": "wrong", **said}
    assert not list(tmp_path.glob("step-*"))


def test_a_check_that_compares_nothing_is_not_kept(fake, tmp_path, capsys):
    def nothing_compared():
        raise NothingCompared("nothing was compared: 0 right")

    ran = fake(check_one=nothing_compared, two=nothing)
    assert run(tmp_path) == 0 and ran == ["check_one", "two"]
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-two.json"]
    empty = {"event": "empty", "name": "check_one", "why": "nothing was compared: 0 right"}
    assert worker.MARK + json.dumps(empty) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "NVIDIA H100"}, r"kind 'cpu', now 'NVIDIA H100'"),
        ({"versions": {"jax": "0.9"}}, r"versions {'jax'.*, now {'jax': '0.9'}"),
        ({"xla_flags": "--x"}, r"xla_flags .*, now '--x'"),
    ],
)
def test_another_machine_does_not_go_on(fake, tmp_path, monkeypatch, changed, said):
    fake(one=nothing)
    run(tmp_path)
    before = (tmp_path / "step-one.json").read_bytes()
    describe = device.describe
    with pytest.raises(UserError, match="quick True, now False.*choose another --json"):
        run(tmp_path, quick=False)
    monkeypatch.setattr(device, "describe", lambda: {**describe(), **changed})
    with pytest.raises(UserError, match=f"unfinished run with other settings .{said}"):
        run(tmp_path)
    assert (tmp_path / "step-one.json").read_bytes() == before
    assert run(tmp_path, overwrite=True) == 0


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device", "/place/step-one.json")


@pytest.mark.parametrize("functions", [{"one": full}, {"check_one": full}, {"one": nothing}])
def test_a_full_disk_is_no_failure_of_a_step(fake, tmp_path, monkeypatch, capsys, functions):
    """Whether the step meets it or the file that keeps it: no other step is tried."""
    ran = fake(**functions, two=nothing)
    monkeypatch.setattr(step_files, "write", full)
    assert run(tmp_path) == worker.STOPPED and len(ran) == 1
    event = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(worker.MARK))
    assert event["event"] == "stopped"
    assert "No space left on device: /place/step-one.json: make room there" in event["why"]


def test_a_foreign_file_is_not_touched(fake, tmp_path):
    fake(one=nothing)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="holds 'mine.txt', which no run writes"):
        run(tmp_path)


def test_tuned_tiles_of_another_device_are_refused(fake, tmp_path, monkeypatch):
    fake(one=nothing)
    monkeypatch.setattr(config, "TUNED", tmp_path / "tuned")
    other = config.write_tuned("NVIDIA H100", "attend", "mosaic", {})
    target = config.tuned_path("cpu", "attend")
    target.parent.mkdir()
    target.write_bytes(other.read_bytes())
    here = replace(scope.here(True), small=False, best="mosaic")
    monkeypatch.setattr(scope, "here", lambda quick: here)
    with pytest.raises(UserError, match="device is 'nvidia-h100', needed is 'cpu'; move it away"):
        run(tmp_path / "work")
    assert not (tmp_path / "work").exists()
