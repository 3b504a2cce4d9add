"""The folder of a stage: damaged checkpoints, history and settings, and two processes at once."""

import json
import os
import shutil
import subprocess
import sys
from unittest.mock import Mock, call

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import loop, session
from experiments.training.data import Dataset
from experiments.training.var_trainer import read_tokens
from tests.often import often
from varjax.core.errors import UserError
from varjax.storage import lock


def _state(step: int) -> dict:
    return {"weights": jnp.full((16, 8), step / 3, jnp.float32), "step": jnp.asarray(step)}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A stage with checkpoints after steps 4 and 8."""
    out = tmp_path_factory.mktemp("two")
    with loop.StageFolder(out, "var", {}) as folder:
        for step in (2, 4, 8):
            folder.save(step, _state(step))
    return folder.path


@pytest.fixture
def stage(two, tmp_path):
    return shutil.copytree(two, tmp_path / "out" / "var")


def _restored(stage) -> int:
    """Step of the checkpoint that is found, whose values are those that were saved."""
    with loop.StageFolder(stage.parent, "var", {}) as folder:
        state, step = folder.restore(_state(0))
    np.testing.assert_array_equal(state["weights"], _state(step)["weights"])
    return step


def _files(folder) -> list:
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "flipped": lambda file: file.write_bytes(bytes(255 - b for b in file.read_bytes())),
}


@pytest.mark.parametrize("damage", often(["half"], DAMAGES))
def test_a_damaged_checkpoint_is_skipped(two, tmp_path, capfd, damage):
    """With every file of the newest one in turn; that before is used."""
    for number, file in enumerate(_files(two / "checkpoints" / "8")):
        stage = shutil.copytree(two, tmp_path / str(number) / "var")
        DAMAGES[damage](stage / "checkpoints" / "8" / file)
        with loop.StageFolder(stage.parent, "var", {}) as folder:
            _, step = folder.restore(_state(0))
            folder.save(8, _state(8))
        said = capfd.readouterr().err
        assert step == 4 and said.count("\n") == 1 and said.endswith("Going on from step 4\n")
        assert number or _restored(stage) == 8


def test_when_all_are_damaged_nothing_is_removed(stage):
    for step in ("4", "8"):
        (stage / "checkpoints" / step / "default" / "_METADATA").write_text("{")
    before = _files(stage)
    with pytest.raises(UserError, match=r"checkpoints/8 are damaged.*from its start, remove .*var"):
        _restored(stage)
    assert _files(stage) == before


@pytest.mark.parametrize("text", ["", '{"8": {"../x": {}}}'])
def test_damaged_records_are_not_believed(stage, text):
    (stage / loop.RECORDS).write_text(text)
    (stage / "checkpoints" / "12.orbax-checkpoint-tmp-1").mkdir()  # an unfinished one
    assert _restored(stage) == 8
    assert sorted(p.name for p in (stage / "checkpoints").iterdir()) == ["4", "8"]


def test_damaged_lines_of_the_history(stage):
    lines = [b'{"step": 2}', b"[1]", b'{"step": "x"}', b"{}", b"\xff", b"[" * 10**5, b"", b"null"]
    (stage / loop.HISTORY).write_bytes(
        b"\n".join([*lines, b'{"step": 4}', b'{"step": 8}', b'{"st'])
    )
    with loop.StageFolder(stage.parent, "var", {}) as folder:
        folder.keep_history(4)
    assert (stage / loop.HISTORY).read_text() == '{"step": 2}\n{"step": 4}\n'


@pytest.mark.parametrize("there", [True, False])
def test_curves(stage, monkeypatch, there):
    """A table with a column for every number. Events begin after the checkpoint that a run goes on
    from; without tensorboardX there are none."""
    seen = Mock()
    monkeypatch.setitem(sys.modules, "tensorboardX", seen if there else None)
    (stage / loop.HISTORY).write_bytes(b'{"step": 2, "loss": 0.5}\n{"step": 4}\n')
    with loop.StageFolder(stage.parent, "var", {}) as folder:
        folder.keep_history(2)
        folder.append_history({"step": 3, "validation": {"parts": [3, 1]}})
        folder.write_table()
    table = "step,loss,validation/parts/1,validation/parts/2\n2,0.5,,\n3,,3,1\n"
    assert (stage / "history.csv").read_text() == table
    add, named = call.SummaryWriter().add_scalar, call.SummaryWriter
    parts = [add(f"validation/parts/{i}", value, 3) for i, value in ((1, 3), (2, 1))]
    made = [named(stage / "events", purge_step=3), add("step", 3, 3), *parts]
    assert seen.mock_calls == ([*made, named().close()] if there else [])


def test_checkpoints_without_settings(stage, tiny):
    """Nothing says what they were trained with: neither continued nor started anew."""
    settings, out = tiny(), stage.parent
    (out / "vqvae").mkdir()
    (out / "vqvae" / loop.SETTINGS).write_text(json.dumps(settings.deciding("vqvae")))
    (stage / loop.SETTINGS).unlink()
    with pytest.raises(UserError, match="var holds checkpoints but no settings.json"):
        session.train(settings, "both", out)


def test_pictures_elsewhere(tmp_path, monkeypatch):
    """Where they lie is compared in the first process alone: another machine may differ."""
    settings = {"data": "/here", "seed": 1}
    with loop.StageFolder(tmp_path, "var", settings):
        pass
    with pytest.raises(UserError, match="data was /here, now /there"):
        loop.check_folder(tmp_path, {"var": settings | {"data": "/there"}})
    monkeypatch.setattr(loop.hosts, "is_first", lambda: False)
    loop.check_folder(tmp_path, {"var": settings | {"data": "/there"}})
    with pytest.raises(UserError, match="seed was 1, now 2"):
        loop.check_folder(tmp_path, {"var": settings | {"seed": 2}})


def test_two_processes_in_one_folder(tiny, tmp_path):
    out = tmp_path / "run"
    with lock.held(out, ""), pytest.raises(UserError, match="another process trains in .*run"):
        session.train(tiny(), "both", out)
    assert not out.exists()


def test_tokens_of_other_pictures(tmp_path, tiny):
    labels, config = np.arange(5, dtype=np.int32) % 2, tiny().transformer(2)
    pictures = Dataset(np.zeros((5, 8, 8, 3), np.uint8), labels, *[None] * 2, 2)
    train, val = np.zeros((2, 5, 21), np.int32), np.ones((2, 21), np.int32)
    tokens = {"train": train, "val": val, "val_labels": labels[:2]}
    for own in (labels, 1 - labels):
        np.savez(path := tmp_path / "tokens.npz", **tokens, train_labels=own)
        if own is labels:
            np.testing.assert_array_equal(read_tokens(path, pictures, config).val, val)
    with pytest.raises(UserError, match="tokens.npz .*delete it to make it again"):
        read_tokens(path, pictures, config)


ELSEWHERE = """
import sys, jax
from experiments.training import loop
state = jax.device_put({"a": jax.numpy.arange(3.0)}, jax.devices()[1])
with loop.StageFolder(sys.argv[1], "var", {}) as folder:
    folder.save(4, state)
"""


@pytest.mark.slow
def test_a_run_goes_on_on_another_device(tmp_path):
    """Here: begun on the second of two devices, where there is now one."""
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    with loop.StageFolder(tmp_path, "var", {}) as folder:
        found, step = folder.restore({"a": jnp.zeros(3)})
    assert step == 4 and found["a"].devices() == jnp.zeros(()).devices()
    np.testing.assert_array_equal(found["a"], np.arange(3.0))
