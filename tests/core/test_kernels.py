"""Whole generations with the accelerators' kernels, step by step in interpret mode: the tokens are
those of the reference. With --slow on every fixture."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import varjax
from pallas_kernels import implementations, target
from pallas_kernels.residual import mosaic_gpu as mosaic_residual
from tests.models_under_test import arrays_of, fixture_model, greedy_generator
from tests.often import often
from tests.pallas_kernels import gpu_simulation
from varjax import policies
from varjax.codecs.vqvae import VQVAE, VQVAEConfig
from varjax.core import decode
from varjax.core.sequence import Schedule
from varjax.fast import quantized, stream
from varjax.models.model import Model
from varjax.models.var import VAR, VARConfig

KERNELS = ["triton-interpret", "tpu-interpret"]
# Blocks of 8 slots, the smallest that every kernel takes.
CASES = {
    "full": (policies.Full(block_size=8, accounting="tokens"), None),
    "full-int8": (policies.Full(block_size=8, accounting="tokens"), "int8"),
    "streaming": (policies.Streaming(budget=0.4, block_size=8), None),
    "h2o": (policies.H2O(budget=0.4, block_size=8), None),
    "headkv-int8": (policies.HeadKV(budget=0.4, block_size=8), "int8"),
}
SMALL = "c_k5_nol2norm"
RUNS = [
    *((model, "full") for model in ("a_k10", "b_k6_sharedaln", SMALL, "infinity_a_small")),
    *((SMALL, case) for case in CASES if case != "full"),
]


@functools.lru_cache(maxsize=2)
def generate(model: str, case: str, attention: str):
    policy, kv_dtype = CASES[case]
    model = fixture_model(model)
    generator = greedy_generator(model, policy, attention=attention, kv_dtype=kv_dtype)
    results, _ = generator.run_batch(arrays_of(model, [1, 2]), np.arange(2, dtype=np.int32))
    return {name: np.asarray(a) for name, a in results.items()}


@pytest.mark.parametrize("kernel", often(KERNELS[1:], KERNELS))
@pytest.mark.parametrize(("model", "case"), often([(SMALL, "h2o")], RUNS))
def test_greedy_tokens_are_those_of_the_reference(model, case, kernel):
    expected, found = (generate(model, case, name) for name in ("reference", kernel))
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=2e-3)


@functools.cache
def wide_model() -> Model:
    """Random weights, rounded to bfloat16; heads of 64: Mosaic GPU's kernels take no smaller ones,
    which the fixtures have, and no float32."""
    schedule = Schedule.square((1, 2, 3, 5))
    sizes = dict(vocab_size=32, z_channels=4, schedule=schedule)
    config = VARConfig(depth=2, embed_dim=128, num_heads=2, num_classes=4, **sizes)
    codec_config = VQVAEConfig(ch=32, ch_mult=(1,), **sizes)
    transformer = nnx.jit(lambda rngs: VAR(config, rngs=rngs))(nnx.Rngs(0))
    transformer.head.kernel.set_value(20 * transformer.head.kernel[...])  # tokens far from ties
    # as they begin to be trained, branches add next to nothing: attention would not be seen
    gates = jnp.zeros((2, 6, 128)).at[:, :2].set(1).reshape(2, -1)
    transformer.blocks.modulation.bias.set_value(gates)
    transformer.blocks.proj.kernel.set_value(8 * transformer.blocks.proj.kernel[...])
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), transformer)
    codec = nnx.jit(lambda rngs: VQVAE(codec_config, rngs=rngs))(nnx.Rngs(1))
    parts = {"transformer": rounded, "codec": codec}
    return Model("wide", parts, {"family": "var"})


def wide_logits(case: str, attention: str, given=None) -> dict:
    """Greedy tokens and logits of `wide_model`. given: tokens to go on with instead: where two
    logits are nearly equal, bfloat16 may choose either, and what follows is another picture."""
    policy, kv_dtype = CASES[case]
    generator = greedy_generator(
        wide_model(),
        policy,
        attention=attention,
        kv_dtype=kv_dtype or "bfloat16",
        layers="unroll",  # sums and norms are a kernel there
    )
    images = np.arange(2, dtype=np.int32)
    found, _ = generator.run_batch(np.array([1, 2]), images, given=given)
    return {name: np.asarray(found[name], np.float32) for name in ("tokens", "logits")}


def check_wide(case: str, attention: str) -> None:
    expected = wide_logits(case, "reference")
    tokens = expected["tokens"].astype(np.int32)
    found = wide_logits(case, attention, tokens)
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=0.03)
    first, second = np.sort(expected["logits"], axis=-1)[..., [-1, -2]].transpose(2, 0, 1)
    clear = first - second > 0.06
    assert clear.sum() > 10
    np.testing.assert_array_equal(found["logits"].argmax(-1)[clear], tokens[clear])


@pytest.mark.slow
@gpu_simulation.needed
@pytest.mark.parametrize("case", ["full", "full-int8", "streaming", "h2o"])
def test_wide_heads_through_the_simulator_of_gpus(case, monkeypatch):
    launched, launch = [], mosaic_residual.add_and_normalize

    def counted(*arguments, **options):
        launched.append(arguments)
        return launch(*arguments, **options)

    monkeypatch.setattr(mosaic_residual, "add_and_normalize", counted)
    check_wide(case, "mosaic-interpret")
    assert launched


def test_equal_kernels_are_lowered_once(monkeypatch):
    """For a Hopper GPU that is not here. They are the same ones whatever was lowered before: JAX
    numbers names of kernels, and compiles kernels of other names, and programs with them, anew."""
    monkeypatch.setattr(target, "platform", lambda: "gpu")
    monkeypatch.setattr(target, "capability", lambda: "9.0")
    options = dict(attention="mosaic", kv_dtype="bfloat16", layers="unroll")
    generator = greedy_generator(wide_model(), policies.Full(block_size=8), **options)
    given = generator.decode_arguments(varjax.conditions.resolve(generator.model, labels=[1, 2]))

    def kernels() -> list[str]:
        jax.clear_caches()
        lowered = jax.jit(decode).trace(*given).lower(lowering_platforms=("cuda",))
        return re.findall(r'kernel_hash = "([^"]*)"', lowered.as_text())

    first = kernels()
    assert len(set(first)) == len(first) == 5  # three of norms, keys and values, attention
    assert kernels() == first


# --- rows in 8 bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", often((SMALL,), (SMALL, "b_k6_sharedaln", "infinity_a_small")))
def test_rows_in_8_bits_flow_between_products(name, monkeypatch):
    """Rows that stay in 8 bits on their way, with scales that the next kernel applies, are those
    that products make themselves. Here plain JAX takes the place of the kernels."""
    model, index = fixture_model(name).quantized("fp8", emulated=True), np.arange(2, dtype=np.int32)

    def run():
        generator = greedy_generator(model, attention="reference", layers="unroll")
        return generator.run_batch(arrays_of(model, [1, 2]), index)[0]

    expected, products, sums = run(), [], quantized.Quantized.sums
    monkeypatch.setattr(
        quantized.Quantized, "sums", lambda m, x: (products.append(m.shape), sums(m, x))[1]
    )
    monkeypatch.setattr(stream, "has_kernel", lambda implementation: True)
    found = run()
    width = model.parts["transformer"].config.embed_dim
    kinds = {(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)}
    assert set(products) == kinds
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    # a number that lies between two of e4m3 may go either way; few do
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(CASES))
def test_wide_heads_on_a_gpu(case):
    check_wide(case, implementations.preferred())
