"""What must not change a result: segments, batch size, position in the batch, slots that are not in
use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import models_under_test as models
from varjax import policies
from varjax.api import Generator
from varjax.cache.planner import plan_cache
from varjax.cache.state import KVState
from varjax.engine import scales
from varjax.engine.segments import plan_segments
from varjax.sampling import Sampling, image_keys

NAME = models.FAMILIES["var"]
SLOW = pytest.mark.slow
LABELS = np.array([3, 7, 1, 9, 0, 2, 5, 8], np.int32)
POLICIES = {
    "full": policies.Full(),
    "swa": policies.SlidingWindow(budget=0.3),
    "streaming": policies.Streaming(budget=0.3),
    "headkv": policies.HeadKV(budget=0.3),
}


def every_family(names, ordinary: str):
    """(model, name of a policy): by default all policies with VAR, one with the other families."""
    return [
        pytest.param(model, name, marks=() if NAME == model or name == ordinary else SLOW)
        for model in models.FAMILIES.values()
        for name in names
    ]


def sampled(policy, *, batch_size, segments="auto", count=3, name=NAME, **options):
    """Tokens and images of the first `count` images, drawn with filters."""
    sampling, model = Sampling(cfg=2.0, top_k=40, top_p=0.9, **options), models.fixture_model(name)
    generator = Generator(
        model,
        policy,
        sampling=sampling,
        batch_size=batch_size,
        segments=segments,
        matmul_precision="highest",
    )
    parts = [r for _, r in generator.batches(models.condition(model, LABELS[:count]), seed=5)]
    return tuple(np.concatenate([p[k] for p in parts]) for k in ("tokens", "images"))


@pytest.mark.parametrize(("name", "policy"), every_family(["streaming", "headkv"], "streaming"))
def test_segments_do_not_change_tokens(name, policy):
    policy = POLICIES[policy]
    expected, images = sampled(policy, batch_size=3, name=name)
    for segments in (1, 6):
        tokens, other = sampled(policy, batch_size=3, segments=segments, name=name)
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_allclose(other, images, atol=1e-5)


@pytest.mark.parametrize(("name", "policy"), every_family(["full", "headkv"], "full"))
def test_batch_size_does_not_change_images(name, policy):
    """Batches of 1, 3 and 8, the last one of 3 padded: the same image for the same number."""
    policy = POLICIES[policy]
    expected, images = sampled(policy, batch_size=8, count=8, name=name)
    for batch_size in (1, 3):
        tokens, other = sampled(policy, batch_size=batch_size, count=8, name=name)
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_allclose(other, images, atol=1e-5)


def test_two_runs_are_bit_identical():
    first, second = (sampled(POLICIES["headkv"], batch_size=3) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_more_smooth_mixes_codes():
    tokens, images = sampled(POLICIES["full"], batch_size=3)
    _, smooth = sampled(POLICIES["full"], batch_size=3, more_smooth=True)
    assert np.isfinite(smooth).all() and np.abs(smooth - images).max() > 1e-3


def run_with_pool(name, policy, fill):
    """Greedy run whose pool starts filled with `fill` (zeros or NaN)."""
    model = models.fixture_model(name)
    plan = plan_cache(model.geometry, policy)
    segments = plan_segments(model.geometry.schedule)
    spec = scales.ProgramSpec.of(plan, segments, Sampling(cfg=1.5, greedy=True), keep_logits=True)
    tables = scales.program_tables(plan, segments, np.arange(2), model.pipeline.resampling)
    state = KVState.empty(plan, 2, jnp.float32)
    state = dataclasses.replace(state, kv_pool=jnp.full_like(state.kv_pool, fill))
    condition = models.arrays_of(model, LABELS[:2])
    results, _ = jax.jit(lambda *a: scales.generate_codes(*a, spec=spec))(
        model.pipeline, state, condition, image_keys(0, jnp.arange(2)), tables, None
    )
    return results


@pytest.mark.parametrize(("name", "policy"), every_family(POLICIES, "headkv"))
def test_unused_slots_are_never_read(name, policy):
    """A pool full of NaN gives the same logits as one full of zeros."""
    clean, poisoned = (run_with_pool(name, POLICIES[policy], fill) for fill in (0.0, jnp.nan))
    np.testing.assert_array_equal(poisoned["logits"], clean["logits"])


@pytest.mark.parametrize(("name", "policy"), every_family(POLICIES, "full"))
def test_images_do_not_see_each_other(name, policy):
    """Another label or prompt beside it does not change an image; nor does its place in the
    batch."""
    model = models.fixture_model(name)
    generator = models.greedy_generator(model, POLICIES[policy])
    one, _ = generator.run_batch(models.arrays_of(model, [3, 7]), [0, 1])
    two, _ = generator.run_batch(models.arrays_of(model, [3, 2]), [0, 1])
    swapped, _ = generator.run_batch(models.arrays_of(model, [7, 3]), [1, 0])
    np.testing.assert_array_equal(one["tokens"][0], two["tokens"][0])
    np.testing.assert_array_equal(one["tokens"][0], swapped["tokens"][1])
    assert (np.asarray(one["tokens"][1]) != np.asarray(two["tokens"][1])).any()


@pytest.mark.parametrize(("name", "policy"), every_family(["streaming", "headkv"], ""))
def test_whole_budget_gives_the_tokens_of_full(name, policy):
    model = models.fixture_model(name)
    images = models.arrays_of(model, LABELS[:2])
    full, _ = models.greedy_generator(model).run_batch(images, np.arange(2))
    policy = dataclasses.replace(POLICIES[policy], budget=1.0)
    whole, _ = models.greedy_generator(model, policy).run_batch(images, np.arange(2))
    np.testing.assert_array_equal(whole["tokens"], full["tokens"])
    np.testing.assert_allclose(whole["logits"], full["logits"], atol=1e-4)


@pytest.mark.parametrize("name", ["c_k5_nol2norm", pytest.param("infinity_b_small", marks=SLOW)])
def test_unrolled_scans_agree(name):
    model = models.fixture_model(name)
    images = models.arrays_of(model, LABELS[:2])
    scanned, _ = models.greedy_generator(model).run_batch(images, np.arange(2))
    unrolled, _ = models.greedy_generator(model, unroll=True).run_batch(images, np.arange(2))
    np.testing.assert_array_equal(unrolled["tokens"], scanned["tokens"])


def test_bfloat16_runs_and_stays_close():
    """Not a parity claim: bfloat16 rounds to three digits, so only most tokens of the forced run's
    logits agree in rank."""
    from varjax import api

    model = api.load(models.checkpoint_folder(NAME), "bfloat16")
    forced = models.fixture(NAME, "gen_forced")
    results, state = models.greedy_generator(model, kv_dtype="bfloat16").run_batch(
        forced["labels"], np.arange(2), given=forced["tokens"]
    )
    assert state.kv_pool.dtype == jnp.bfloat16
    logits = np.asarray(results["logits"])[:, forced["logit_pos"]]
    error = np.linalg.norm(logits - forced["logits_cfg1p5"]) / np.linalg.norm(
        forced["logits_cfg1p5"]
    )
    assert error < 0.05


@pytest.mark.parametrize("name", ["streaming", "headkv"])
def test_int8_storage_is_close_and_small(name):
    """A quarter of float32's bytes plus two scales per token; logits move, but little."""
    model, policy = models.fixture_model(NAME), POLICIES[name]
    exact = models.greedy_generator(model, policy)
    small = models.greedy_generator(model, policy, kv_dtype="int8")
    tokens = exact.run_batch(LABELS[:2], np.arange(2))[0]["tokens"]
    forced = [
        g.run_batch(LABELS[:2], np.arange(2), given=tokens)[0]["logits"]
        for g in (models.greedy_generator(model, policy), small)
    ]
    spread = float(np.std(forced[0]))
    assert 0 < np.abs(forced[1] - forced[0]).max() < 0.1 * spread
    head = model.geometry.head_dim
    assert small.allocated_bytes * 8 * head == exact.allocated_bytes * (2 * head + 8)
    assert small.allocated_bytes == small.plan.num_bytes(2, "int8")
