"""Calibration files: what is read, what is refused, and the scores that orders come from."""

import json
import pathlib
from types import SimpleNamespace

import chex
import numpy as np
import pytest

from varjax.calibration import data
from varjax.calibration import files as measured
from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.sequence import Schedule

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures/policies"
GEOMETRY = Geometry(
    schedule=Schedule.parse("1x1;2x2;3x3;4x4"), num_layers=2, num_heads=3, head_dim=4
)


@pytest.fixture(scope="module")
def scas():
    with np.load(FIXTURES / "scas/scas.npz") as archive:
        return {name: archive[name] for name in archive.files}


def order(seed: int = 0) -> list[list[int]]:
    pairs = [[head, layer] for layer in range(2) for head in range(3)]
    return [pairs[i] for i in np.random.default_rng(seed).permutation(6)]


def write(folder, content) -> pathlib.Path:
    path = folder / "calibration.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- scores ---


def test_scores_and_orders(scas):
    sinks = int(scas["sink_scales"])
    scores = data.scas(scas["beta"], sinks)
    chex.assert_trees_all_close(scores, scas["scas_paper"], atol=1e-12)
    chex.assert_trees_all_close(scores, scas["scas_official"], atol=1e-6)
    np.testing.assert_array_equal(data.orders_from_scores(scores, sinks), scas["orders_official"])
    cas = data.cas(scas["beta"], sinks)
    chex.assert_trees_all_close(cas, scas["cas_paper"], atol=1e-12)
    np.testing.assert_array_equal(data.order_heads(cas), scas["cas_order"])


# --- files ---


def test_published_lists(tmp_path):
    path = write(tmp_path, [order(0), order(1)])
    found = measured.load(path, GEOMETRY)
    np.testing.assert_array_equal(found.orders, [order(0), order(1)])
    assert found.beta is None and len(found.digest) == 64
    single = measured.load(write(tmp_path, order(2)), GEOMETRY)
    np.testing.assert_array_equal(single.orders, [order(2)])


def test_own_file_comes_back(tmp_path):
    path = tmp_path / "calibration.json"
    saved = Calibration(
        model="demo",
        schedule=GEOMETRY.schedule,
        num_layers=2,
        num_heads=3,
        guidance=1.5,
        num_samples=4,
        orders=np.array([order(0), order(1)], np.int32),
        beta=np.random.default_rng(0).uniform(size=(2, 3, 4, 4)),
    )
    measured.save(saved, path)
    found = measured.load(path, GEOMETRY)
    for name in ("model", "schedule", "num_layers", "num_heads", "guidance", "num_samples"):
        assert getattr(found, name) == getattr(saved, name)
    np.testing.assert_array_equal(found.orders, saved.orders)
    chex.assert_trees_all_close(found.beta, saved.beta, rtol=1e-6)


def changed(entry: int, value) -> list:
    """Two lists; an entry of the second replaced."""
    lists = [order(0), order(1)]
    lists[1][entry] = value
    return lists


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("3", "expected a list"),
        ([], "no removal orders"),
        ([order(0), order(0)[:5]], "order list 1 holds 5 entries; this model needs 6"),
        ([order(0), 3], "order list 1 holds 3"),
        (changed(4, order(1)[2]), r"order list 1, entry 4 .* again"),
        (changed(0, [3, 0]), r"entry 0 is \[3, 0\]: heads go from 0 to 2"),
        (changed(0, [0, 2]), "layers from 0 to 1"),
        (changed(3, [0, -1]), "entry 3"),
        (changed(3, [True, 0]), "write"),
        (changed(3, "00"), "write"),
        ({}, "format_version is None"),
        ({"format_version": 2}, "format_version is 2"),
        ({"format_version": 1, "num_layers": "2"}, "num_layers is '2'"),
        ({"format_version": 1, "num_layers": 3, "orders": []}, "another model.*num_layers is 3"),
        ({"format_version": 1, "schedule": "1x1;2x2"}, "another model.*schedule is 1x1;2x2"),
        ({"format_version": 1, "schedule": "1y1"}, "token map"),
        ({"format_version": 1, "orders": [order()[:3]]}, "order list 0 holds 3"),
        ({"format_version": 1, "beta": [[1, 2], [3]]}, "no regular array"),
        ({"format_version": 1, "beta": [[1, 2], [3, 4]]}, r"shape \(2, 2\)"),
        ({"format_version": 1, "rank_dispersion": [1.0] * 4}, r"shape \(4,\)"),
        ('{"format_version": 1, "beta": [NaN]}', "not finite"),
    ],
)
def test_files_that_are_refused(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        measured.load(write(tmp_path, content), GEOMETRY)


WHOLE = {
    "beta": np.full((2, 3, 4, 4), 0.25),
    "key_discrepancy": np.ones((2, 4)),
    "query_variance": np.ones((2, 3)),
    "selectivity": np.ones((2, 4)),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a * 0, "holds nothing but zeros"),
        (lambda a: a * 1e308, "numbers above 1e\\+06"),
        (lambda a: a * np.nan, "not finite|where numbers are needed"),  # null in a file
        (lambda a: -a, "negative numbers"),
        (lambda a: a[:1], "has shape"),
        (lambda a: a.astype(str), "where numbers are needed"),
        (lambda a: "x", "where numbers are needed"),
    ],
)
def test_measurements_that_no_model_gives(tmp_path, name, change, message):
    """From Python and from a file."""
    array = change(WHOLE[name])
    Calibration(**WHOLE).check(GEOMETRY)
    with pytest.raises(UserError, match=f"{name} .*({message})"):
        Calibration(**WHOLE | {name: array}).check(GEOMETRY)
    nested = array.tolist() if isinstance(array, np.ndarray) else array
    with pytest.raises(UserError, match=f"{name} .*({message})"):
        measured.load(write(tmp_path, {"format_version": 1, name: nested}), GEOMETRY)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="cannot read the file"):
        measured.load(tmp_path / "nowhere.json", GEOMETRY)


# --- finding ---

USER, IGNORER = (
    SimpleNamespace(uses_calibration=uses, calibration_files=("calibration.json",))
    for uses in (True, False)
)


OWN, OTHER = ({"sources": [{"sha256": name}]} for name in ("own", "other"))


def model(directory) -> SimpleNamespace:
    return SimpleNamespace(geometry=GEOMETRY, metadata=OWN, directory=directory)


def made_for(metadata: dict, guidance: float = 1.5) -> Calibration:
    digest = measured.model_digest(metadata)
    return Calibration(model="mine", model_digest=digest, guidance=guidance, num_layers=2)


def test_what_is_given_is_taken(tmp_path):
    path = write(tmp_path, [order()])
    for place in (GEOMETRY, model(None), model(tmp_path)):
        assert measured.find(USER, place, path).orders.shape == (1, 6, 2)
        found = Calibration(num_layers=2)
        assert measured.find(IGNORER, place, found) is found
    assert measured.find(USER, GEOMETRY) is None and measured.find(USER, model(None)) is None


def test_the_checkpoint_folder_is_searched_for_those_who_ask(tmp_path):
    assert measured.find(USER, model(tmp_path)) is None
    measured.save(made_for(OWN), tmp_path / "calibration.json")
    found = measured.find(USER, model(tmp_path), guidance=1.5)
    assert found.guidance == 1.5 and found.digest
    assert measured.find(IGNORER, model(tmp_path)) is None


@pytest.mark.parametrize(
    ("metadata", "guidance", "message"),
    [(OTHER, None, "made for other weights"), (OWN, 3.0, "guidance cfg=1.5")],
)
def test_other_origins_are_refused(tmp_path, metadata, guidance, message):
    """A file is named; a published name has no weights that could be others."""
    made, path = made_for(metadata), tmp_path / "calibration.json"
    measured.save(made, path)
    for given, start in ((None, f"calibration {path}: the"), (path, "calibration"), (made, "the")):
        with pytest.raises(UserError, match=f"^{start} .*{message}"):
            measured.find(USER, model(tmp_path), given, guidance)
    assert measured.find(USER, model(None), made, guidance) is made
