"""Whole generations with the accelerators' kernels, step by step in interpret mode: the tokens are
those of the reference. With --slow on every fixture."""

import functools

import numpy as np
import pytest

from tests.models_under_test import arrays_of, fixture_model, greedy_generator
from varjax import policies
from varjax.generator import Generator
from varjax.sampling import Sampling

KERNELS = ["triton-interpret", "tpu-interpret"]
# Blocks of 8 slots, the smallest that every kernel takes.
CASES = {
    "full": (policies.Full(block_size=8, accounting="tokens"), None),
    "full-int8": (policies.Full(block_size=8, accounting="tokens"), "int8"),
    "streaming": (policies.Streaming(budget=0.4, block_size=8), None),
    "h2o": (policies.H2O(budget=0.4, block_size=8), None),
    "headkv-int8": (policies.HeadKV(budget=0.4, block_size=8), "int8"),
}
MODELS = ["a_k10", "b_k6_sharedaln", "c_k5_nol2norm", "infinity_a_small"]
SMALL = "c_k5_nol2norm"
RUNS = [
    *(pytest.param(m, "full", marks=[pytest.mark.slow]) for m in MODELS),
    *(
        pytest.param(SMALL, case, marks=[] if case == "h2o" else [pytest.mark.slow])
        for case in CASES
        if case != "full"
    ),
]


@functools.lru_cache(maxsize=2)
def generate(model: str, case: str, attention: str):
    policy, kv_dtype = CASES[case]
    model = fixture_model(model)
    generator = greedy_generator(model, policy, attention=attention, kv_dtype=kv_dtype)
    results, _ = generator.run_batch(arrays_of(model, [1, 2]), np.arange(2, dtype=np.int32))
    return {name: np.asarray(a) for name, a in results.items()}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("model,case", RUNS)
def test_greedy_tokens_are_those_of_the_reference(model, case, kernel):
    expected, found = (generate(model, case, name) for name in ("reference", kernel))
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=2e-3)


@functools.lru_cache(maxsize=2)
def draw(attention: str):
    """Tokens drawn with every filter."""
    model = fixture_model(SMALL)
    sampling = Sampling(cfg=1.5, tau=0.9, top_k=20, top_p=0.9)
    policy = CASES["full"][0]
    generator = Generator(model, policy, sampling=sampling, batch_size=2, attention=attention)
    results, _ = generator.run_batch(arrays_of(model, [1, 2]), np.arange(2, dtype=np.int32))
    return np.asarray(results["tokens"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_drawn_tokens_are_those_of_the_reference(kernel):
    np.testing.assert_array_equal(draw(kernel), draw("reference"))
