"""Edits: kept places hold the picture's tokens, nothing else changes, with every policy."""

import itertools

import jax
import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.often import often
from varjax.core.errors import UserError
from varjax.core.sequence import Schedule
from varjax.editing import masks
from varjax.editing.edit import ByText, Editor, both_texts, source_tokens
from varjax.editing.mixture import Mixture
from varjax.generation.generator import Generator
from varjax.text.features import TextFeatures

INFINITY = "infinity_a_small"
NAMES = ["c_k5_nol2norm", INFINITY, "llamagen_c2i"]
BUDGET = 0.6


def picture_of(model, seed=0):
    """A smooth picture that is none of the model's own."""
    rng, (height, width) = np.random.default_rng(seed), model.pixels
    rows, columns = np.linspace(0, 3, height)[:, None, None], np.linspace(0, 2, width)[:, None]
    return (0.5 + 0.5 * np.sin(rows + columns + 6 * rng.random(3))).astype(np.float32)


def end_of(model):
    """A mask that every family takes: the lower part."""
    drawn = np.zeros(model.pixels, bool)
    drawn[model.pixels[0] // 2 :] = True
    return drawn


def editor_of(model, policy="full", budget=1.0, batch_size=2):
    return Editor(
        Generator(model, policy, budget, batch_size=batch_size), progress=lambda done, total: None
    )


def in_mask(editor, drawn, count=2, paste=False, seed=3, **seam):
    model = editor.model
    condition = models.condition(model, range(count))
    pictures = masks.check_pictures(model, picture_of(model), count)
    drawn = masks.check_masks(model, drawn, count)
    return editor.in_masks(condition, pictures, drawn, seed=seed, paste=paste, **seam)


def reconstructed(model, picture):
    """The codec's own round trip, float32 [H, W, 3] in [0, 1]."""
    images, codec = jax.numpy.asarray(2 * picture[None] - 1), model.codec
    if model.transformer.token_name == "bits":
        tokens = source_tokens(model, picture[None])
        bits = jax.numpy.asarray(model.token_arrays.tokens_to_file(tokens))
        patch = model.config.patch
        maps = tuple((patch * h, patch * w) for h, w in model.config.schedule.maps)
        found = codec.decode(models.sums_of_bits(bits, Schedule(maps))[-1])
    elif model.draws_tokens:
        found = codec.tokens_to_images(codec.images_to_tokens(images), model.config.grid)
    else:
        found = codec.tokens_to_images(codec.images_to_tokens(images))
    return (np.asarray(found[0]) + 1) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", often(NAMES[:1], NAMES))
def test_all_part_and_nothing_of_the_picture(name):
    """All-kept: the codec's reconstruction. All-free: what `generate` draws. Between: kept places
    have the picture's tokens at every scale, and the others depend on the seed."""
    model = models.fixture_model(name)
    editor, count = editor_of(model), 2
    kept = in_mask(editor, np.zeros(model.pixels, bool))
    assert kept.kept.all()
    np.testing.assert_array_equal(kept.images, kept.reconstruction)
    np.testing.assert_array_equal(kept.tokens, kept.source_tokens)
    for image in kept.images:
        np.testing.assert_allclose(image, reconstructed(model, picture_of(model)), atol=5e-5)
    free = in_mask(editor, np.ones(model.pixels, bool))
    assert not free.kept.any()
    condition = models.condition(model, range(count))
    plain = Generator(model, "full", batch_size=2)
    ((_, drawn),) = plain.batches(condition, seed=3)
    np.testing.assert_array_equal(free.tokens, drawn["tokens"])
    np.testing.assert_array_equal(free.images, drawn["images"])
    part = in_mask(editor, end_of(model), paste=True)
    check_part(model, part)
    other = in_mask(editor, end_of(model), seed=4)
    assert (other.tokens != part.tokens).any()
    soft = in_mask(editor, end_of(model), paste=True, seed=4, feather=3)
    pictures, drawn = (np.stack([a(model)] * 2) for a in (picture_of, end_of))
    np.testing.assert_array_equal(soft.images, masks.paste(other.images, pictures, drawn, 3))


def check_part(model, part):
    """Kept tokens are the picture's, in every scale; pasted pixels are, too."""
    assert 0.2 < part.kept.mean() < 0.8
    np.testing.assert_array_equal(part.tokens[part.kept], part.source_tokens[part.kept])
    assert (part.tokens[~part.kept] != part.source_tokens[~part.kept]).any()
    if not model.draws_tokens:
        schedule = model.config.schedule
        for start, end, (h, w) in zip(schedule.starts, schedule.ends, schedule.maps, strict=True):
            few = h * w <= 3
            assert part.kept[:, start:end].all() == few, (h, w)
    upper = ~end_of(model)
    np.testing.assert_array_equal(part.images[:, upper], np.stack([picture_of(model)[upper]] * 2))
    assert (part.images[:, ~upper] != picture_of(model)[~upper]).any()


@pytest.mark.parametrize(
    ("name", "policy"),
    often([(NAMES[0], "headkv")], itertools.product(NAMES, ("streaming", "headkv", "h2o"))),
)
def test_with_a_compressed_cache(name, policy):
    model = models.fixture_model(name)
    generator = Generator(model, policy, BUDGET, batch_size=2)
    part = in_mask(Editor(generator, progress=lambda *counts: None), end_of(model), paste=True)
    check_part(model, part)


# --- by text --------------------------------------------------------------------------------------


def by_text(editor, how, *, source=(3, 4), count=2, seed=3):
    model = editor.model
    target, mine = models.condition(model, range(count)), models.condition(model, source)
    pictures = masks.check_pictures(model, picture_of(model), count)
    return editor.by_text(both_texts(target, mine), pictures, how, seed=seed)


@pytest.mark.slow
def test_by_text():
    model = models.fixture_model(INFINITY)
    editor, schedule = editor_of(model, batch_size=4), model.config.schedule
    scale, scales = schedule.scale_of_token, schedule.num_scales
    # p = 1 and the same text: Q is certain, so that mixed scales repeat the picture's bits
    same = by_text(editor, ByText(probability=1, keep_scales=1, mix_scales=4), source=(0, 1))
    mixed = scale < 4
    np.testing.assert_array_equal(same.tokens[:, mixed], same.source_tokens[:, mixed])
    assert (same.tokens[:, ~mixed] != same.source_tokens[:, ~mixed]).any()
    # other bits with another text, whose difference in chances decides
    some = by_text(editor, ByText(probability=0.6, keep_scales=2, mix_scales=4))
    kept = scale < 2
    np.testing.assert_array_equal(some.tokens[:, kept], some.source_tokens[:, kept])
    assert (some.tokens[:, mixed & ~kept] != some.source_tokens[:, mixed & ~kept]).any()
    # everything kept
    kept = by_text(editor, ByText(probability=0.5, keep_scales=scales, mix_scales=scales))
    np.testing.assert_array_equal(kept.images, kept.reconstruction)
    # an edit does not depend on how many there are: here the last batch is padded
    how = ByText(probability=0.6, keep_scales=2, mix_scales=4)
    one = by_text(editor, how, source=(3,), count=1)
    np.testing.assert_array_equal(one.tokens[0], some.tokens[0])


def test_the_mixture_is_the_formula():
    """Frequencies of mixed bits against clip(Q + target - source, 0, 1), in NumPy."""
    rng = np.random.default_rng(0)
    schedule = Schedule(((1, 1), (20, 20), (2, 2)))
    tokens = np.broadcast_to(rng.integers(0, 2, 5), (8, 405, 5)).astype(np.uint8)
    given = Mixture.of_scales(tokens, schedule, 1, 2, 0.75)
    target, source = rng.random(5), rng.random(5)
    chances = np.repeat([target, source], 4, axis=0)[:, None] + np.zeros((8, 400, 5))
    place, drawn = np.arange(1, 401), np.full((8, 400, 5), 1, np.uint8)
    keys = jax.random.split(jax.random.key(0), 8)
    args = (jax.numpy.asarray(drawn), jax.numpy.asarray(chances, np.float32), keys)
    found = np.asarray(given.settle(*args, jax.numpy.asarray(place), False))
    np.testing.assert_array_equal(found[:4], found[4:])
    assert (found[0] != found[1]).any()
    expected = np.clip(np.where(tokens[0, 0], 0.75, 0.25) + target - source, 0, 1)
    # 1,600 draws: five standard deviations
    np.testing.assert_allclose(found[:4].mean((0, 1)), expected, atol=5 * 0.5 / 40)
    greedy = np.asarray(given.settle(*args, jax.numpy.asarray(place), True))
    np.testing.assert_array_equal(greedy[0, 0], expected > 0.5)
    last = (jax.numpy.asarray(drawn[:, :4]), jax.numpy.asarray(chances[:, :4], np.float32), keys)
    free = np.asarray(given.settle(*last, jax.numpy.arange(401, 405), False))
    np.testing.assert_array_equal(free, 1)  # scales behind mix_scales stay as drawn


# --- the Python API -------------------------------------------------------------------------------


def test_python_api():
    model = models.fixture_model("c_k5_nol2norm")
    picture, drawn = (255 * picture_of(model)).astype(np.uint8), end_of(model)
    found = varjax.edit(model, picture, drawn, [1, 2], "streaming", BUDGET, seed=5, feather=2)
    assert found.images.shape == (2, *model.pixels, 3) and found.images.dtype == np.float32
    end = len(picture) // 2
    pictures = picture.astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(found.images[0, : end - 2], pictures[: end - 2])
    near = slice(end - 2, end)
    assert (found.images[0, near] != pictures[near]).any((1, 2)).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "either a mask"),
        ({"source": ["a"], "by_text": ByText(probability=0.5)}, "draws no bits"),
        ({"mask": "end", "labels": [99999]}, "outside the model's"),
        ({"mask": "end", "paste": 3}, "paste"),
        ({"mask": "end", "feather": 64.5}, "outside \\[0, 64\\]"),
        ({"mask": "end", "feather": float("nan")}, "feather=nan"),
        ({"mask": "end", "feather": 4, "paste": False}, "feather=4.* belongs to paste"),
        ({"mask": "end", "seed": -1}, "seed"),
        ({"mask": "end", "batch_size": 0}, "batch_size"),
    ],
)
def test_wrong_edits(more, message, monkeypatch):
    monkeypatch.setattr(Generator, "compile", lambda *a, **k: pytest.fail("compiled"))
    model = models.fixture_model("c_k5_nol2norm")
    given = {"labels": [1]} | more
    if given.get("mask") == "end":
        given["mask"] = end_of(model)
    with pytest.raises(UserError, match=message):
        varjax.edit(model, picture_of(model), **given)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "wrong",
    [
        {"probability": float("nan")},
        {"probability": 0.5, "keep_scales": -1},
        {"probability": 0.5, "keep_scales": 3, "mix_scales": 2},
        {"probability": 0.5, "mix_scales": 99},
    ],
)
def test_wrong_edits_by_text(wrong):
    with pytest.raises(UserError):
        ByText(**wrong).check(models.fixture_model(INFINITY))


def test_negative_texts_of_both():
    model = models.fixture_model(INFINITY)
    target = models.condition(model, [0, 1])
    negative = TextFeatures(
        kv=target.kv, lens=target.lens, negative_kv=target.kv[:8], negative_lens=np.array([8])
    )
    with pytest.raises(UserError, match="same negative"):
        both_texts(target, negative)
    joined = both_texts(negative, negative)
    assert len(joined.negative_lens) == 1 and len(joined.lens) == 2 * len(target.lens)
