"""Damaged folders of training runs and files of pictures: what was saved, or a `UserError`."""

import io
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.training import data, loop
from tests.properties import mutations
from tests.properties.test_checkpoints import FEWER
from varjax.core.errors import UserError


def _state(step: int) -> dict:
    return {"weights": jnp.full((8, 8), step / 3, jnp.float32), "step": jnp.asarray(step)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a stage with two checkpoints."""
    out = tmp_path_factory.mktemp("trained")
    with loop.StageFolder(out, "vqvae", {}) as folder:
        for step in (4, 8):
            folder.append_history({"step": step})
            folder.save(step, _state(step))
    return folder.path


@FEWER
@given(draw=st.data())
def test_checkpoints_of_training(tmp_path, trained, draw):
    out = mutations.emptied(tmp_path / "out")
    shutil.copytree(trained, out / "vqvae")
    place = draw.draw(st.sampled_from(["checkpoints/8", "checkpoints/4", "checkpoints", "."]))
    damage = draw.draw(mutations.damaged_folder(out / "vqvae" / place))
    try:
        with loop.StageFolder(out, "vqvae", {}) as folder:
            state, step = folder.restore(_state(0))
            folder.keep_history(step)
            assert folder.window(step) == []
            folder.save(step + 1, _state(step + 1))
            assert folder.restore(_state(0))[1] == step + 1
    except UserError:
        assert (out / "vqvae" / "checkpoints" / "4").exists()
        return
    except OSError as error:  # a folder in the place of a file of ours
        assert "folder" in damage, error
        return
    assert step in (4, 8) and float(state["weights"][0, 0]) == np.float32(step / 3)


# --- pictures -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed() -> list[bytes]:
    """Pictures as arrays, and as encoded files one after another."""
    from PIL import Image

    rng, found = np.random.default_rng(0), []
    images, labels = rng.integers(0, 256, (6, 4, 4, 3), np.uint8), np.arange(6) % 3
    encoded = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        encoded.append(np.frombuffer(file.getvalue(), np.uint8))
    offsets = np.cumsum([0, *map(len, encoded)])
    stored = {"data": np.concatenate(encoded), "offsets": offsets, "labels": labels}
    for arrays in ({"images": images, "labels": labels}, stored):
        file = io.BytesIO()
        np.savez(file, **arrays)
        found.append(file.getvalue())
    return found


@given(draw=st.data())
def test_files_of_pictures(tmp_path, packed, draw):
    path = tmp_path / "a.npz"
    path.write_bytes(draw.draw(mutations.damaged_zip(draw.draw(st.sampled_from(packed)))))
    try:
        found = data.load(path, image_size=4, val_fraction=0.3)
    except UserError:
        return
    assert found.train.shape[1:] == (4, 4, 3) and len(found.train) == len(found.train_labels)
    assert found.train_labels.min() >= 0


_DTYPES = ["u1", "i8", "u8", "f4", "?", "U3", "S2", "M8[s]", "c8", "f2"]
_SHAPES = [(), (0,), (6,), (7,), (6, 4, 4, 3), (6, 0, 4, 3), (0, 4, 4, 3), (6, 4, 4), (6, 2, 9, 3)]


@given(draw=st.data())
def test_arrays_that_are_no_pictures(tmp_path, draw):
    names = draw.draw(st.sampled_from(data.NPZ_ARRAYS))
    arrays = {
        name: np.ones(draw.draw(st.sampled_from(_SHAPES)), draw.draw(st.sampled_from(_DTYPES)))
        for name in names
    }
    np.savez(tmp_path / "a.npz", **arrays)
    try:
        data.load(tmp_path / "a.npz", image_size=4, val_fraction=0.3)
    except UserError as error:
        assert "a.npz" in str(error)
