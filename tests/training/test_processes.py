"""Several processes on the loopback address train what one process trains; no step is lost or
repeated, and errors are said by all of them."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

TINY = (
    "--image_size=8 --patch_nums=1,2,4 --vocab_size=32 --z_channels=8 --ch=8 --norm_groups=4"
    " --ch_mult=1,2 --num_res_blocks=1 --vqvae_steps=12 --vqvae_batch_size=12 --vqvae_lr=3e-3"
    " --autoencoder_steps=4 --reseed_every=4 --depth=2 --width=32 --heads=2 --var_steps=12"
    " --var_batch_size=12 --var_lr=3e-3 --log_every=1 --checkpoint_every=5 --validate_every=6"
).split()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(folder, out, each, *flags):
    """Train in processes, whose own things are in `each`: [{"when": signal, "flags": ...}]. Returns
    [(exit status, standard output, standard error)]."""
    port, started = free_port(), []
    for i, own in enumerate(each):
        notes = folder / f"notes-{out}-{i}"
        command = [sys.executable, "-m", "tests.training.many", notes, own.get("when", "0")]
        if len(each) > 1:
            command += [f"--distributed=127.0.0.1:{port},{len(each)},{i}"]
        command += [f"--data={folder / 'discs.npz'}", f"--out={folder / own.get('out', out)}"]
        command += [*TINY, *flags, *own.get("flags", ())]
        command += [f"--compilation_cache={folder / 'programs'}"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(list(map(str, command)), env=environment, **pipes))
    try:
        texts = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, o, e) for p, (o, e) in zip(started, texts, strict=True)]


def losses(out: pathlib.Path, stage: str) -> np.ndarray:
    lines = [json.loads(line) for line in (out / stage / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    return np.array([line["loss"] for line in lines])


def check_losses(found: pathlib.Path, whole: pathlib.Path) -> None:
    for stage in ("vqvae", "var"):
        ours, theirs = losses(found, stage), losses(whole, stage)
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5, err_msg=stage)
    assert (found / "model" / "model.json").is_file()


@pytest.mark.slow
def test_many_processes_train_what_one_trains(pictures, tmp_path):
    """Two, four with fsdp, and two of which one dies; three go on, of which one is asked to end."""
    assert start(tmp_path, "one", [{}])[0][0] == 0
    two = start(tmp_path, "two", [{}, {}])
    assert [status for status, *_ in two] == [0, 0], two
    assert "images/s" in two[0][2] and not two[1][2], two
    check_losses(tmp_path / "two", tmp_path / "one")
    four = start(tmp_path, "four", [{}] * 4, "--mesh=data=-1,fsdp=2")
    assert [status for status, *_ in four] == [0] * 4, four
    check_losses(tmp_path / "four", tmp_path / "one")
    killed = start(tmp_path, "killed", [{}, {"when": "SIGKILL:7"}])
    assert killed[1][0] == -9 and killed[0][0] not in (0, 2), killed
    assert "another process is gone" in killed[0][2] or "died" in killed[0][2], killed
    three = start(tmp_path, "killed", [{}, {"when": "SIGTERM:8"}, {}], "--mesh=fsdp=3")
    assert [status for status, *_ in three] == [0] * 3, three
    assert "resuming after step 5" in three[0][2] and "steps are stored: resume by" in three[0][2]
    assert not (tmp_path / "killed" / "model").exists()
    again = start(tmp_path, "killed", [{}] * 3)
    assert [status for status, *_ in again] == [0] * 3, again
    check_losses(tmp_path / "killed", tmp_path / "one")
    # after the checkpoint at 5 the three took every step once, over both runs
    steps = [int(line) for line in (tmp_path / "notes-killed-2").read_text().split()]
    assert steps == list(range(5, 12)), steps


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"flags": ["--seed=1"]}, "process 1 was started with another seed than process 0"),
        pytest.param(
            {"out": "elsewhere/out"},
            "not the same folder as that of process 0",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"flags": ["--data=other/discs.npz"]},
            "process 1 was started with another data than process 0",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"flags": ["--var_batch_size=7"]}, "cannot be split evenly", marks=pytest.mark.slow
        ),
    ],
)
def test_what_one_process_is_asked_for_all_must_be(pictures, discs, tmp_path, own, message):
    for name in ("elsewhere", "other"):
        (tmp_path / name).mkdir()
    images, labels = discs(64, seed=1)
    np.savez(tmp_path / "other" / "discs.npz", images=images, labels=labels)
    flags = [flag.replace("=other", f"={tmp_path}/other") for flag in own.get("flags", ())]
    for status, _, err in start(tmp_path, "out", [{}, {**own, "flags": flags}]):
        assert status == 2 and message in err and err.count("error:") == 1, err
    assert not (tmp_path / "out").exists() and not list((tmp_path / "elsewhere").iterdir())
