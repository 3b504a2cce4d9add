"""Named pipes, sockets, devices, folders and links where files are expected: refused at once, with
their names, and nothing that a link leads to is changed."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from experiments import batch_files, parts
from experiments.evaluation import pictures as evaluated
from experiments.prompts import layouts, sets
from experiments.report import sweep_files
from experiments.training import loop
from ported_weights.readers import legacy, sources
from ported_weights.readers.archive import Archive
from tests.conftest import ROOT
from varjax.core.errors import UserError
from varjax.storage import arrays, checksums, lock, manifest, npz, ordinary, pictures
from varjax.storage.atomic import new_file
from varjax.text import t5
from varjax.text.prompt_tokenizer import PromptTokenizer

# {what reads: (name of the file, how it is read from its path)}
READERS = {
    "ordinary": ("a", lambda path: ordinary.read_file(path, 9)),
    "json": ("a.json", manifest.read_json),
    "npz": ("a.npz", lambda path: npz.load(path, ["a"])),
    "digest": ("a.bin", checksums.record),
    "digest of a picture": ("a.png", evaluated.file_digest),
    "digest of a source": ("a.pth", sources.fingerprint),
    "checkpoint": ("_METADATA", lambda path: arrays.read_arrays(path.parent, {}, {}, "model.json")),
    "history": (loop.HISTORY, lambda path: _stage(path).keep_history(1)),
    "line of the history": (loop.HISTORY, lambda path: _stage(path).append_history({})),
    "part": (batch_files.SETTINGS_FILE, lambda path: parts.read_parts(path.parent.parent)),
    "unfinished run": (
        batch_files.SETTINGS_FILE,
        lambda path: batch_files.WorkFolder(path.parent, {}).check(False),
    ),
    "batch": ("a.npz", batch_files.read_batch),
    "settings of a batch": ("a.npz", batch_files.settings_of),
    "sweep": (sweep_files.REPORT, lambda path: sweep_files.read_sweep(path.parent)),
    "prompts": ("a.txt", sets._read),
    "manifest": (layouts.MANIFEST, lambda path: layouts.image_files(path.parent)),
    "weights": ("a.pth", sources.open_source),
    "zip": ("a.pth", Archive),
    "old weights": ("a.pth", legacy.LegacyTorchFile),
    "picture": ("a.png", lambda path: pictures.size(path, "picture")),
    "tokenizer": ("tokenizer.json", PromptTokenizer),
    "pieces": ("spiece.model", lambda path: t5.Tokenizer(path, 100)),
    "lock": (lock.NAME, lambda path: lock.held(path.parent, "busy").__enter__()),
}
GIVES_NOTHING = {"manifest": set()}  # as without a file


def _stage(path: Path) -> loop.StageFolder:
    stage = object.__new__(loop.StageFolder)
    stage.path = path.parent
    return stage


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link_to_pipe(path: Path) -> None:
    os.mkfifo("../../pipe")
    path.symlink_to("../../pipe")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.fixture(autouse=True)
def at_once():
    """A reader that waits for ever is ended by an error."""

    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", [_pipe, _link_to_pipe, _socket, _device, Path.mkdir])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_by_name(tmp_path, monkeypatch, reader, make):
    (folder := tmp_path / "out" / "part-0-of-1").mkdir(parents=True)
    monkeypatch.chdir(folder)  # paths of sockets are short
    name, read = READERS[reader]
    make(Path(name))
    if (reader, make) == ("checkpoint", Path.mkdir):  # it may hold folders, and this one no arrays
        return
    if reader in GIVES_NOTHING:
        assert read(Path(name).absolute()) == GIVES_NOTHING[reader]
        return
    with pytest.raises((OSError, UserError, batch_files.Damaged)) as caught:
        read(Path(name).absolute())
    assert name in str(caught.value), caught.value


def test_temporary_files_follow_no_link(tmp_path, monkeypatch):
    """Neither one at a name that could be guessed, nor one at the very name."""
    victim, made = tmp_path / "victim", tmp_path / "made"
    victim.write_text("precious")
    (tmp_path / f".made.{os.getpid()}").symlink_to(victim)
    with new_file(made) as file:
        file.write(b"new")
    assert made.read_text() == "new" and victim.read_text() == "precious"
    (there := tmp_path / ".made.7").symlink_to(victim)
    monkeypatch.setattr("varjax.storage.atomic._hidden", lambda target: there)
    with pytest.raises(FileExistsError) as caught, new_file(made):
        pass
    assert caught.value.filename == str(made) and there.is_symlink()
    assert victim.read_text() == "precious" and made.read_text() == "new"


def test_files_that_are_made_for_a_while_follow_no_link(tmp_path):
    victim, absent = tmp_path / "victim", tmp_path / "absent"
    victim.write_text("precious")
    for name, target in ((lock.NAME, absent), (loop.HISTORY, victim)):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(OSError, match=f"no ordinary file.*{name}"):
            ordinary.opened(tmp_path / name, "ab")
    assert victim.read_text() == "precious" and not absent.exists()


# Files of varjax itself, of the system, of a folder that the program has made: opened as they are.
OWN = {
    *("experiments/__main__.py", "experiments/recipes/recipe.py", "experiments/serve/page.py"),
    *("experiments/aot/buffers.py", "experiments/aot/worker.py"),
    *("experiments/run/files.py", "experiments/plan.py", "ported_weights/hub.py"),
    *("experiments/report/paper.py", "experiments/report/sweep_files.py"),
    *("varjax/generation/memory.py", "varjax/storage/atomic.py", "varjax/storage/ordinary.py"),
}
OPENS = re.compile(
    r"(?<!def )(?<![\w.])open\(|\.open\([\"']r|\.read_(text|bytes)\(|np\.(load|fromfile|memmap)\("
)


def test_one_function_opens_what_others_made():
    found = set()
    for folder in ("varjax", "experiments", "ported_weights"):
        for path in (ROOT / folder).rglob("*.py"):
            if OPENS.search(path.read_text(encoding="utf-8")):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == OWN, "open it with varjax.storage.ordinary"
