"""What `decode_dtype` means on a device, and what it does to pixels of every family."""

import functools

import jax
import numpy as np
import pytest

from tests import models_under_test as models
from tests.often import often
from varjax.codecs import arithmetic
from varjax.core.errors import UserError
from varjax.generation import pixels

GPU = ("gpu", "9.0")
FIXTURES = {
    "VAR": "a_k10",
    "Infinity": "infinity_a",
    "LlamaGen": "llamagen_c2i",
    "Janus-Pro": "janus_tiny",
    "Lumina-mGPT": "lumina_tiny",
}


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("auto", ("cpu",), "float32"),
        ("auto", GPU, "bfloat16"),
        ("auto", ("tpu",), "bfloat16"),
        ("tf32", ("gpu", "8.0"), "tf32"),
        ("float32", GPU, "float32"),
        ("bfloat16", ("cpu",), "bfloat16"),
        (np.dtype("float32"), GPU, "float32"),
    ],
)
def test_what_a_device_decodes_in(asked, device, expected):
    assert arithmetic.resolve(asked, *device) == expected


@pytest.mark.parametrize(
    ("asked", "device", "message"),
    [
        ("tf32", ("cpu",), r"^x=tf32: a CPU has no TF32.*\(here\): choose auto, bfloat16 or flo"),
        ("tf32", ("gpu", "7.5"), "compute capability 8.0 or higher, not compute capability 7.5"),
        ("tf32", ("gpu", None), "not an unknown capability"),
        ("tf32", ("gpu", "gfx942"), "needs an NVIDIA GPU"),
        ("tensorfloat32", GPU, "unknown x 'tensorfloat32': choose one of auto, bfloat16, tf32"),
        (None, GPU, "unknown x None"),
    ],
)
def test_what_no_device_decodes_in(asked, device, message):
    capability = device[1] if len(device) > 1 else None
    with pytest.raises(UserError, match=message):
        arithmetic.resolve(asked, device[0], capability, "here", "x")


@pytest.mark.slow
@pytest.mark.parametrize("family", often(("LlamaGen", "Lumina-mGPT"), FIXTURES))
def test_pixels_of_every_family(family):
    """bfloat16 rounds operands and what it stores to 7 bits of mantissa: pictures change by
    little."""
    model = models.fixture_model(FIXTURES[family])
    codes = jax.random.normal(jax.random.key(0), (2, *model.code_map))

    @functools.partial(jax.jit, static_argnums=2)
    def decode(codec, codes, dtype):
        return pixels.decode(codec, codes, pixels.Decoding(dtype))

    exact, rough = (np.asarray(decode(model.codec, codes, d)) for d in ("float32", "bfloat16"))
    assert rough.dtype == np.float32 and rough.shape == exact.shape
    decibels = -10 * np.log10(np.square(np.float64(rough) - exact).mean())
    assert 35 < decibels < 65, decibels
