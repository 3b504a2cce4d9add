"""Whole generations with the accelerators' kernels, step by step in interpret mode: the tokens are
those of the reference. With --slow on every fixture."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models_under_test import arrays_of, fixture_model, greedy_generator
from varjax import policies
from varjax.codecs.vqvae.model import VQVAE, VQVAEConfig
from varjax.generator import Generator
from varjax.model import Model
from varjax.models.var.transformer import VAR, VARConfig
from varjax.sampling import Sampling
from varjax.schedule import Schedule

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


@functools.lru_cache(maxsize=1)
def wide_model() -> Model:
    """Random weights in bfloat16, heads of 64: Mosaic GPU's kernels take no smaller ones, which the
    fixtures have, and no float32."""
    schedule = Schedule.square((1, 2, 3, 5))
    sizes = dict(vocab_size=32, z_channels=4, schedule=schedule)
    config = VARConfig(depth=2, embed_dim=128, num_heads=2, num_classes=4, **sizes)
    codec = VQVAEConfig(ch=32, ch_mult=(1,), **sizes)
    transformer = VAR(config, rngs=nnx.Rngs(0))
    transformer.head.kernel.set_value(20 * transformer.head.kernel[...])  # tokens far from ties
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), transformer)
    parts = {"transformer": half, "codec": VQVAE(codec, rngs=nnx.Rngs(1))}
    return Model("wide", parts, {"family": "var"})


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX simulates from 0.11 on")
@pytest.mark.parametrize("case", ["full", "full-int8", "streaming", "h2o"])
def test_greedy_tokens_through_the_simulator_of_gpus(case):
    policy, kv_dtype = CASES[case]
    found = {}
    for attention in ("reference", "mosaic-interpret"):
        generator = greedy_generator(
            wide_model(), policy, attention=attention, kv_dtype=kv_dtype or "bfloat16"
        )
        found[attention], _ = generator.run_batch(np.array([1, 2]), np.arange(2, dtype=np.int32))
    expected, simulated = (found[name] for name in ("reference", "mosaic-interpret"))
    assert len(np.unique(expected["tokens"])) > 8
    np.testing.assert_array_equal(simulated["tokens"], expected["tokens"])
    np.testing.assert_allclose(simulated["logits"], expected["logits"], atol=0.1)
