"""Several processes on the loopback address train what one process trains; no step is lost or
repeated, and errors are said by all of them."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from tests.experiments import together
from tests.experiments.training.conftest import _write_discs

MANY = "tests.experiments.many"
# a codec of one level and without first steps of its own: each of its programs takes seconds
TINY = (
    "--image_size=4 --settings=patch_nums=1,2,4,vocab_size=32,z_channels=8,ch=8,norm_groups=4,"
    "ch_mult=1,num_res_blocks=1,vqvae_steps=12,vqvae_batch_size=12,vqvae_lr=3e-3,depth=2,width=32,"
    "heads=2,var_steps=12,var_batch_size=12,var_lr=3e-3,log_every=1,checkpoint_every=5,"
    "validate_every=6 --settings=autoencoder_steps=0,reseed_every=4"
).split()


def start(folder, out, each, *flags):
    """Train in processes, whose own things are in `each`: [{"when": signal, "flags": ...}]. Returns
    [(exit status, standard output, standard error)]."""
    port, commands = together.free_port(), []
    for i, own in enumerate(each):
        command = [MANY, folder / f"notes-{out}-{i}", own.get("when", "0"), "train"]
        if len(each) > 1:
            command += [f"--distributed=127.0.0.1:{port},{len(each)},{i}"]
        command += [f"--data={folder / 'discs.npz'}", f"--out={folder / own.get('out', out)}"]
        commands.append([*command, *TINY, *flags, *own.get("flags", ())])
    kept = str(folder / "programs")  # quick compilation
    return together.finished(commands, 1200, JAX_COMPILATION_CACHE_DIR=kept)


def losses(out: pathlib.Path, stage: str) -> np.ndarray:
    lines = [json.loads(line) for line in (out / stage / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    return np.array([line["loss"] for line in lines])


def check_losses(found: pathlib.Path, whole: pathlib.Path) -> None:
    """A finished run has the losses of the run `whole`."""
    for stage in ("vqvae", "var"):
        ours, theirs = losses(found, stage), losses(whole, stage)
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5, err_msg=stage)
    assert (found / "model" / "model.json").is_file()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures, and in `one` what one process makes of them; programs are compiled once for all."""
    folder = tmp_path_factory.mktemp("many")
    _write_discs(folder)
    assert start(folder, "one", [{}])[0][0] == 0
    return folder


@pytest.fixture
def tokens(folder, request):
    """Name of a run whose codec is trained, by one process, and whose transformer is not."""
    name = request.node.name
    shutil.copytree(folder / "one" / "vqvae", folder / name / "vqvae")
    (folder / name / "var").mkdir()
    shutil.copy(folder / "one" / "var" / "tokens.npz", folder / name / "var")
    return name


def steps_of(folder, out, process) -> list[int]:
    """The transformer's steps that a process began, in the order in which it did."""
    return [int(line) for line in (folder / f"notes-{out}-{process}").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "flags"), [(2, ()), (4, ("--mesh=data=-1,fsdp=2",))])
def test_many_processes_train_what_one_trains(folder, count, flags):
    found = start(folder, f"{count}", [{}] * count, *flags)
    assert [status for status, *_ in found] == [0] * count, found
    assert ["images/s" in err for *_, err in found] == [True] + [False] * (count - 1), found
    check_losses(folder / f"{count}", folder / "one")


@pytest.mark.slow
def test_one_of_two_is_killed_and_three_go_on(folder, tokens):
    """Every step is in the losses once, every picture is seen once an epoch."""
    killed = start(folder, tokens, [{}, {"when": "SIGKILL:7"}], "--stage=var")
    assert killed[1][0] == -9 and killed[0][0] not in (0, 2), killed
    assert "another process is gone" in killed[0][2] or "died" in killed[0][2], killed
    three = start(folder, tokens, [{}] * 3, "--stage=var", "--mesh=fsdp=3")
    assert [status for status, *_ in three] == [0] * 3, three
    assert "resuming after step 5" in three[0][2], three
    assert steps_of(folder, tokens, 2) == list(range(5, 12))
    check_losses(folder / tokens, folder / "one")


@pytest.mark.slow
def test_one_of_two_is_asked_to_end(folder, tokens):
    """All end after the same step with status 0; one process goes on after it."""
    asked = start(folder, tokens, [{}, {"when": "SIGTERM:7"}], "--stage=var")
    assert [status for status, *_ in asked] == [0, 0], asked
    (done,) = re.findall(r"(\d+) of 12 steps are stored: resume by the same", asked[0][2])
    assert not (folder / tokens / "model").exists()
    assert start(folder, tokens, [{}], "--stage=var")[0][0] == 0
    before, after = steps_of(folder, tokens, 1), steps_of(folder, tokens, 0)
    assert before == list(range(int(done))) and after == list(range(12)), (before, after)
    check_losses(folder / tokens, folder / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"flags": ["--seed=1"]}, "process 1 was started with another seed than process 0"),
        ({"out": "elsewhere/out"}, "not the same folder as that of process 0"),
    ],
)
def test_what_one_process_is_asked_for_all_must_be(pictures, tmp_path, own, message):
    (tmp_path / "elsewhere").mkdir()
    for status, _, err in start(tmp_path, "out", [{}, own]):
        assert status == 2 and message in err and err.count("error:") == 1, err
    assert not (tmp_path / "out").exists() and not list((tmp_path / "elsewhere").iterdir())
