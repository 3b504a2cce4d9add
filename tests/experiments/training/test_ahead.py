"""Pictures that stay in their files: the same pictures, batches and losses as in memory, from any
step on and for any number of processes."""

import sys

import numpy as np
import pytest
from PIL import Image

from experiments.training import data, session
from experiments.training.decoding import Ahead, InFiles
from experiments.training.stage import pictures_of_step
from experiments.training.vqvae_trainer import VQVAEStage
from tests.experiments.training.conftest import _discs, dies_at, history
from varjax.core.errors import UserError
from varjax.storage.values import MissingExtra

SHORT = {"log_every": 2, "checkpoint_every": 4, "validate_every": 8, "var_steps": 4}
SHORT |= {"vqvae_steps": 12, "autoencoder_steps": 0, "shifts": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of class folders with 40 pictures, of two sizes."""
    folder = tmp_path_factory.mktemp("folder")
    images, labels = _discs(40, side=10)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / f"class {label}").mkdir(exist_ok=True)
        cut = image[1:9, 1:9] if i % 2 else image
        Image.fromarray(cut).save(folder / f"class {label}" / f"{i}.png")
    return folder


@pytest.fixture
def grain():
    return pytest.importorskip("grain", reason="pictures in files need grain")


def _load(folder, loader, **options):
    return data.load(folder, 8, 0.25, loader=loader, **options)


def test_they_are_the_pictures_of_memory(folder, grain):
    """With their labels, copies and what is held out."""
    here, there = (
        data.with_shifts(_load(folder, loader), 3, seed=5) for loader in ("memory", "grain")
    )
    assert isinstance(there.train, InFiles) and there.train.shape == here.train.shape == (
        (120, 8, 8, 3)
    )
    assert np.array_equal(there.train[np.arange(120)], here.train)
    for name in ("train_labels", "val", "val_labels"):
        assert np.array_equal(getattr(there, name), getattr(here, name)), name
    assert there.class_names == here.class_names and there.digest() == here.digest()
    assert len(_load(folder, "grain", max_validation=3).val) == 3


def test_what_auto_takes(folder, grain, monkeypatch):
    """Memory, until pictures and their copies would fill too much of it."""
    assert isinstance(_load(folder, "auto").train, np.ndarray)
    assert data._fill(1000, 8, 0) is False
    whole = data.os.sysconf("SC_PHYS_PAGES") * data.os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(data, "MEMORY", 30 * 8 * 8 * 3 / whole)
    assert isinstance(_load(folder, "auto").train, np.ndarray)
    assert isinstance(_load(folder, "auto", copies=1).train, InFiles)


def test_batches_from_any_step_on(folder, grain):
    pictures = data.with_shifts(_load(folder, "grain"), 1, seed=0).train

    def rows_of(step):
        return pictures_of_step(len(pictures), 7, 3, step)

    for order in (range(12), [5, 6, 7], [2, 9, 10, 0, 11]):
        reader = Ahead(pictures, rows_of)
        for step in order:
            assert np.array_equal(reader.batch(step), pictures[rows_of(step)]), (order, step)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_a_batch(folder, grain, processes):
    """Each decodes its part, and together they have what one has."""
    pictures = _load(folder, "grain").train

    def rows_of(step):
        return pictures_of_step(len(pictures), 8, 3, step)

    parts = np.split(np.arange(8), processes)
    batches = [Ahead(pictures, rows_of, own).batch(2) for own in parts]
    assert np.array_equal(np.sum(batches, axis=0), pictures[rows_of(2)])
    others = np.delete(batches[0], parts[0], axis=0)
    assert not others.any()


@pytest.mark.slow
def test_losses_are_those_of_memory(folder, grain, tiny, tmp_path, monkeypatch):
    """Also of a run that is killed in the middle."""
    settings = tiny(**SHORT, data=str(folder), val_fraction=0.25, image_size=4, ch_mult=(1,))
    session.train(settings, "both", tmp_path / "memory", quiet=True)
    monkeypatch.setattr(data, "MEMORY", 0)  # from here on `auto` is grain
    batch, read = Ahead.batch, []
    monkeypatch.setattr(Ahead, "batch", lambda *given: read.append(1) or batch(*given))
    with dies_at(VQVAEStage, 7):
        session.train(settings, "both", tmp_path / "files", quiet=True)
    session.train(settings, "both", tmp_path / "files", quiet=True)
    assert len(read) > 12
    for stage in ("vqvae", "var"):
        assert history(tmp_path / "files", stage) == history(tmp_path / "memory", stage)
    with np.load(tmp_path / "files" / "var" / "tokens.npz") as found:
        with np.load(tmp_path / "memory" / "var" / "tokens.npz") as expected:
            assert found["train"].shape == (2, 90, 21)
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_damaged_picture_is_named(folder, grain, tmp_path):
    (tmp_path / "a").mkdir()
    for file in sorted(folder.rglob("*.png"))[:8]:
        (tmp_path / "a" / file.name).write_bytes(file.read_bytes())
    damaged = tmp_path / "a" / _load(tmp_path, "grain").train.names[2].rpartition("/")[2]
    damaged.write_bytes(damaged.read_bytes()[:30])
    reader = Ahead(_load(tmp_path, "grain").train, lambda step: np.arange(3))
    with pytest.raises(UserError, match=f"{damaged} is no picture, damaged or cut short"):
        reader.batch(0)


def test_arrays_are_no_folder(pictures, grain):
    with pytest.raises(UserError, match="loader=grain reads folders of pictures, .* is .npz"):
        data.load(pictures, 8, loader="grain")
    with pytest.raises(UserError, match="unknown loader 'disk': choose one of auto, memory, grain"):
        data.load(pictures, 8, loader="disk")


def test_without_grain(folder, monkeypatch):
    """It is said before a picture is read, by `auto`, too."""
    monkeypatch.setitem(sys.modules, "grain", None)  # as if it were not installed
    for loader, memory in (("grain", 0.5), ("auto", 0.0)):
        monkeypatch.setattr(data, "MEMORY", memory)
        with pytest.raises(MissingExtra, match=r"pip install -e '\.\[train\]'"):
            _load(folder, loader)
