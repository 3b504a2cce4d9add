"""Orbax on a full disk: an error of the system that names the folder."""

import errno

import numpy as np
import orbax.checkpoint
import pytest

from tests.often import often
from tests.properties.limits import run_limited
from varjax.storage import arrays

# A limit on the size of a file fails as a full disk does, in the threads of Orbax.
WRITE = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from varjax.storage import arrays
from varjax.storage.atomic import new_folder
from experiments.training.loop import StageFolder

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
draw = np.random.default_rng(0).standard_normal
values = {f"a/b{i}": draw((100, 100)).astype("f4") for i in range(5)}
many = {f"a/b{i}": draw(500_000).astype("f4") for i in range(12)}
many["b"] = draw(5_000_000).astype("f4")
out = Path(sys.argv[1])

def attempt(write, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write()
    except OSError as error:
        print(error.errno, error.filename)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

def checkpoint(values=values):
    with new_folder(out / "model") as folder:
        arrays.write_arrays(folder / "params", values)

for limit in (10, 1000, 20_000):
    attempt(checkpoint, limit)
for limit in (10, 1000, 20_000, 3_000_000):
    attempt(lambda: checkpoint(many), limit)
with StageFolder(out, "var", {}) as folder:
    folder.save(1, values)
    attempt(lambda: folder.save(2, {n: -x for n, x in values.items()}), 20_000)
with StageFolder(out, "var", {}) as folder:
    found, step = folder.restore(values)
    print(step, all((found[n] == x).all() for n, x in values.items()))
"""


@pytest.mark.slow
def test_a_full_disk_is_one_error(tmp_path):
    ended = run_limited("-c", WRITE, str(tmp_path))
    assert ended.status == 0, ended.stderr[-3000:]
    *failed, resumed = ended.stdout.splitlines()
    places = [tmp_path / "model"] * 7 + [tmp_path / "var" / "checkpoints" / "2"]
    assert failed == [f"{errno.EFBIG} {place}" for place in places] and resumed == "1 True"
    assert [path.name for path in tmp_path.iterdir()] == ["var"]
    assert [path.name for path in (tmp_path / "var" / "checkpoints").iterdir()] == ["1"]


def test_small_arrays_share_files(tmp_path):
    """Written one after the other they took a file each, and twice their bytes."""
    draw = np.random.default_rng(0).standard_normal
    values = {f"a/b{i}": draw(1000).astype("f4") for i in range(200)}
    values["large"] = draw(arrays.TOGETHER_BYTES // 4).astype("f4")
    arrays.write_arrays(tmp_path / "params", values)
    files = [path for path in (tmp_path / "params").rglob("*") if path.is_file()]
    assert len(files) < 40, len(files)
    assert sum(path.stat().st_size for path in files) < 1.1 * sum(v.nbytes for v in values.values())
    found = arrays.read_arrays(tmp_path / "params", values, dict.fromkeys(values), "model.json")
    assert all((np.asarray(found[name]) == value).all() for name, value in values.items())


@pytest.mark.parametrize("kind", often([ValueError], [OSError, ValueError, RuntimeError]))
def test_errors_of_writing(tmp_path, monkeypatch, kind):
    """Whatever class it has: the number of the system is in its text. Others are not hidden."""
    text = "RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']"
    for said, raised in ((text, OSError), ("shapes differ", kind)):

        def fail(self, folder, tree, save_args, said=said):
            raise kind(said)

        monkeypatch.setattr(orbax.checkpoint.Checkpointer, "save", fail)
        with pytest.raises(raised) as caught:
            arrays.write_arrays(tmp_path / "params", {"a": np.zeros(2)})
        assert raised is kind or caught.value.errno == errno.ENOSPC
        assert not list(tmp_path.iterdir())
