"""`experiments.evaluate --features=demo`; packed pictures, as `experiments.train` takes them."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from experiments.evaluate import inputs
from experiments.evaluation import extractors
from experiments.evaluation.extractors import CompiledNetwork
from experiments.evaluation.pictures import PackedPictures
from experiments.evaluation.statistics import Gaussian, frechet
from varjax.core.errors import UserError


@pytest.mark.slow
def test_features_of_the_demos_classifier(call, tmp_path):
    """Against the definitions, computed here; packed pictures as reference; never called FID."""
    rng = np.random.default_rng(0)
    for name, count in (("samples", 140), ("reference", 150)):
        images = rng.integers(0, 256, (count, 64, 64, 3), np.uint8)
        labels = rng.integers(0, 44, count)
        save_packed(tmp_path / f"{name}.npz", images, labels)
    files = [f"--{name}={tmp_path / name}.npz" for name in ("samples", "reference")]
    out = tmp_path / "out"
    status, text, err = call("evaluate", *files, "--features=demo", f"--out={out}")
    assert status == 0 and "fid" not in text and "class_agreement  " in text, err
    found, network = (
        json.loads((out / "metrics.json").read_text(encoding="utf-8")),
        extractors.open_classifier(),
    )
    gaussians = []
    for name in ("samples", "reference"):
        pictures = inputs.open_set(f"--{name}", str(tmp_path / f"{name}.npz"))
        run = CompiledNetwork(network, (64, 64), 32)
        spans = ((i, min(i + 32, pictures.pictures.count)) for i in range(0, 150, 32))
        parts = list(run.over((pictures.pictures.read(*span),) for span in spans))
        pool = np.concatenate([part["pool"] for part in parts]).astype(np.float64)
        gaussians.append(Gaussian(pool.mean(0), np.cov(pool.T)))
        guessed = np.concatenate([part["logits"] for part in parts]).argmax(1)
        key = "class_agreement" + "_reference" * (name == "reference")
        assert found[key] == (guessed == pictures.labels).mean()
    assert found["demo_frechet"] == pytest.approx(frechet(*gaussians), 1e-3) and "fid" not in found
    said = found["recipe"]
    assert said["protocol"]["name"] == "demo" and "no FID" in said["protocol"]["source"]
    assert said["extractor"] == {"name": "classifier of 44 classes", **said["extractor"]}
    assert said["reference"]["kind"] == "npz file of packed pictures" and not found["remarks"]
    np.savez(tmp_path / "few.npz", arr_0=np.zeros((4, 64, 64, 3), np.uint8))
    given = (f"--samples={tmp_path / 'few.npz'}", files[1], "--features=demo")
    status, _, err = call("evaluate", *given, f"--out={tmp_path / 'few'}")
    assert status == 0 and "class_agreement left out: the classes asked for" in err
    assert "4 pictures are not more than the 128 features" in err
    save_packed(tmp_path / "few.npz", np.zeros((4, 64, 64, 3), np.uint8), np.array([0, 1, 2, 44]))
    status, _, err = call("evaluate", *given, f"--out={tmp_path / 'more'}")
    assert status == 2 and "labels 0 to 44: the classifier knows 0 to 43" in err


def save_packed(path, images, labels):
    """As `experiments.train` takes them."""
    files = [io.BytesIO() for _ in images]
    for file, image in zip(files, images, strict=True):
        Image.fromarray(image).save(file, "webp", lossless=True, method=0, quality=0)  # packs fast
    offsets = np.cumsum([0, *(len(file.getvalue()) for file in files)])
    data = np.frombuffer(b"".join(file.getvalue() for file in files), np.uint8)
    np.savez(path, data=data, offsets=offsets, labels=labels.astype(np.uint8))


def test_packed_pictures_are_read_back(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (5, 12, 16, 3), np.uint8)
    save_packed(tmp_path / "a.npz", images, np.arange(5))
    found = PackedPictures(tmp_path / "a.npz")
    assert (found.count, found.size, list(found.keys)) == (5, (12, 16), [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(found.read(1, 4), images[1:4])
    assert found.labels.tolist() == [0, 1, 2, 3, 4]


def test_wrong_packed_pictures(tmp_path):
    path = tmp_path / "a.npz"
    save_packed(path, np.zeros((3, 12, 16, 3), np.uint8), np.arange(3))
    with np.load(path) as held:
        sound = dict(held)
    ends = sound["offsets"]
    for changes, problem in (
        ({"offsets": ends[:-1]}, "do not cut `data` into 3 pictures"),
        ({"offsets": ends[::-1]}, "do not cut `data`"),
        ({"offsets": ends + 1}, "do not cut `data`"),
        ({"offsets": ends.astype(float)}, "`offsets` is missing, or no list of whole numbers"),
        ({"labels": np.zeros((3, 2), int)}, "`labels` is missing, or no list of whole numbers"),
        ({"data": sound["data"].astype(np.int32)}, "do not cut `data`"),
        ({"data": np.roll(sound["data"], 7)}, "picture 0 is no picture, damaged or cut short"),
    ):
        np.savez(path, **(sound | changes))
        with pytest.raises(UserError, match=problem):
            PackedPictures(path)
    first, second = (np.full((1, side, 16, 3), 9, np.uint8) for side in (12, 13))
    parts = []
    for image in (first, second):
        save_packed(path, image, np.zeros(1))
        with np.load(path) as held:
            parts.append(held["data"])
    ends = np.cumsum([0, *map(len, parts)])
    np.savez(path, data=np.concatenate(parts), offsets=ends, labels=np.zeros(2, int))
    with pytest.raises(UserError, match="picture 1 has 13x16 pixels, .*picture 0 has 12x16"):
        PackedPictures(path)
