"""The program that decodes pixels: chunks, arithmetic, memory, options of its compilers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models_under_test import fixture_model
from varjax.codecs import arithmetic, autoencoder
from varjax.codecs.autoencoder import cast
from varjax.generation import pixels, program
from varjax.generation.pixels import Decoding

NAME = "c_k5_nol2norm"


def test_decoding_in_chunks_gives_the_same_pixels(monkeypatch):
    model, decoding, images = fixture_model(NAME), Decoding(), 5
    codec, shape = model.codec, (images, *model.config.code_map)
    code_map = jax.random.normal(jax.random.key(0), shape)
    expected = jax.jit(lambda codec: (codec.decode(code_map) + 1) / 2)(codec)
    each = decoding.image_bytes(codec, shape[1:3])
    monkeypatch.setattr(pixels, "DECODER_BYTES", 2 * each)
    assert decoding.images_at_once(codec, shape[1:3], images) == min(images, 2)
    decode = jax.jit(pixels.decode, static_argnums=2)
    np.testing.assert_allclose(decode(codec, code_map, decoding), expected, atol=1e-5)


def test_a_decoder_in_bfloat16_rounds_pixels():
    model = fixture_model(NAME)
    code_map = jnp.zeros((2, *model.config.code_map)) + 0.1
    code_map += jax.random.normal(jax.random.key(0), code_map.shape)
    traced = pixels.trace_pixels(model.codec, code_map, Decoding("bfloat16"))
    convolutions = [line for line in str(traced.jaxpr).splitlines() if "conv_general" in line]
    assert convolutions and all("bf16[" in line for line in convolutions)
    exact = pixels.trace_pixels(model.codec, code_map, Decoding("float32"))
    highest = "precision=(Precision.HIGHEST, Precision.HIGHEST)"  # GPUs use no TF32 then
    assert str(exact.jaxpr).replace("\n", "").count(highest) >= len(convolutions)
    found = traced.lower().compile()(tuple(jax.tree.leaves(model.codec)), code_map)
    expected = jax.jit(pixels.decode, static_argnums=2)(model.codec, code_map, Decoding())
    assert found.dtype == jnp.float32
    error = np.sqrt(np.square(found - expected).mean())
    assert 1e-5 < error < 0.01


def test_how_many_images_at_once(monkeypatch):
    """At least one, at most all, and as many as are asked for."""
    codec, code_map = fixture_model(NAME).codec, (16, 16)
    for dtype in arithmetic.DTYPES:
        each = Decoding(dtype).image_bytes(codec, code_map)
        monkeypatch.setattr(pixels, "DECODER_BYTES", 4 * each)
        asked = [Decoding(dtype, n).images_at_once(codec, code_map, 8) for n in (None, 1, 5, 9)]
        assert asked == [4, 1, 5, 8]
        monkeypatch.setattr(pixels, "DECODER_BYTES", 1)
        assert Decoding(dtype).images_at_once(codec, code_map, 8) == 1


def test_compiler_options_give_way_to_flags(monkeypatch):
    """GPUs do not try all algorithms, and start one graph; who has set these flags has decided."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for platform in ("cpu", "tpu"):
        assert pixels.compiler_options(platform) == program.compiler_options(platform)
    usual = program.compiler_options("gpu")
    untuned, graph = pixels.UNTUNED, pixels.ONE_GRAPH
    assert pixels.compiler_options("gpu") == usual | untuned | graph
    for flag in (*untuned, "xla_gpu_autotune_level"):
        monkeypatch.setenv("XLA_FLAGS", f"--{flag}=0")
        assert pixels.compiler_options("gpu") == usual | graph
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert pixels.compiler_options("gpu") == usual | untuned


def test_the_options_exist():
    """JAX refuses names and values that it does not know."""
    options = pixels.compiler_options("gpu")
    assert jax.jit(jnp.sin).lower(1.0).compile(compiler_options=options)(0.0) == 0


# --- what GPUs do differently ---


def test_the_last_convolution_has_more_channels_on_gpus(monkeypatch):
    """In bfloat16; the others are cut off."""
    last = fixture_model(NAME).codec.decoder.conv_out
    x = jax.random.normal(jax.random.key(0), (2, 5, 7, last.in_features))
    small = cast((last, x), jnp.bfloat16)
    expected = [nnx.Conv.__call__(*given) for given in (small, (last, x))]
    monkeypatch.setattr(autoencoder.target, "platform", lambda: "gpu")
    found = [autoencoder._few_channels(*given) for given in (small, (last, x))]
    text = str(jax.make_jaxpr(autoencoder._few_channels)(*small))
    assert f"bf16[2,5,7,{autoencoder.TENSOR_CORE_CHANNELS}]" in text
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("mean", [0, 30])
def test_norms_of_bfloat16_read_numbers_once(mean):
    """And lose no more than bfloat16 does."""
    codec = fixture_model(NAME).codec
    norm = codec.decoder.norm_out
    shape = (2, 32, 32, norm.scale[...].shape[0])
    x = (mean + jax.random.normal(jax.random.key(0), shape)).astype(jnp.bfloat16)
    found, exact = norm(x).astype(jnp.float32), norm(x.astype(jnp.float32))
    rounded = exact.astype(jnp.bfloat16).astype(jnp.float32)
    errors = [float(jnp.sqrt(jnp.square(a - exact).mean())) for a in (found, rounded)]
    assert errors[0] < 1.05 * errors[1]
