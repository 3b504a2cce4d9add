"""The TPU kernel of token scores against the reference in float32: every type, heads of every size,
one query per head and several; interpreted, and simulated with late copies."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import implementations, token_attention
from pallas_kernels.arg_specs import SPECS
from pallas_kernels.shared import tpu_slots
from pallas_kernels.token_attention import HeadSlots, reference, tpu_scores
from pallas_kernels.token_specs import token_arguments
from tests.pallas_kernels.test_kernels import error
from tests.pallas_kernels.test_token_attention import HEADS, ROWS, SLOTS, problem
from tests.pallas_kernels.token_shapes import abstract_token_arguments
from tests.pallas_kernels.tpu_simulation import CORES, has_races, simulated

SMALL = replace(SPECS["llamagen-xl-t1"], rows=2, heads=3)
EXACT = 1e-6  # float32: another order of sums
# (arguments, slots, queries per head, the first slot whose score is asked for)
CASES = {
    "mean": (replace(SMALL, dtype="float32", kv_dtype="bfloat16"), 105, 1, 1),
    "mean-int8": (replace(SMALL, dtype="float32", kv_dtype="int8"), 70, 1, 3),
    "window": (SMALL, 105, 6, 1),
    "h100": (replace(SMALL, head_dim=100), 41, 8, 0),
    "h128-float32": (replace(SMALL, head_dim=128, dtype="float32"), 70, 5, 40),
}
MARKED = [pytest.param(*case, id=name) for name, case in CASES.items()]


def arguments(spec, slots: int, count: int):
    """Queries and slots; values are NaN, which no score knows of."""
    _, held = token_arguments(spec, slots, sums=False, poison=False)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((spec.rows, spec.heads, count, spec.head_dim), np.float32)
    q = jnp.asarray(q, spec.dtype)
    if held.scale is not None:
        return q, HeadSlots(held.pool, scale=held.scale.at[:, 1].set(jnp.nan))
    return q, HeadSlots(held.pool.at[..., spec.head_dim :].set(jnp.nan))


@partial(jax.jit, static_argnums=2)
def in_float32(q, slots, first):
    if slots.scale is None:
        slots = HeadSlots(slots.pool.astype(jnp.float32))
    with jax.default_matmul_precision("highest"):
        return reference.scores(q.astype(jnp.float32), slots, first)


def check(spec, slots, count, first, run) -> None:
    given = arguments(spec, slots, count)
    found = jax.block_until_ready(jax.jit(lambda *given: run(*given, first))(*given))
    assert found.dtype == jnp.float32
    assert found.shape == (spec.rows, spec.heads, count, slots - first)
    assert error(found, in_float32(*given, first)) < EXACT


interpreted = partial(tpu_scores.scores, interpret=True)


@pytest.mark.parametrize(("spec", "slots", "count", "first"), MARKED)
def test_interpreted(spec, slots, count, first):
    check(spec, slots, count, first, interpreted)


@pytest.mark.parametrize("count", [1, 6])
def test_float32_queries_are_not_rounded(count, monkeypatch):
    """With two of the three parts that a query consists of, an error is seen."""
    case = (replace(SMALL, dtype="float32", kv_dtype="bfloat16"), 40, count, 0)
    check(*case, interpreted)
    parts = tpu_scores._parts
    monkeypatch.setattr(tpu_scores, "_parts", lambda q: [*parts(q)[:2], jnp.zeros_like(q)])
    with pytest.raises(AssertionError):
        check(*case, interpreted)


def test_heads_of_a_row_in_several_steps():
    """Lines of one row's matrices are filled step by step."""
    for count, more in ((1, 4096), (9, 8192)):  # bytes per head beside its slots
        spec, most = replace(CASES["mean"][0], heads=4), 2 * (112 * 256 + more)
        assert tpu_slots.steps(arguments(spec, 105, count)[1].pool, "", most, more) == (1, 2)
        check(spec, 105, count, 1, partial(interpreted, most_bytes=most))


@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("name", ["mean", "window"])
def test_simulated(name, cores):
    check(*CASES[name], simulated(tpu_scores.scores, cores))
    assert not has_races()


def test_slots_from_a_number_on():
    """The reference, too."""
    q, k, v, _ = problem(64)
    held = HeadSlots(jnp.concatenate([k, v], -1))
    q = jnp.asarray(q)[:, :, None]
    whole = token_attention.scores(q, held)
    assert whole.shape == (ROWS, HEADS, 1, SLOTS)
    rest = token_attention.scores(q, held, first=5)
    np.testing.assert_allclose(rest, whole[..., 5:], rtol=1e-6, atol=1e-6)


# --- dispatch -------------------------------------------------------------------------------------


def traced(name, platform, monkeypatch, **changes) -> bool:
    """Whether a kernel is in a program for such a chip."""
    monkeypatch.setattr(implementations.target, "platform", lambda: platform)
    monkeypatch.setattr(implementations.target, "capability", lambda: "9.0")
    given = abstract_token_arguments(replace(SMALL, **changes), 40)
    run = partial(token_attention.scores, implementation=name)
    jaxpr = jax.make_jaxpr(lambda query, held: run(query.q[:, :, None], held))(*given)
    return "pallas_call" in str(jaxpr)


def test_tpus_take_the_kernel_or_say_why_not(monkeypatch, recwarn):
    assert traced(None, "tpu", monkeypatch)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="plain JAX reference runs instead: TPU token scores take"):
        assert not traced(None, "tpu", monkeypatch, head_dim=96)
    with pytest.raises(NotImplementedError, match="not 40 slots of heads of 96 .*--attention=ref"):
        traced("tpu", "tpu", monkeypatch, head_dim=96)
