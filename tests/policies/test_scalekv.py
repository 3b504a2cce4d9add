"""ScaleKV against the arrays of the authors' code, against plain loops, and its budgets."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.often import often
from tests.policies.observations import DEMO
from varjax import policies
from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.observation import Observation
from varjax.core.planner import plan_cache
from varjax.core.sequence import Schedule

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "policies" / "scalekv"
SIDES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
INFINITY = {
    "2b": Geometry(schedule=Schedule.square(SIDES), num_layers=32, num_heads=2, head_dim=8),
    "8b": Geometry(schedule=Schedule.square(SIDES), num_layers=40, num_heads=2, head_dim=8),
}
SELECTIVITY = np.array([[0, 3, 3, 3, 3, 3], [0, 1, 1, 1, 1, 2], [0, 2, 2, 2, 2, 2]], np.float64)
CALIBRATION = Calibration(selectivity=SELECTIVITY)


def file_policy(model: str, **arguments) -> policies.ScaleKV:
    return policies.ScaleKV(budgets=str(FIXTURES / f"budget_{model}_10pct.json"), **arguments)


# --- selection ---


@pytest.mark.slow
@pytest.mark.parametrize("name", often(("demand_2b",), ("demand_2b", "efficient_2b")))
def test_the_authors_code_keeps_the_same_tokens(name):
    """Scale by scale, with the capacities of the published file; indices must be equal."""
    with np.load(FIXTURES / f"{name}.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}
    meta = json.loads(str(arrays["meta_json"]))
    geometry, heads, size = INFINITY["2b"], meta["num_heads"], meta["head_dim"]
    rule = file_policy("2b", faithful=True).rule("scales").prepare(geometry, None).rule("scales")
    held = rule.allocate(geometry, 0.25).region_capacity[:, meta["layer"], 0]
    select = jax.jit(rule.select)
    keys, position = np.zeros((heads, 0, size), np.float32), np.zeros((heads, 0), np.int32)
    for s, (height, width) in enumerate(geometry.schedule.maps):
        random = np.random.RandomState(arrays["seeds"][s])
        shape = (1, heads, height * width, size)
        q, k = (random.standard_normal(shape).astype(np.float32)[0] for _ in range(2))
        first = geometry.schedule.starts[s]
        own = np.broadcast_to(first + np.arange(height * width), (heads, height * width))
        keys, position = np.concatenate([keys, k], 1), np.concatenate([position, own], 1)
        chosen = rule.window_tokens(height, width)
        logits = np.einsum("nqh,nkh->nk", q[:, chosen], keys) / np.sqrt(size) / len(chosen)
        # after the last scale the authors' code applies the last entry once more
        capacity = held[min(s + 1, len(held) - 1)]
        obs = Observation(
            scale=jnp.int32(s),
            live=jnp.asarray(np.ones((1, *position.shape), bool)),
            position=jnp.asarray(position[None]),
            capacity=jnp.asarray(np.full((1, heads), capacity)),
            regions=jnp.asarray(np.arange(heads)[None]),
            window=jnp.asarray(np.isin(position, first + chosen)[None]),
            window_logits=jnp.asarray(logits[None], jnp.float32),
        )
        keep = np.asarray(select(obs))[0]
        kept = np.stack([np.flatnonzero(row) for row in keep])
        position = np.take_along_axis(position, kept, 1)
        keys = np.take_along_axis(keys, kept[..., None], 1)
        assert meta["len_after"][s] == kept.shape[1]
        np.testing.assert_array_equal(position, arrays[f"kept_{s}"], err_msg=f"scale {s}")


# --- budgets ---


@pytest.mark.parametrize(
    ("model", "drafters", "most", "least"),
    [
        ("2b", [0, 23], [920, 1490, 2510, 4100, 6385], [632, 594, 526, 420, 465]),
        ("8b", [0, 1, 2], [909, 1464, 2463, 4054, 6200], [629, 584, 503, 374, 200]),
    ],
)
def test_published_files(model, drafters, most, least):
    plan = plan_cache(INFINITY[model], file_policy(model, accounting="tokens"))
    held = plan.capacity[:, :, 0]
    np.testing.assert_array_equal(
        held[:8], np.repeat([[c] for c in plan.geometry.schedule.starts[:8]], held.shape[1], 1)
    )
    np.testing.assert_array_equal(held[8:, drafters[0]], most)
    np.testing.assert_array_equal(held[8:, 10], least)
    assert (held[8:].mean(1) == 650).all()
    assert (np.sort(np.argsort(-held[11], kind="stable")[: len(drafters)]) == drafters).all()


def test_a_file_says_how_much_is_kept():
    tokens = file_policy("2b", budget=0.1012, accounting="tokens")
    plan_cache(INFINITY["2b"], tokens)
    with pytest.raises(UserError, match=r"keeps up to 0.1012 .* give budget=0.1012"):
        plan_cache(INFINITY["2b"], dataclasses.replace(tokens, budget=0.1))
    with pytest.raises(UserError, match="give budget=0.1171") as error:
        plan_cache(INFINITY["2b"], file_policy("2b", budget=0.1012))
    enough = float(str(error.value).rsplit("=", 1)[1])
    plan = plan_cache(INFINITY["2b"], file_policy("2b", budget=enough))
    assert plan.pool_tokens <= enough * INFINITY["2b"].dense_tokens
    assert file_policy("2b").content() != file_policy("8b").content()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the file"),
        ("{", "no budget file"),
        ('{"Scale x": {}}', "no budget file"),
        ('{"Scale 5": {"Max": 1.5}}', "whole numbers"),
        ('{"Scale 5": {}}', "consecutive ones that end at 6"),
        ('{"Scale 6": {"Block 0": 1}}', "names other blocks than 3 layers"),
        ('{"Scale 6": {"Block 0": 1, "Block 1": 0, "Block 2": 0}}', "needs Max and Min"),
        (
            '{"Scale 6": {"Block 0": 1, "Block 1": 0, "Block 2": 0, "Max": 9, "Min": 4, '
            '"Limit": 67}}',
            "counts on 67 tokens, this schedule has",
        ),
    ],
)
def test_files_that_are_refused(tmp_path, content, message):
    path = tmp_path / "budget.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        plan_cache(DEMO, policies.ScaleKV(budgets=str(path)))


@pytest.mark.parametrize("budget", [0.04, 0.1, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_own_budgets(budget, share):
    """The layer that spreads its attention keeps most, the others at least their share; the mean
    is the budget."""
    policy = policies.ScaleKV(budget=budget, refiner_share=share, accounting="tokens")
    held = plan_cache(DEMO, policy, CALIBRATION).capacity
    total = int(budget * DEMO.dense_tokens + 1e-6)
    sums = held.sum((1, 2))
    assert (sums <= total).all() and (held == held[..., :1]).all()
    exist = np.array(DEMO.schedule.starts)[:, None]
    everything = exist[:, 0] * 12 <= total
    assert (held[..., 0] == exist)[everything].all()
    least = max(1, int(share * total / 12 + 1e-6))
    assert (held[..., 0] >= np.minimum(least, exist)).all()
    assert (held[:, 1] >= held[:, 0]).all() and (held[:, 0] == held[:, 2]).all()
    assert (sums >= np.minimum(exist[:, 0] * 12, total - 12)).all()


@pytest.mark.parametrize(
    ("arguments", "calibration", "message"),
    [
        ({}, None, r"budgets=FILE .* or a calibration"),
        ({}, Calibration(), "holds no selectivity"),
        ({}, Calibration(num_layers=7, selectivity=SELECTIVITY), "another model"),
        ({"drafters": 4}, CALIBRATION, "drafters=4, but the model has 3 layers"),
        ({"refiner_share": 0.0}, CALIBRATION, "refiner_share=0 is outside"),
        ({"grid": 17}, CALIBRATION, "grid=17"),
        ({"budget": 0.001}, CALIBRATION, "at least one token"),
    ],
)
def test_wrong_arguments(arguments, calibration, message):
    with pytest.raises(UserError, match=message):
        plan_cache(DEMO, policies.ScaleKV(**arguments), calibration)
