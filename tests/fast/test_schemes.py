"""Products whose activations are in 8 bits, too: rounding, scales, chips that have them, and what
is refused elsewhere. On this machine they are emulated in float32, which holds products of such
numbers exactly."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from pallas_kernels import chips
from pallas_kernels.residual.reference import rows_8
from tests.fast.test_quantized import random
from tests.models_under_test import FAMILIES, arrays_of, fixture_model, greedy_generator
from tests.often import often
from varjax.core.errors import UserError
from varjax.fast import quantized, schemes
from varjax.fast.quantized import quantize
from varjax.fast.schemes import SCHEMES, check_widths, why_not

BOTH = ("w8a8", "fp8")
EMULATED = {name: dataclasses.replace(SCHEMES[name], emulated=True) for name in BOTH}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [1, 2**20])
@pytest.mark.parametrize("name", BOTH)
def test_products(name, most, dtype, monkeypatch):
    """The sums of products of rounded numbers, times both scales: in float64, where a few numbers
    of a channel are added at a time, and by the product that chips have."""
    monkeypatch.setattr(quantized, "CPU_BYTES", most)
    x, matrix = random(2, 3, 32, dtype=dtype), random(32, 48)
    eight = quantize(matrix, EMULATED[name], dtype)
    assert eight.shape == (32, 48) and eight.array.shape == (48, 32)
    rows = rows_8(x.reshape(6, 32), eight.scheme)
    numbers, scale = (np.asarray(a, np.float64) for a in (rows.numbers, rows.scale))
    expected = (numbers @ np.asarray(eight.array, np.float64).T * scale * eight.scale).reshape(
        2, 3, 48
    )
    size = np.abs(expected).max()
    found = eight.product(x, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * size)
    assert eight.product(x).dtype == dtype
    monkeypatch.setattr(quantized, "why_not_here", lambda scheme: None)
    native = dataclasses.replace(eight, scheme=SCHEMES[name]).product(x, jnp.float32)
    np.testing.assert_allclose(native, found, rtol=1e-5, atol=1e-6 * size)


DRAWING = (FAMILIES["var"], "llamagen_c2i", FAMILIES["infinity"], "janus_small", "lumina_groups")
OFTEN = [(FAMILIES["var"], "fp8")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), often(OFTEN, itertools.product(DRAWING, BOTH)))
def test_every_family_draws(name, scheme, monkeypatch):
    """The product of chips and its emulation draw the same tokens, whose logits are near those of
    float32 weights."""
    model, index = fixture_model(name), np.arange(2)
    segments = "auto" if model.draws_tokens else 1

    def run(model, given=None):
        generator = greedy_generator(model, segments=segments)
        return generator.run_batch(arrays_of(model, index), index, given=given)[0]

    emulated = run(model.quantized(scheme, emulated=True))
    plain = run(model, given=emulated["tokens"])
    off = np.sqrt(np.square(emulated["logits"] - plain["logits"]).mean())
    # of random weights; trained ones are nearer (docs/lab/precision.md)
    most = {"w8a8": 0.1, "fp8": 0.25}[scheme]
    assert 0 < off < most * np.sqrt(np.square(plain["logits"]).mean())
    monkeypatch.setattr(quantized, "why_not_here", lambda scheme: None)
    native = run(model.quantized(scheme))
    np.testing.assert_array_equal(native["tokens"], emulated["tokens"])
    np.testing.assert_allclose(native["logits"], emulated["logits"], atol=2e-3)


# --- chips ----------------------------------------------------------------------------------------

FP8 = set("tpu7x l4 rtx4080 rtx4090 rtx5090 h100 h200 b200".split())
INT8 = FP8 - {"tpu7x"} | set("tpu-v5e tpu-v5p tpu-v6e a100 a6000 rtx3090".split())


def test_chips_that_multiply_in_8_bits():
    for name, chip in chips.CHIPS.items():
        assert why_not(SCHEMES["int8"], chip) is None
        for scheme, able in (("fp8", FP8), ("w8a8", INT8)):
            why = why_not(SCHEMES[scheme], chip)
            assert (why is None) == (name in able)
            if why:
                assert scheme in why and f"and {name} does not: choose int8" in why
                assert why_not(EMULATED[scheme], chip) is None


@pytest.mark.parametrize(
    ("kind", "capability", "able"),
    [
        ("NVIDIA H200", "9.0", ("w8a8", "fp8")),
        ("NVIDIA A100-SXM4-40GB", "8.0", ("w8a8",)),
        ("NVIDIA L40S", "8.9", ("w8a8", "fp8")),  # in no table
        ("Tesla V100", "7.0", ()),
        ("AMD Instinct MI300X", "gfx942", ()),
        ("TPU v5 lite", None, ("w8a8",)),
        ("TPU7x", None, ("fp8",)),
        ("TPU v4", None, ()),
    ],
)
def test_devices(kind, capability, able, monkeypatch):
    monkeypatch.setattr(schemes.target, "platform", lambda: "gpu" if capability else "tpu")
    monkeypatch.setattr(schemes.target, "device_kind", lambda: kind)
    monkeypatch.setattr(schemes.target, "capability", lambda: capability)
    for scheme in BOTH:
        assert (schemes.why_not_here(SCHEMES[scheme]) is None) == (scheme in able)
    assert schemes.why_not_here(SCHEMES["int8"]) is None


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", BOTH)
def test_this_machine(scheme):
    with pytest.raises(UserError, match=f"weights_dtype={scheme} needs.*cpu does not: choose int8"):
        varjax.load(weights_dtype=scheme)
    model = varjax.load(dtype="float32").quantized(scheme)
    with pytest.raises(UserError, match=f"{scheme} needs a chip"):
        varjax.generation.generator.Generator(model, batch_size=1).compile()


def test_widths():
    check_widths(SCHEMES["fp8"], "qkv", (2, 64, 48))
    check_widths(SCHEMES["int8"], "qkv", (2, 63, 47))
    with pytest.raises(UserError, match="multiples of 16; qkv is 64 x 40: choose int8"):
        check_widths(SCHEMES["fp8"], "qkv", (2, 64, 40))
    model = varjax.describe()
    config = dataclasses.replace(model.config, vocab_size=4100)
    parts = {**model.parts, "transformer": model.family.tree["transformer"].abstract(config)}
    odd = dataclasses.replace(model, parts=parts)
    with pytest.raises(UserError, match="w8a8 takes.*head/kernel is 256 x 4100"):
        odd.quantized("w8a8")
    assert odd.quantized("int8").weights_dtype == "int8"


def test_one_scheme_at_a_time():
    eight = varjax.describe().quantized("int8")
    assert eight.quantized("int8") is eight
    with pytest.raises(UserError, match="in int8 already"):
        eight.quantized("fp8")
    with pytest.raises(UserError, match="unknown weights_dtype 'fp4'.*int8, w8a8, fp8"):
        eight.quantized("fp4")
