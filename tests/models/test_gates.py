"""Gates of teacher forcing: of one they change nothing; a hard table is what the engine runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.evaluation.metrics import image_kl
from tests import models_under_test as models
from tests.often import often
from varjax.core.sampling import Sampling
from varjax.models import teacher_forcing
from varjax.models.teacher_forcing import Gates
from varjax.policies import Table

NUMBERS = np.arange(2)
# guidance on the logits, or inside the network; token by token it ends early, or there are padded
# prompts, or new lines and shared keys
TOKENS = ("llamagen_c2i", "janus_small", models.GROUPS)
CASES = [*models.FAMILIES.values(), "inside", *TOKENS]
PERIOD = 3


@functools.cache
def drawn(case: str):
    """The model, its sampling, and what the full cache draws: tokens and logits."""
    model = models.fixture_model(models.FAMILIES["infinity"] if case == "inside" else case)
    more = {"inside": {"cfg_insertion_layer": (-1,)}, "llamagen_c2i": {"cfg_interval": 4}}
    sampling = Sampling(
        cfg=1.5, tau=1.2 if case in TOKENS else 1.0, greedy=True, **more.get(case, {})
    )
    return model, sampling, run(model, sampling)


def run(model, sampling, policy="full", tokens=None, **more):
    exact = more | {"keep_logits": True, "matmul_precision": "highest", "kv_dtype": "float32"}
    exact |= {} if model.draws_tokens else {"segments": 1}
    generator = models.built(model, policy, sampling=sampling, batch_size=2, **exact)
    arrays = models.arrays_of(model, NUMBERS)
    return generator.run_batch(arrays, NUMBERS, given=tokens)[0]


def forced(model, sampling, tokens, table=None):
    """Guided logits with the table bool [K, L, N, tokens] for gates; None: of the full cache."""
    values = None if table is None else jnp.moveaxis(jnp.float32(table), 1, 0)[:, None]
    gates = Gates(values, period=PERIOD)
    with jax.default_matmul_precision("highest"):
        condition = jax.tree.map(jnp.asarray, models.arrays_of(model, NUMBERS))
        given = jnp.asarray(tokens)
        if not model.draws_tokens:
            given = jax.jit(teacher_forcing.seen_codes)(model.networks, given)
        logits = functools.partial(teacher_forcing.guided, sampling=sampling, gates=gates)
        return jax.jit(logits)(model.transformer, condition, given)


def table_of(model, kept):
    """A random table bool [K, L, N, tokens] that keeps such a part of the tokens at every scale."""
    geometry = model.geometry
    if model.draws_tokens:
        source = 1 + np.arange(geometry.schedule.image_tokens) // PERIOD
        source[-1] = count = 1 + -(-geometry.schedule.steps // PERIOD)  # the last one is never seen
    else:
        source, count = geometry.schedule.scale_of_token, geometry.schedule.num_scales
    later = np.arange(count)[:, None] > source
    shape = (geometry.num_layers, geometry.num_heads, source.size)
    lasting = np.random.default_rng(0).random((count, *shape)) < kept
    return (
        np.cumprod(np.where(later[:, None, None], lasting, True), axis=0).astype(bool)
        & later[:, None, None]
    )


@pytest.mark.parametrize("case", often([models.FAMILIES["var"], TOKENS[0]], CASES))
def test_gates_of_one_are_the_full_cache(case):
    model, sampling, full = drawn(case)
    plain = forced(model, sampling, full["tokens"])
    ones = forced(model, sampling, full["tokens"], np.ones_like(table_of(model, 1)))
    rounding = 2e-6 if model.draws_tokens else 0  # channels of zeros in the scores
    np.testing.assert_allclose(ones, plain, rtol=rounding, atol=rounding)
    np.testing.assert_allclose(ones, full["logits"], atol=1e-4)


@pytest.mark.parametrize("case", often([models.FAMILIES["var"], "inside", TOKENS[0]], CASES))
def test_a_table_by_gates_is_the_engine(case, tmp_path):
    """The divergence of each image from the full cache, its tokens forced."""
    model, sampling, full = drawn(case)
    table = table_of(model, 0.6)
    np.savez(tmp_path / "keep.npz", keep_token=table)
    policy = Table(path=str(tmp_path / "keep.npz"))
    engine = run(model, sampling, policy, full["tokens"])["logits"]
    gated = forced(model, sampling, full["tokens"], table)
    expected = image_kl(full["logits"], engine)
    assert expected.min() > 1e-3
    np.testing.assert_allclose(image_kl(full["logits"], gated), expected, atol=1e-4)
