"""Whole runs of every policy with the accelerators' kernels, interpreted (TPU) and simulated (GPU,
JAX from 0.11 on): what attention finds, and what the cache holds, is what the reference finds."""

import functools

import numpy as np
import pytest

from tests.pallas_kernels import gpu_simulation
from tests.tokens import stand_in
from tests.tokens.test_policies import EVERY, held
from varjax.policies import get_policy

OFTEN = ("headkv",)
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
MARKED = [n if n in OFTEN else SLOW(n) for n in EVERY]
GPU = pytest.param("mosaic-interpret", marks=gpu_simulation.needed)


@functools.cache
def model_and_plan(name, shared=1):
    """Heads of 64, 32 slots and more: what the kernels take."""
    shape = dict(tokens=60, line=6, heads=2, size=64, group=shared)
    plan = stand_in.plan_for(get_policy(name, 0.6), **shape)
    assert plan.layer_slots[0] >= 32
    return stand_in.StandIn.random(plan.geometry, 2), plan


@pytest.mark.parametrize("attention", ["tpu-interpret", GPU])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MARKED)
def test_runs_are_those_of_the_reference(name, dtype, attention):
    check(*model_and_plan(name), dtype, attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "headkv" else SLOW(n) for n in EVERY])
def test_groups(name):
    """Two query heads share keys and values: only the TPU kernel serves them."""
    check(*model_and_plan(name, 2), "float32", "tpu-interpret")


def check(model, plan, dtype, attention):
    expected, state = stand_in.run(model, plan, dtype=dtype)
    found, same = stand_in.run(model, plan, dtype=dtype, attention=attention)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert held(same, 3) == held(state, 3)
