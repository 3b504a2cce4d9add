"""Scores of a second query on the way of token attention: bit by bit those that the kernel for
scores finds in slots that hold the token, for every type, with groups and with heads of a row in
several grid steps. Attention is what it is without them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import token_attention
from pallas_kernels.token_attention import NewToken, Probe, mosaic_gpu, reference, tpu, tpu_scores
from pallas_kernels.token_specs import awaiting_token, token_arguments
from tests.often import often
from tests.pallas_kernels import copy_rules, gpu_simulation
from tests.pallas_kernels.test_kernels import TOLERANCE, error
from tests.pallas_kernels.test_token_storing import FLOAT, SMALL, in_bits, token_of
from tests.pallas_kernels.tpu_simulation import CORES, has_races, simulated

CASES = {
    "bfloat16": (replace(SMALL, rows=4), {"slots": 104}, {}),
    "float32": (FLOAT, {"slots": 41, "sums": False}, {}),
    "int8": (replace(SMALL, kv_dtype="int8"), {"slots": 41}, {}),
    "h100": (replace(SMALL, head_dim=100), {"slots": 105}, {}),
    "h128": (replace(SMALL, rows=3, head_dim=128), {"slots": 37}, {}),
    "groups": (SMALL, {"slots": 37, "group": 2}, {}),
    "heads-apart": (replace(SMALL, heads=4), {"slots": 104}, {"most_bytes": 2 * 112 * 256}),
}
SLOT = 5


def problem(spec, options):
    """Operands with a probe, whose scores go where NaN are, and the token."""
    query, held = awaiting_token(*token_arguments(spec, **options), SLOT)
    rows, heads, slots, width = held.pool.shape
    asked = jax.random.normal(jax.random.key(2), (rows, heads, width // 2), jnp.float32)
    query = replace(query, probe=Probe(asked, jnp.bool_(True), count=12, every=8))
    held = replace(held, scores=jnp.full((rows, heads, slots), jnp.nan, jnp.float32))
    k, v, slot = token_of(query, SLOT)  # one for every query head
    return query, held, NewToken(k[:, :heads], v[:, :heads], slot)


def without(query):
    return replace(query, probe=None)


def check(spec, options, store_and_attend, scores) -> None:
    query, held, token = problem(spec, options)
    out, found = jax.block_until_ready(jax.jit(store_and_attend)(query, held, token))
    plain, stored = jax.jit(store_and_attend)(without(query), replace(held, scores=None), token)
    for ours, right in ((out, plain), (found.pool, stored.pool), (found.mass, stored.mass)):
        if right is not None:
            np.testing.assert_array_equal(in_bits(ours), in_bits(right))
    expected = scores((query.probe.total / query.probe.count)[:, :, None], stored, 0)[:, :, 0]
    np.testing.assert_array_equal(in_bits(found.scores), in_bits(expected))
    assert found.scores.dtype == jnp.float32 and stored.scores is None


@pytest.mark.slow
@pytest.mark.parametrize("case", often(("int8", "groups"), CASES))
def test_scores_are_those_of_their_own_kernel(case):
    spec, options, more = CASES[case]
    run = partial(tpu.store_and_attend, interpret=True, **more)
    check(spec, options, run, partial(tpu_scores.scores, interpret=True))


@pytest.mark.parametrize("case", ["bfloat16", "int8"])
def test_reference(case):
    spec, options, _ = CASES[case]
    check(spec, options, reference.store_and_attend, jax.jit(reference.scores, static_argnums=2))


STEPS = {"most_bytes": 3 * 112 * 256}  # a row each


@pytest.mark.slow
@pytest.mark.parametrize("cores", CORES)
def test_simulated(cores):
    """With late copies, and steps on two cores."""
    spec, options, _ = CASES["bfloat16"]
    run = simulated(tpu.store_and_attend, cores, **STEPS)
    check(spec, options, run, partial(tpu_scores.scores, interpret=True))
    assert not has_races()


# --- Mosaic GPU -----------------------------------------------------------------------------------

ON_THE_WAY = {
    **{name: CASES[name][:2] for name in ("bfloat16", "float32", "h128")},
    "uneven": (replace(SMALL, rows=3), {"slots": 97, "sums": False}),
}


@gpu_simulation.needed
@pytest.mark.parametrize("name", ON_THE_WAY)
def test_mosaic_simulated(name, monkeypatch, capsys):
    """Two programs, in steps of 32 slots. Scores are those of plain JAX but for the order of their
    sums."""
    broken = copy_rules.watch(monkeypatch)
    how = {"interpret": gpu_simulation.params(), "step": 32, "programs": 2}
    run = jax.jit(partial(mosaic_gpu.store_and_attend, **how))
    query, held, token = problem(*ON_THE_WAY[name])
    plain, stored = run(without(query), replace(held, scores=None), token)
    expected = reference.scores((query.probe.total / query.probe.count)[:, :, None], stored, 0)[
        :, :, 0
    ]
    for asked in (True, False):
        probe = replace(query.probe, wanted=jnp.bool_(asked))
        out, found = run(replace(query, probe=probe), held, token)
        for ours, right in ((out, plain), (found.pool, stored.pool), (found.mass, stored.mass)):
            if right is not None:
                np.testing.assert_array_equal(in_bits(ours), in_bits(right))
        if asked:
            # those of empty slots may be NaN
            np.testing.assert_array_equal(np.isnan(found.scores), np.isnan(expected))
            ours, right = map(jnp.nan_to_num, (found.scores, expected))
            assert error(ours, right) < TOLERANCE["float32"]
        else:  # what was there stays
            assert np.isnan(found.scores).all()
    assert gpu_simulation.no_races(capsys)
    assert not broken, broken[:3]


def test_who_scores_on_the_way():
    by = token_attention.scores_on_the_way
    _, held, _ = problem(*CASES["bfloat16"][:2])
    for name in ("tpu", "tpu-interpret", "mosaic", "mosaic-interpret"):
        assert by(held, name)
    for name in ("reference", "triton", None):  # None: on this machine, a CPU
        assert not by(held, name)
    # what XLA stores is scored when it has been stored; slots that nobody reads are not scored
    for name in ("int8", "h100"):
        _, other, _ = problem(*CASES[name][:2])
        assert by(other, "tpu") and not by(other, "mosaic")
    assert not by(replace(held, used=jnp.int32(9)), "mosaic")
