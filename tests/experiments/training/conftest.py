"""Tiny pictures and settings for the training tests: coloured discs on white, four classes."""

import contextlib
import functools
import json
import pathlib

import numpy as np
import pytest

from experiments.training.settings import TrainingSettings
from experiments.training.stage import TrainingStage

COLOURS = np.array([[220, 40, 40], [40, 200, 60], [40, 60, 220], [230, 220, 60]], np.uint8)


class Killed(Exception):
    pass


@contextlib.contextmanager
def dies_at(kind: type[TrainingStage], step: int):
    """A run of the block dies when this step of a stage begins."""
    original = kind.step

    def dying(self, state, n):
        if n == step:
            raise Killed
        return original(self, state, n)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(kind, "step", dying)
        yield


def history(out: pathlib.Path, stage: str) -> list[dict]:
    """Log entries without timings."""
    lines = (out / stage / "history.jsonl").read_text().splitlines()
    return [json.loads(line) | {"images_per_second": None} for line in lines]


def _discs(count: int, side: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(COLOURS), count)
    rows, columns = np.mgrid[:side, :side]
    images = np.full((count, side, side, 3), 250, np.uint8)
    for image, label in zip(images, labels, strict=True):
        y, x, radius = rng.uniform([2, 2, 1.5], [side - 3, side - 3, 3])
        image[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] = COLOURS[label]
    return images, labels


@pytest.fixture
def discs():
    """Function (count, side=8, seed=0) -> (uint8 [count, side, side, 3], labels [count])."""
    return _discs


def _write_discs(folder: pathlib.Path) -> pathlib.Path:
    images, labels = _discs(64)
    path = folder / "discs.npz"
    np.savez(path, images=images, labels=labels)
    return path


@pytest.fixture
def pictures(tmp_path):
    """Path of an .npz of 64 discs."""
    return _write_discs(tmp_path)


@pytest.fixture
def tiny(pictures):
    """Function that makes settings of a model that trains in seconds, with changes."""
    return functools.partial(_settings, pictures)


@pytest.fixture(scope="module")
def shared_tiny(tmp_path_factory):
    """`tiny` for runs that several tests look at."""
    return functools.partial(_settings, _write_discs(tmp_path_factory.mktemp("pictures")))


def _settings(pictures: pathlib.Path, **changes) -> TrainingSettings:
    values = dict(
        data=str(pictures),
        sample_every=0,
        image_size=8,
        patch_nums=(1, 2, 4),
        vocab_size=32,
        z_channels=8,
        ch=8,
        norm_groups=4,
        ch_mult=(1, 2),
        num_res_blocks=1,
        vqvae_steps=40,
        vqvae_batch_size=8,
        vqvae_lr=3e-3,
        autoencoder_steps=12,
        reseed_every=4,
        depth=2,
        width=32,
        heads=2,
        var_steps=40,
        var_batch_size=8,
        var_lr=3e-3,
    )
    return TrainingSettings(**{**values, **changes})
