"""Grids, PNG and npz files, and that a failed write leaves nothing behind."""

import sys

import chex
import numpy as np
import pytest
from PIL import Image

from experiments.images import CAPTION_HEIGHT, GAP, grid, save_grid, save_samples_npz
from varjax.storage.values import MissingExtra


def some_images(count=5, height=6, width=4):
    values = np.random.default_rng(0).integers(0, 250, size=(count, height, width, 3))
    return values.astype(np.uint8)


@pytest.mark.parametrize("count, shape", [(5, (2, 3)), (4, (2, 2)), (1, (1, 1)), (2, (1, 2))])
def test_grid_puts_every_image_in_its_place(count, shape):
    images = some_images(count)
    rows, columns_used = shape
    picture = grid(images)
    chex.assert_shape(picture, (rows * (6 + GAP) - GAP, columns_used * (4 + GAP) - GAP, 3))
    remaining = picture.copy()
    for i, image in enumerate(images):
        top, left = i // columns_used * (6 + GAP), i % columns_used * (4 + GAP)
        assert (picture[top : top + 6, left : left + 4] == image).all()
        remaining[top : top + 6, left : left + 4] = 255
    assert (remaining == 255).all()


def test_captions_go_under_the_images(tmp_path):
    images = some_images(count=2, height=32, width=32)
    save_grid(tmp_path / "grid.png", images, labels=["fig", "a name far too long 梨"])
    with Image.open(tmp_path / "grid.png") as opened:
        picture = np.asarray(opened)
    chex.assert_shape(picture, (32 + CAPTION_HEIGHT, 64 + GAP, 3))
    assert (picture[:32, :32] == images[0]).all()
    strip = picture[32:]
    assert (strip[:, :32] < 128).any() and (strip[:, 32 + GAP :] < 128).any()
    assert (strip[:, 32 : 32 + GAP] == 255).all()


def test_samples_have_the_layout_of_the_evaluator(tmp_path):
    images = some_images()
    save_samples_npz(tmp_path / "samples.npz", images, [3, 7, 7, 0, 1])
    with np.load(tmp_path / "samples.npz", allow_pickle=False) as data:
        assert sorted(data) == ["arr_0", "arr_1"]
        chex.assert_type(data["arr_0"], np.uint8)
        assert (data["arr_0"] == images).all()
        chex.assert_type(data["arr_1"], np.int64)
        assert data["arr_1"].tolist() == [3, 7, 7, 0, 1]


def test_missing_pillow_names_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtra, match=r"needs the package PIL.*pip install -e '.\[eval\]'"):
        save_grid(tmp_path / "grid.png", some_images())
