"""Statistics of features against exact values in float64."""

import dataclasses

import numpy as np
import pytest

from experiments.evaluation import statistics
from experiments.evaluation.statistics import (
    Gaussian,
    Moments,
    frechet,
    inception_scores,
    precision_recall,
    squared_radii,
)
from tests.experiments.evaluation import recipe
from varjax.core.errors import UserError

FID = recipe.expected()["fid"]
SCORES = recipe.expected()["inception_score"]
NEIGHBOURS = recipe.expected()["precision_recall"]


def gaussian(features: np.ndarray, rows: int = 37) -> Gaussian:
    moments = Moments(features.shape[1])
    for start in range(0, len(features), rows):
        moments.add(features[start : start + rows])
    return moments.gaussian()


@pytest.mark.parametrize("case", FID)
def test_frechet_distance(case):
    """Singular covariances, few samples, dead channels, large offsets; also of statistics whose
    origin is not known, as those of files."""
    rows = 37
    if "recipe" in FID[case]:
        features, rows = recipe.features_of(FID[case]), 1000
    else:
        features = [recipe.arrays("fid")[f"{case}.{i}"] for i in (1, 2)]
    exact = FID[case]["exact"]
    tolerance = 1e-9 * (exact["trace_1"] + exact["trace_2"])
    first, second = (gaussian(array, rows) for array in features)
    assert abs(frechet(first, second) - exact["fid"]) < tolerance
    if len(first.mean) < 100:
        first, second = (dataclasses.replace(g, count=None) for g in (first, second))
        assert abs(frechet(first, second) - exact["fid"]) < tolerance


def test_moments_are_those_of_all_rows():
    x = np.random.default_rng(0).normal(1e4, 1, (100, 5)).astype(np.float32)
    found, exact = gaussian(x, 7), x.astype(np.float64)
    np.testing.assert_allclose(found.mean, exact.mean(0), rtol=1e-14)
    np.testing.assert_allclose(found.covariance, np.cov(exact.T), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows, columns", [(40, 256), (300, 64)])
def test_equal_sets_have_distance_zero(rows, columns):
    """Also in another order, and of files of float32; what is negative by more than rounding comes
    of a file that holds no covariance."""
    x = np.random.default_rng(0).gamma(0.3, 1, (rows, columns)).astype(np.float32)
    first, second = gaussian(x), gaussian(x[::-1], 17)
    assert frechet(first, first) == frechet(first, second) == frechet(second, first) == 0
    short = Gaussian(*(a.astype("f4").astype("f8") for a in (first.mean, first.covariance)))
    assert frechet(short, short) == 0 <= frechet(first, short) < 1e-5
    assert frechet(first, dataclasses.replace(first, mean=first.mean + 1e-3)) > 0
    wrong = Gaussian(np.zeros(2), np.array([[1.0, 3.0], [3.0, 1.0]]))
    with pytest.raises(UserError, match="the Frechet distance is -4, and none is negative"):
        frechet(wrong, wrong)


def logits_of(case: str) -> np.ndarray:
    if "recipe" not in SCORES[case]:
        return recipe.arrays("is")[case]
    said, salt = SCORES[case]["recipe"], recipe.expected()["salt"]
    return (recipe.uniform(said["name"], SCORES[case]["shape"], salt) * said["scale"]).astype("f4")


def scores(logits: np.ndarray, splits: np.ndarray) -> np.ndarray:
    blocks = (logits[start : start + 23] for start in range(0, len(logits), 23))
    return inception_scores(blocks, splits)


@pytest.mark.parametrize("case", SCORES)
def test_inception_score(case):
    """ADM's blocks."""
    logits = logits_of(case)
    for size, exact in SCORES[case]["adm_by_split_size"].items():
        found = scores(logits, np.arange(len(logits)) // int(size))
        np.testing.assert_allclose(found, exact["exact"]["scores"], rtol=1e-9)


@pytest.mark.parametrize("case", NEIGHBOURS)
def test_precision_and_recall(case, monkeypatch):
    """Also where blocks are smaller than the sets."""
    known = recipe.arrays("prc")
    cases = NEIGHBOURS[case]["exact"]
    if "recipe" in NEIGHBOURS[case]:
        reference, samples = recipe.features_of(NEIGHBOURS[case])
        cases = {"3": cases["3"]}
    else:
        reference, samples = known[f"{case}.ref"], known[f"{case}.sample"]
        monkeypatch.setattr(statistics, "ROWS", 64)
        monkeypatch.setattr(statistics, "COLUMNS", 100)
    for k, exact in cases.items():
        found = precision_recall(reference, samples, int(k))
        assert found == (exact["precision"], exact["recall"])
    centre = np.zeros(reference.shape[1])
    radii = squared_radii(reference, centre)
    np.testing.assert_allclose(radii, known[f"{case}.k3.radius2_ref"], rtol=1e-6, atol=1e-20)


def test_equal_pictures_have_distance_zero():
    """The same picture four times: its ball has radius 0, and it lies in it."""
    x = 1e3 * np.random.default_rng(0).normal(size=(3, 9)).astype(np.float32)
    many = np.repeat(x, 4, axis=0)
    assert squared_radii(many, np.zeros(9)).max() == 0
    assert precision_recall(many, x.repeat(5, 0)) == (1, 1)
