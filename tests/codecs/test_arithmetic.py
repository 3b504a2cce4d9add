"""What `decode_dtype` means on a device, and what it does to pixels of every family."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import models_under_test as models
from tests.codecs import rounded
from tests.often import often
from varjax.codecs import arithmetic
from varjax.errors import UserError

GPU = ("gpu", "9.0")


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("auto", ("cpu",), "float32"),
        ("auto", GPU, "bfloat16"),
        ("auto", ("tpu",), "bfloat16"),
        ("tf32", ("gpu", "8.0"), "tf32"),
        ("tf32", ("gpu", "12.0"), "tf32"),
        ("float32", GPU, "float32"),
        ("float32", ("tpu",), "float32"),
        ("bfloat16", ("cpu",), "bfloat16"),
        (jnp.bfloat16, ("cpu",), "bfloat16"),
        (np.dtype("float32"), GPU, "float32"),
    ],
)
def test_what_a_device_decodes_in(asked, device, expected):
    assert arithmetic.resolve(asked, *device) == expected


@pytest.mark.parametrize(
    ("asked", "device", "message"),
    [
        ("tf32", ("cpu",), r"^x=tf32: a CPU has no TF32.*\(here\): choose auto, bfloat16 or flo"),
        ("tf32", ("tpu",), "a TPU has no TF32"),
        ("tf32", ("gpu", "7.5"), "compute capability 8.0 or higher, not compute capability 7.5"),
        ("tf32", ("gpu", None), "not an unknown capability"),
        ("tf32", ("gpu", "gfx942"), "needs an NVIDIA GPU"),
        ("tensorfloat32", GPU, "unknown x 'tensorfloat32': choose one of auto, bfloat16, tf32"),
        ("float16", GPU, "unknown x 'float16'"),
        (None, GPU, "unknown x None"),
        (jnp.int8, GPU, "unknown x 'int8'"),
    ],
)
def test_what_no_device_decodes_in(asked, device, message):
    capability = device[1] if len(device) > 1 else None
    with pytest.raises(UserError, match=message):
        arithmetic.resolve(asked, device[0], capability, "here", "x")


def test_auto_here_is_exact():
    assert arithmetic.resolve_here("auto") == "float32"  # tests run on a CPU


@pytest.mark.parametrize("family", often(("LlamaGen", "Lumina-mGPT"), rounded.FIXTURES))
def test_pixels_of_every_family(family):
    """bfloat16 rounds operands and what it stores to 7 bits of mantissa, TF32 (emulated) operands
    alone to 10: at least 15 dB less of an error. Neither breaks a picture, both change it."""
    model = models.fixture_model(rounded.FIXTURES[family])
    codes = np.random.default_rng(0).normal(size=(2, *model.code_map)).astype(np.float32)
    exact = rounded.decoded(model, codes, "float32")
    again = rounded.decoded(model, codes, "float32")
    np.testing.assert_array_equal(exact, again)
    found = {d: rounded.decoded(model, codes, d) for d in ("bfloat16", "tf32")}
    for pixels in found.values():
        assert pixels.dtype == np.float32 and pixels.shape == exact.shape
    decibels = {name: rounded.psnr(pixels, exact) for name, pixels in found.items()}
    assert 35 < decibels["bfloat16"] < decibels["tf32"] - 15 < 80, decibels


# decibels of bfloat16 and of TF32 (emulated) in docs/lab/precision.md
DECIBELS = {
    "demo": (57.0, 83.8),
    "demo-llamagen": (62.1, 89.3),
    "VAR": (46.5, 69.6),
    "Infinity": (45.0, 71.3),
    "LlamaGen": (57.1, 79.1),
    "Janus-Pro": (44.0, 76.6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DECIBELS)
def test_pixels_of_codes_that_were_drawn(name):
    found = rounded.distances(name)
    print(name, {dtype: f"{value:.1f} dB" for dtype, value in found.items()})
    np.testing.assert_allclose(list(found.values()), DECIBELS[name], atol=1.5)
