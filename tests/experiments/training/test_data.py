"""Readers of pictures: every layout, and what is said about bad data."""

import io
import json

import chex
import numpy as np
import pytest
from PIL import Image

from experiments.evaluation.pictures import PictureFolder
from experiments.training import data
from experiments.training import stage as data_order
from varjax.core.errors import UserError


def _encoded(images, form="PNG") -> tuple[np.ndarray, np.ndarray]:
    """Pictures as files one after another, and where each begins."""
    files = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, form)
        files.append(buffer.getvalue())
    offsets = np.cumsum([0, *map(len, files)])
    return np.frombuffer(b"".join(files), np.uint8), offsets


@pytest.mark.parametrize("keys", [("images", "labels"), ("arr_0", "arr_1")])
def test_arrays(tmp_path, discs, keys):
    images, labels = discs(20)
    np.savez(tmp_path / "x.npz", **dict(zip(keys, (images, labels), strict=True)))
    splits = data.load(tmp_path / "x.npz", 8, val_fraction=0.25)
    assert (len(splits.train), len(splits.val), splits.num_classes) == (15, 5, 4)
    assert data.count(tmp_path / "x.npz") == 20 and data.count(tmp_path / "x.npz", 7) == 7
    both = np.concatenate([splits.train, splits.val])
    assert sorted(x.tobytes() for x in both) == sorted(x.tobytes() for x in images)
    chex.assert_type(splits.train, np.uint8)
    chex.assert_type(splits.train_labels, np.int32)


def test_packed_files(tmp_path, discs):
    for name, count in (("train", 9), ("val", 3)):
        images, labels = discs(count, seed=count)
        packed, offsets = _encoded(images)
        np.savez(tmp_path / f"{name}.npz", data=packed, offsets=offsets, labels=labels)
    (tmp_path / "classes.json").write_text(json.dumps({"classes": list("abcde")}))
    splits = data.load(tmp_path, 8)
    chex.assert_trees_all_equal(splits.train, discs(9, seed=9)[0])
    chex.assert_trees_all_equal(splits.val_labels, discs(3, seed=3)[1])
    assert splits.class_names == tuple("abcde") and splits.num_classes == 5
    assert len(data.load(tmp_path, 8, max_images=4).train) == 4 == data.count(tmp_path, 4)


def test_class_folders(tmp_path):
    """Classes in alphabetical order; pictures of any size become centred squares."""
    for label, name in enumerate(("apple", "pear")):
        (tmp_path / name).mkdir()
        for i in range(6):
            picture = np.full((20, 30, 3), 0, np.uint8)
            picture[:, 5:25] = 100 * label + i  # the centred square; the rest is cropped away
            Image.fromarray(picture).save(tmp_path / name / f"{i}.png")
    splits = data.load(tmp_path, 8, val_fraction=0.25)
    assert splits.class_names == ("apple", "pear")
    chex.assert_shape(splits.train, (9, 8, 8, 3))
    assert data.count(tmp_path) == 12
    chex.assert_trees_all_equal(splits.train[:, 0, 0, 0] // 100, splits.train_labels)
    assert (np.ptp(splits.train, axis=(1, 2, 3)) == 0).all()


def test_what_is_hidden_is_no_picture(tmp_path):
    """Neither of training nor of evaluation: forks of macOS, checkpoints of notebooks."""
    names = [f"{name}/{i}.png" for name in "ab" for i in range(4)]
    hidden = ["a/._0.png", "a/.ipynb_checkpoints/0.png", ".ipynb_checkpoints/x.png", "a/.DS_Store"]
    hidden += ["__MACOSX/a/0.png", "b/__MACOSX/._0.png", "b/__MACOSX/0.png", "b/Thumbs.db"]
    for name in names + hidden:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"nonsense")
        if name in names:
            Image.fromarray(IMAGES[0]).save(tmp_path / name)
    found = data.load(tmp_path, 8)
    assert len(found.train) + len(found.val) == 8 and found.class_names == ("a", "b")
    assert PictureFolder(tmp_path).files == names


IMAGES = np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), np.uint8)
LABELS = np.arange(4)
BAD = {
    "keys": ({"x": IMAGES}, "holds x: it must hold data, offsets and labels, or images"),
    "shape": ({"images": IMAGES[..., 0], "labels": LABELS}, r"uint8 \[N, height, width, 3\]"),
    "count": ({"images": IMAGES, "labels": LABELS[:3]}, "4 pictures but 3 labels"),
    "negative": ({"images": IMAGES, "labels": LABELS - 9}, "labels are -9 to -6"),
    "empty": ({"images": IMAGES[:0], "labels": LABELS[:0]}, "0 pictures but 0 labels"),
    "offsets": (
        {"data": IMAGES.ravel(), "offsets": np.array([0, 10, 5]), "labels": LABELS[:2]},
        "offsets do not cut data",
    ),
    "files": (
        {"data": IMAGES.ravel(), "offsets": np.array([0, 10, 20]), "labels": LABELS[:2]},
        "picture 0 is no picture",
    ),
    "pickle": ({"images": np.array([{}]), "labels": LABELS}, "cannot read .* plain arrays"),
}


@pytest.mark.parametrize(("arrays", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arrays(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=message):
        data.load(tmp_path / "x.npz", 8)


def test_bad_files(tmp_path):
    with pytest.raises(UserError, match="there is no file or folder"):
        data.load(tmp_path / "missing", 8)
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(UserError, match="cannot read"):
        data.load(tmp_path / "x.npz", 8)
    (tmp_path / "folder" / "apple").mkdir(parents=True)
    with pytest.raises(UserError, match="neither train.npz nor class folders"):
        data.load(tmp_path / "folder", 8)
    (tmp_path / "folder" / "pear").mkdir()
    (tmp_path / "folder" / "pear" / "a.png").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="no pictures in class folder apple"):
        data.load(tmp_path / "folder", 8)
    (tmp_path / "folder" / "apple" / "b.png").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"b\.png is no picture, damaged or cut"):
        data.load(tmp_path / "folder", 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"classes": [1]}', "must hold a list of texts"),
        ("[", "JSON"),
        ('{"classes": ["a"]}', "has no name"),
    ],
)
def test_bad_class_names(tmp_path, text, message):
    np.savez(tmp_path / "train.npz", images=IMAGES, labels=LABELS)
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(UserError, match=message):
        data.load(tmp_path, 8)


def test_batches():
    """Every picture once per epoch, in a new order each time; steps do not depend on others."""
    steps = [data_order.pictures_of_step(10, 4, seed=3, step=n) for n in range(5)]
    first, second = np.concatenate(steps).reshape(2, 10)
    assert sorted(first) == sorted(second) == list(range(10)) and first.tolist() != second.tolist()
    chex.assert_trees_all_equal(data_order.pictures_of_step(10, 4, seed=3, step=3), steps[3])


def test_shifted_copies():
    """Each copy is the picture moved by a distance of its own, its edges repeated."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (3, 9, 9, 3), np.uint8), np.arange(3, dtype=np.int32)
    held = images[:1] // 2
    pictures = data.Dataset(images, labels, held, labels[:1], 3)
    found = data.with_shifts(pictures, 24, seed=1)
    chex.assert_trees_all_equal(found.train[:3], images)
    chex.assert_trees_all_equal(found.train_labels, np.tile(labels, 25))
    chex.assert_trees_all_equal(found.val, held)
    for i, image in enumerate(images):
        edged = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="edge")
        moved = {edged[y : y + 9, x : x + 9].tobytes() for y in range(5) for x in range(5)}
        assert {copy.tobytes() for copy in found.train[i::3]} == moved
    assert data.with_shifts(pictures, 0, seed=1) is pictures
