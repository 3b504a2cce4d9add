"""What must not change a result: segments, batch size, position in the batch, slots that are not in
use."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.often import often
from varjax import policies
from varjax.core.sampling import Sampling
from varjax.core.scales import ScaleSpec

NAME = models.FAMILIES["var"]
SMALL = "c_k5_nol2norm"  # the quickest fixture
OTHERS = [model for model in models.FAMILIES.values() if model != NAME]

LABELS = np.array([3, 7, 1, 9, 0, 2, 5, 8], np.int32)
POLICIES = {"full": policies.Full(), "headkv": policies.HeadKV(budget=0.3)}


def sampled(policy, *, batch_size, segments=1, count=3, name=SMALL, **options):
    """Tokens and images of the first `count` images, drawn with filters."""
    sampling, model = Sampling(cfg=2.0, top_k=40, top_p=0.9, **options), models.fixture_model(name)
    generator = models.built(
        model,
        policy,
        sampling=sampling,
        batch_size=batch_size,
        segments=segments,
        matmul_precision="highest",
    )
    parts = [r for _, r in generator.batches(models.condition(model, LABELS[:count]), seed=5)]
    return tuple(np.concatenate([p[k] for p in parts]) for k in ("tokens", "images"))


EVERY = [(model, policy) for model in (SMALL, NAME, *OTHERS) for policy in ("full", "headkv")]


@pytest.mark.parametrize(("name", "policy"), often([(SMALL, "headkv")], EVERY))
def test_segments_and_batches_do_not_change_images(name, policy):
    """One segment and a batch of 4; the planner's segments and batches of 3, the last one padded:
    the same tokens for the same number."""
    policy = POLICIES[policy]
    expected, images = sampled(policy, batch_size=4, count=4, name=name)
    tokens, other = sampled(policy, batch_size=3, segments="auto", count=4, name=name)
    np.testing.assert_array_equal(tokens, expected)
    chex.assert_trees_all_close(other, images, atol=1e-5)


@pytest.mark.slow
def test_more_smooth_mixes_codes():
    tokens, images = sampled(POLICIES["full"], batch_size=3)
    _, smooth = sampled(POLICIES["full"], batch_size=3, more_smooth=True)
    assert np.isfinite(smooth).all() and np.abs(smooth - images).max() > 1e-3


@pytest.mark.slow
def test_without_guidance_there_is_one_row_per_image():
    """Half of the cache, and the logits of the conditional rows alone."""
    model = models.fixture_model(NAME)
    generator = models.greedy_generator(model, "streaming", budget=1.0, cfg=0.0)
    results, state = generator.run_batch(LABELS[:2], np.arange(2))
    guided = varjax.plan(model, "streaming", 1.0).num_bytes(2, "float32")
    assert state.kv_pool.shape[0] == 2
    assert generator.allocated_bytes == state.kv_pool.nbytes == guided // 2
    codes = model.codec.quantizer.teacher_inputs(results["tokens"])
    with jax.default_matmul_precision("highest"):
        expected = model.transformer(jnp.asarray(LABELS[:2]), codes)
    chex.assert_trees_all_close(results["logits"], expected, atol=2e-4)


def test_called_again_nothing_is_traced_again(monkeypatch):
    """Other labels, seeds and numbers of images: the program of the first call, and for the same
    ones the same images to the last bit."""
    chex.clear_trace_counter()
    once = chex.assert_max_traces(ScaleSpec.generate, n=1)
    monkeypatch.setattr(ScaleSpec, "generate", once)
    generator = models.built(models.fixture_model("c_k5_nol2norm"), batch_size=2, segments=1)
    first, again = generator([3, 4, 1], seed=0), generator([3, 4], seed=0)
    chex.assert_trees_all_equal(first[:2], again)
    assert (generator([3, 4], seed=1) != again).any() and len(generator.timing.runs) == 4


@pytest.mark.slow
def test_bfloat16_runs_and_stays_close():
    """Not a parity claim: bfloat16 rounds to three digits, so only most tokens of the forced run's
    logits agree in rank."""
    model = varjax.load(models.checkpoint_folder(SMALL), "bfloat16")
    forced = models.fixture(SMALL, "gen_forced")
    results, state = models.greedy_generator(model, kv_dtype="bfloat16").run_batch(
        forced["labels"], np.arange(2), given=forced["tokens"]
    )
    assert state.kv_pool.dtype == jnp.bfloat16
    logits = np.asarray(results["logits"])[:, forced["logit_pos"]]
    error = np.linalg.norm(logits - forced["logits_cfg1p5"]) / np.linalg.norm(
        forced["logits_cfg1p5"]
    )
    assert error < 0.05


@pytest.mark.slow
def test_int8_storage_is_close_and_small():
    """A quarter of float32's bytes plus two scales per token; logits move, but little."""
    model, policy = models.fixture_model(SMALL), POLICIES["headkv"]
    exact = models.greedy_generator(model, policy)
    small = models.greedy_generator(model, policy, kv_dtype="int8")
    given = models.fixture(SMALL, "gen_forced")
    forced = [
        g.run_batch(given["labels"], np.arange(2), given=given["tokens"])[0]["logits"]
        for g in (exact, small)
    ]
    spread = float(np.std(forced[0]))
    assert 0 < np.abs(forced[1] - forced[0]).max() < 0.1 * spread
    head = model.geometry.head_dim
    assert small.allocated_bytes * 8 * head == exact.allocated_bytes * (2 * head + 8)
    assert small.allocated_bytes == small.plan.num_bytes(2, "int8")
