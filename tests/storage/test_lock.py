"""One process at a time in a folder."""

import subprocess
import sys

import pytest

from varjax.core.errors import UserError
from varjax.storage import lock

HOLD = """
import sys
from varjax.storage.lock import held
with held(sys.argv[1], "taken"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_refused(tmp_path):
    folder = tmp_path / "new" / "run"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match="in use"), lock.held(folder, "in use"):
        pass
    other.kill()  # releases it
    other.communicate()
    with lock.held(folder, "in use"):
        (folder / "result").write_text("")
    assert [path.name for path in folder.iterdir()] == ["result"]


def test_a_folder_made_for_nothing_vanishes(tmp_path):
    with pytest.raises(KeyboardInterrupt), lock.held(tmp_path / "a" / "b", ""):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with lock.held(tmp_path / "mine", ""):
        pass
    assert (tmp_path / "mine").is_dir()
