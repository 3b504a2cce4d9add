"""Which tokens a mask keeps, against VAR's notebook rule written anew in NumPy."""

import jax
import numpy as np
import pytest

from tests import models_under_test as models
from varjax.core.errors import UserError
from varjax.editing import masks

VAR, TOKENS = "b_k6_sharedaln", "llamagen_c2i"


def bilinear(mask, height, width):
    """torch's `interpolate(mode="bilinear", align_corners=False)`, place by place."""
    found = np.empty((height, width))
    for i in range(height):
        for j in range(width):
            value, axes = 0.0, []
            for place, source, target in ((i, mask.shape[0], height), (j, mask.shape[1], width)):
                centre = min(max((place + 0.5) * source / target - 0.5, 0), source - 1)
                low = int(centre)
                high, part = min(low + 1, source - 1), centre - low
                axes.append(((low, 1 - part), (high, part)))
            for row, down in axes[0]:
                for column, across in axes[1]:
                    value += down * across * mask[row, column]
            found[i, j] = value
    return found


def oracle(drawn, maps):
    """The notebook's rule for one mask: True where the picture's token is kept."""
    parts = []
    for height, width in maps:
        keep = bilinear(1.0 - drawn, height, width) > 0.5 + 1e-9  # sums of 0.5 may round up
        parts.append(np.ones(height * width, bool) if height * width <= 3 else keep.reshape(-1))
    return np.concatenate(parts)


@pytest.mark.parametrize("name", [VAR, "infinity_a_small"])
def test_the_notebooks_rule(name):
    model, rng = models.fixture_model(name), np.random.default_rng(0)
    height, width = model.pixels
    drawn = np.zeros((6, height, width), bool)
    for mask in drawn[:4]:  # boxes, as the notebook has them
        (top, bottom), (left, right) = (np.sort(rng.integers(0, n, 2)) for n in (height, width))
        mask[top : bottom + 1, left : right + 1] = True
    drawn[4] = ~drawn[0]  # out-painting
    drawn[5] = rng.random((height, width)) < 0.5
    kept = masks.kept_tokens(model, drawn)
    expected = [oracle(mask, model.config.schedule.maps) for mask in drawn]
    np.testing.assert_array_equal(kept, np.stack(expected))
    assert 0 < kept.mean() < 1


def test_tokens_one_by_one_end_the_picture():
    model = models.fixture_model(TOKENS)
    (height, width), (rows, columns) = model.pixels, model.code_map[:2]
    drawn = np.zeros((1, height, width), bool)
    drawn[0, height // 2 :] = True
    kept = masks.kept_tokens(model, drawn)
    assert kept[0, : rows * columns // 2].all() and not kept[0, rows * columns // 2 :].any()
    with pytest.raises(UserError, match="the end of the picture"):
        masks.kept_tokens(model, ~drawn)


# --- the seam -------------------------------------------------------------------------------------


def distances(drawn):
    """Of every pixel from the nearest drawn one, by comparing it with all; infinite without any."""
    places = np.indices(drawn.shape).reshape(2, -1).T
    apart = np.linalg.norm(places[:, None] - places[drawn.reshape(-1)], axis=-1)
    return apart.min(1, initial=np.inf).reshape(drawn.shape)


@pytest.mark.parametrize("feather", [0.5, 1, 3.7, 8, 40])  # 40: wider than the picture
def test_weights_against_all_distances(feather):
    rng = np.random.default_rng(0)
    drawn = np.stack([rng.random((23, 31)) < share for share in (0, 0.002, 0.02, 0.5, 1)])
    drawn[1, 22, 0] = True
    found = masks.weights(drawn, feather)
    apart = np.stack([distances(mask) for mask in drawn])
    expected = np.where(apart <= feather, np.clip(1 - apart / (feather + 1), 0, 1), 0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)  # float32
    np.testing.assert_array_equal(found == 1, drawn)
    np.testing.assert_array_equal(found == 0, apart > feather)
    order = np.argsort(apart[1], axis=None)  # one after the other, farther and farther away
    assert (np.diff(found[1].reshape(-1)[order]) <= 0).all()


def test_a_soft_seam():
    """Only pixels near a mask are mixed; all others are those of the hard seam, bit for bit."""
    rng = np.random.default_rng(1)
    images, pictures = rng.random((2, 3, 20, 30, 3), np.float32)
    drawn = np.zeros((3, 20, 30), bool)
    drawn[0, 5:9, 4:12] = drawn[1, :, 20:] = True
    hard = np.where(drawn[..., None], images, pictures)
    for feather in ((), (0,), (0.0,)):
        np.testing.assert_array_equal(masks.paste(images, pictures, drawn, *feather), hard)
    images[2], images[0, 15] = np.nan, np.nan  # far away: not even looked at
    soft = masks.paste(images, pictures, drawn, 4)
    near = (masks.weights(drawn, 4) > 0) & ~drawn
    assert soft.dtype == np.float32 and near[:2].any((1, 2)).all() and not near[2].any()
    np.testing.assert_array_equal(soft[~near], hard[~near])
    share = masks.weights(drawn, 4)[near][:, None].astype(float)
    expected = share * images[near] + (1 - share) * pictures[near]
    np.testing.assert_allclose(soft[near], expected, atol=1e-6)
    white = np.ones_like(pictures)
    np.testing.assert_array_equal(masks.paste(white, white, drawn, 6.3), white)  # none above 1


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda h, w: np.zeros((h + 1, w), bool), "resize"),
        (lambda h, w: np.full((h, w), 128, np.uint8), "grey"),
        (lambda h, w: np.full((h, w), np.nan), "grey"),
        (lambda h, w: np.zeros((3, h, w), bool), "3 mask for 2"),
        (lambda h, w: np.zeros((h, w), complex), "type complex"),
        (lambda h, w: "white", "give an array"),
        (lambda h, w: [np.zeros((h, w)), np.zeros((h, w + 1))], "no regular array"),
        (lambda h, w: np.zeros((0, h, w)), "give an array"),
        (lambda h, w: np.array([[None] * w] * h), "give an array"),
        (lambda h, w: np.full((h, w), 256, np.int64), "holds 256, which is grey"),
    ],
)
def test_wrong_masks(wrong, message):
    model = models.fixture_model(VAR)
    with pytest.raises(UserError, match=message):
        masks.check_masks(model, wrong(*model.pixels), 2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda h, w: np.zeros((h, w + 1, 3), np.uint8), "resize"),
        (lambda h, w: np.zeros((h, w), np.uint8), "3"),
        (lambda h, w: np.full((h, w, 3), 2.0), "outside"),
        (lambda h, w: np.full((h, w, 3), np.inf), "outside"),
        (lambda h, w: np.zeros((h, w, 3), np.int64), "give uint8"),
        (lambda h, w: np.zeros((0, h, w, 3)), "give uint8"),
        (lambda h, w: [], "give uint8"),
        (lambda h, w: np.zeros((3, h, w, 3), np.uint8), "3 images for 2"),
    ],
)
def test_wrong_pictures(wrong, message):
    model = models.fixture_model(VAR)
    with pytest.raises(UserError, match=message):
        masks.check_pictures(model, wrong(*model.pixels), 2)


def test_pixels_and_levels_of_masks():
    model = models.fixture_model(VAR)
    drawn = np.zeros(model.pixels, bool)
    drawn[0] = True
    bfloat16 = jax.numpy.bfloat16
    kinds = (np.uint8, np.int16, np.int64, np.uint64, np.float16, np.float32, np.float64, bfloat16)
    numbers = [drawn.astype(kind) * kind(white) for kind in kinds for white in (1, 255)]
    for mask in (drawn, drawn.astype(np.int8), *numbers):
        found = masks.check_masks(model, mask, 2)
        assert found.dtype == bool
        np.testing.assert_array_equal(found, np.stack([drawn, drawn]))
    np.testing.assert_array_equal(masks.check_masks(model, drawn.tolist(), 1)[0], drawn)
    picture = np.full((*model.pixels, 3), 51, np.uint8)
    np.testing.assert_allclose(masks.check_pictures(model, picture, 1), 0.2)
