"""Runs and sweeps in parts: joined, they are what one process writes; what is missing, doubled, of
other flags or edited is refused, and nothing is changed."""

import shutil
import zipfile

import pytest

from experiments.parts import Shard
from tests.experiments.conftest import report_of
from tests.unfinished_runs import tree
from varjax.core.errors import UserError
from varjax.generation.generator import Generator

RUN = ("--num_images=5", "--batch_size=2", "--policy=swa", "--budget=0.5", "--segments=1")
TIMES = {"time", "resumed"}


def arrays(path):
    """The bytes of each array of an npz file, which also holds the time when it was written."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("count", [0, 1, 5, 50])
@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("jobs", [1, 2, 3, 8])
def test_every_image_is_of_one_part(count, batch_size, jobs):
    parts = [Shard(i, jobs).images(count, batch_size) for i in range(jobs)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= max(1, batch_size)
    if -(-count // batch_size) >= jobs:  # program calls are those of one process
        assert all(part.start % batch_size == 0 for part in parts)


@pytest.mark.parametrize(
    "text", ["", "1", "2/2", "3/2", "-1/2", "0/0", "a/b", "0/2/3", "1/99999999"]
)
def test_no_such_part(text):
    with pytest.raises(UserError, match="part"):
        Shard.parse(text)


@pytest.mark.parametrize(
    ("flag", "message"), [("--shard=2/2", "is no part"), ("--shard=0/2", "with --out")]
)
def test_refused_before_anything_is_compiled(refused, checkpoint, flag, message):
    refused("run", message, checkpoint, *RUN, flag)


def test_killed_resumed_and_merged_is_one_run(call, checkpoint, tmp_path, monkeypatch):
    out, whole = tmp_path / "out", tmp_path / "whole"
    flags = (checkpoint, *RUN, "--compare", "--save_arrays", "--save_kept")
    start, drawn = Generator._start, []

    def counted(self, condition, index, given, **options):
        if len(drawn) == 1 and not killed:
            killed.append(1)
            raise KeyboardInterrupt
        drawn.append((self.policy.name, *index))
        return start(self, condition, index, given, **options)

    killed = []
    monkeypatch.setattr(Generator, "_start", counted)
    assert call("run", *flags, "--shard=1/2", f"--out={out}")[0] == 130
    status, _, err = call("merge", str(out))
    assert status == 2 and "lacks 1 of 2 parts: start the same command with --shard=0/2" in err
    for shard in ("0/2", "1/2"):
        assert call("run", *flags, f"--shard={shard}", f"--out={out}")[0] == 0
    expected = {(name, *index) for name in ("swa", "full") for index in ((0, 1), (2, 3), (4, 4))}
    assert sorted(drawn) == sorted(expected)  # each once
    again = call("run", *flags, "--shard=0/2", f"--out={out}")
    assert again[0] == 0 and "there already" in again[1] and len(drawn) == len(expected)
    assert call("merge", str(out))[0] == 0
    assert call("run", *flags, f"--out={whole}")[0] == 0
    for name in ("samples.npz", "arrays.npz", "kept.npz"):
        assert arrays(out / name) == arrays(whole / name)
    for name in ("grid.png", "compare.png"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    ours, theirs = report_of(out), report_of(whole)
    assert ours.keys() == theirs.keys() and ours["resumed"] and len(ours["time"]["runs"]) == 2
    assert {n: ours[n] for n in ours if n not in TIMES} == {
        n: theirs[n] for n in theirs if n not in TIMES
    }
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())
    status, _, err = call("run", *flags, "--shard=0/2", f"--out={out}")
    assert status == 2 and "finished results" in err


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder for what is made once."""
    return tmp_path_factory.mktemp("parts")


@pytest.fixture
def two(call, checkpoint, made, tmp_path):
    """A folder with both parts of a run, and a part of a run with another seed beside it."""
    if not (made / "out").exists():
        for shard, seed, out in (("0/2", 0, "out"), ("1/2", 0, "out"), ("1/2", 1, "other")):
            flags = (checkpoint, *RUN, f"--shard={shard}", f"--seed={seed}", f"--out={made / out}")
            assert call("run", *flags)[0] == 0
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


def remove(path):
    shutil.rmtree(path / "part-1-of-2")


def double(path):
    shutil.copytree(path / "part-1-of-2", path / "part-2-of-3")


def surplus(path):
    shutil.copytree(path / "part-1-of-2", path / "part-7-of-2")


def other_flags(path):
    remove(path)
    shutil.copytree(path.with_name("other") / "part-1-of-2", path / "part-1-of-2")


def flip(name):
    def edit(path):
        file = path / "part-1-of-2" / name
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    return edit


def unfinished(path):
    (path / "part-0-of-2" / "part.npz").unlink()


def settings(path):
    file = path / "part-0-of-2" / "settings.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 5'))


def batches_of_the_other(path):
    """Images of one part under the other's name."""
    one = path / "part-1-of-2"
    shutil.copy(path / "part-0-of-2" / "main-00000000.npz", one / "main-00000000.npz")
    (one / "main-00000002.npz").unlink()


def foreign(path):
    (path / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "lacks 1 of 2 parts"),
        (double, "another division"),
        (surplus, "is no part of a run"),
        (other_flags, "with other settings (seed 1, now 0)"),
        (flip("main-00000002.npz"), "lacks image 2"),
        (flip("part.npz"), "is damaged"),
        (unfinished, "is not finished"),
        (settings, "was edited"),
        (batches_of_the_other, "lacks image 2"),
        (foreign, "notes.txt"),
    ],
)
def test_parts_that_do_not_fit_are_refused(call, two, damage, message):
    damage(two)
    before = tree(two)
    status, _, err = call("merge", str(two))
    assert status == 2 and message in err and err.count("\n") == 1, err
    assert tree(two) == before and not (two / "report.json").exists()


def test_damaged_images_are_drawn_again(call, checkpoint, two):
    flip("main-00000002.npz")(two)
    assert call("run", checkpoint, *RUN, "--shard=1/2", f"--out={two}")[0] == 0
    assert call("merge", f"--out={two}")[0] == 0


def test_other_flags_and_other_divisions_are_refused_at_the_start(call, checkpoint, two):
    before = tree(two)
    remove(two)
    status, _, err = call("run", checkpoint, *RUN, "--shard=1/2", "--seed=1", f"--out={two}")
    assert status == 2 and "other settings (seed 0, now 1)" in err
    status, _, err = call("run", checkpoint, *RUN, "--shard=1/3", f"--out={two}")
    assert status == 2 and "another division than of 3" in err
    assert tree(two).keys() == {n for n in before if not n.startswith("part-1")}


@pytest.mark.slow
def test_sweep_in_parts_is_one_sweep(call, checkpoint, tmp_path):
    flags = (checkpoint, "--policies=swa,streaming:sinks=1", "--budgets=0.4,0.6", "--num_images=3")
    flags += ("--batch_size=2", "--samples=2", "--segments=1", "--save_kept")
    out, whole = tmp_path / "out", tmp_path / "whole"
    for shard in ("1/2", "0/2"):
        assert call("sweep", *flags, f"--shard={shard}", f"--out={out}")[0] == 0
    status, text, err = call("merge", str(out))
    assert status == 0 and text.count("streaming") == 2, err
    assert call("sweep", *flags, f"--out={whole}")[0] == 0
    assert arrays(out / "samples.npz") == arrays(whole / "samples.npz")
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())
    ours, theirs = (without_times(report_of(f, "sweep.json")) for f in (out, whole))
    assert ours == theirs


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "time"}
    return [without_times(item) for item in value] if isinstance(value, list) else value
