"""Scaling on paper: exchanges of a compiled program over more chips, against sums by hand."""

import json

import pytest

from experiments import scaling


def kernels(seconds, collective=0.0):
    return {"modelled_s": seconds, "collective_s": collective}


def exchange(kind, group, size):
    return {"kind": kind, "group": group, "bytes": size, "calls": 1, "sent_bytes": 0.0}


@pytest.fixture
def written(tmp_path):
    """written(flags, result): the file of a program for v5e."""

    def write(flags, result):
        found = {"target": "tpu-v5e", "status": "compiled", **result}
        content = {"title": "made up", "flags": {"train": False, **flags}, "results": [found]}
        path = tmp_path / "aot.json"
        path.write_text(json.dumps(content))
        return path

    return write


def step(**changes):
    gathered = [exchange("all-gather", 8, 8e9), exchange("all-reduce", 1, 1e9)]
    made = {"batch_size": 64, "devices": 8, "modelled": kernels(0.3, 0.1), "collectives": gathered}
    return made | changes


def test_a_step_over_more_chips(written, call):
    """Kernels 0.2 s. 8 GB are gathered at 80 GB/s: on n chips (n - 1) / n x 0.1 s. A chip has 8
    images. What is not exchanged (groups of one) costs nothing."""
    path = written({"train": True, "mesh": "fsdp=8"}, step())
    _, [program] = scaling.read(path)
    assert program.images == 8 and program.exchanging(1) == 0
    assert program.exchanging(2) == pytest.approx(0.05)
    assert program.exchanging(256) == pytest.approx(0.1 * 255 / 256)
    status, text, _ = call("scaling", str(path))
    assert status == 0 and text.startswith("made up\n\n8 images a chip")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == [f"| {2**i}" for i in range(9)]
    # 2 chips: 16 images in 0.25 s, or in 0.2 s where exchanges are hidden
    assert rows[3][1:] == ["200", "50", "64 to 80", "0.80 to 1.00 |"]


def test_drawing_over_more_chips(written):
    """Groups of four share a model, whatever the number of groups."""
    programs = {
        "codes": {
            "modelled": kernels(0.4, 0.1),
            "collectives": [exchange("all-reduce", 4, 4e9)],
        },
        "pixels": {"modelled": kernels(0.1), "collectives": []},
    }
    path = written({"mesh": "data=2,model=4"}, {"batch_size": 16, "programs": programs})
    _, [program] = scaling.read(path)
    assert list(program.counts(20)) == [4, 8, 16] and program.images == 2
    assert program.kernels == pytest.approx(0.4)
    # 2 x 3/4 x 4 GB at 80 GB/s
    assert program.exchanging(4) == program.exchanging(256) == pytest.approx(0.075)


@pytest.mark.parametrize(
    ("flags", "change", "message"),
    [
        ({"mesh": "data=2,fsdp=4"}, {}, "compile it with --mesh=fsdp=N"),
        ({"mesh": "fsdp=8"}, {"target": "a6000"}, "the rate of its links is not known"),
        ({"mesh": "fsdp=8"}, {"modelled": kernels(None)}, "the model has no seconds"),
        ({"mesh": "fsdp=8"}, {"status": "failed"}, "holds no program that was compiled"),
        ({}, {}, "was not written by experiments.aot of this version"),
    ],
)
def test_files_that_say_nothing(written, call, flags, change, message):
    path = written({"train": True, **flags}, step(**change))
    status, text, err = call("scaling", str(path))
    assert status == 2 and message in err and err.count("error:") == 1 and not text
    status, _, err = call("scaling", str(path.with_name("none")))
    assert status == 2 and err.count("error:") == 1


def test_too_few_chips(written, call):
    programs = {"codes": {"modelled": kernels(0.4), "collectives": []}}
    path = written({"mesh": "data=1,model=4"}, {"batch_size": 4, "programs": programs})
    status, _, err = call("scaling", str(path), "--chips=2")
    assert status == 2 and "4 chips share the model" in err
