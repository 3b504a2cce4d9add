"""Files and folders that appear whole or not at all: errors name what the user typed."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from varjax.core.errors import UserError
from varjax.storage.atomic import check_new_file, check_new_folder, new_file, new_folder, write_text


def test_checking_a_place_leaves_nothing(tmp_path):
    assert check_new_file(tmp_path / "x", overwrite=False, flag="--save") == tmp_path / "x"
    check_new_folder(tmp_path / "new" / "folder")
    assert not list(tmp_path.iterdir())


def test_an_existing_file_needs_overwrite(tmp_path):
    path, link = tmp_path / "x", tmp_path / "link"
    path.write_text("precious")
    link.symlink_to(tmp_path / "nothing")
    for there in (path, link):
        with pytest.raises(UserError, match="exists already.*overwrite"):
            check_new_file(there, overwrite=False, flag="--save")
        check_new_file(there, overwrite=True, flag="--save")
    assert path.read_text() == "precious"


def test_the_empty_name_is_no_file():
    with pytest.raises(UserError, match="is no file: write its name, for example --save=FILE"):
        check_new_file(" ", overwrite=False, flag="--save")


def test_relative_names_are_named_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught, new_file("absent/x.bin"):
        pass
    assert caught.value.filename == "absent/x.bin" and caught.value.filename2 is None


def test_any_text_is_written(tmp_path):
    write_text(tmp_path / "x", "Löwe \ud800")
    assert (tmp_path / "x").read_text(encoding="utf-8") == "Löwe \\ud800"


def test_paths_that_leave_no_room(tmp_path):
    deep = tmp_path.joinpath(*["x" * 200] * 16)
    with pytest.raises(UserError, match="paths have at most 3072 bytes"):
        check_new_folder(deep)


def test_a_full_disk_is_reported_with_the_file(tmp_path):
    with pytest.raises(OSError) as caught, new_file(tmp_path / "x.bin"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "x.bin") and not list(tmp_path.iterdir())


def test_errors_about_other_files_stay_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, new_file(tmp_path / "x.bin"):
        open(tmp_path / "other")
    assert caught.value.filename == str(tmp_path / "other")


def test_errors_inside_an_unfinished_folder_name_the_folder(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError) as caught, new_folder(out) as folder:
        assert folder.name.startswith(".out.")
        open(folder / "absent" / "file", "wb")
    assert caught.value.filename == os.fspath(out) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_nothing_hidden_stays_when_the_process_is_terminated(tmp_path, kind):
    """And SIGTERM ends the process as usual before and afterwards."""
    program = f"""
import os, signal, sys
from varjax.storage.atomic import new_{kind}
with new_{kind}(sys.argv[1] + "/whole"):
    pass
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
with new_{kind}(sys.argv[1] + "/half"):
    os.kill(os.getpid(), signal.SIGTERM)
"""
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole"]
