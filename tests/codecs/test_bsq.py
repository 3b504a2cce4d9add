"""The binary spherical VAE against arrays of the original implementation, and its configuration.

Tolerances are for float32 on CPU; the reference is 3e-6 (latents, codes) and 3e-5 (images) away
from float64.
"""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ported_weights import rules
from ported_weights.readers import sources
from ported_weights.tables.codecs import bsq_rules
from ported_weights.tables.registry import RULE_TABLES
from varjax.codecs import arithmetic
from varjax.codecs.bsq import model as quantizer
from varjax.codecs.bsq.model import BSQVAE, PRESETS, BSQConfig
from varjax.codecs.maps import resize_area
from varjax.errors import UserError
from varjax.nn import parameters
from varjax.schedule import Schedule

FIXTURES = Path(__file__).parents[1] / "fixtures" / "infinity"
CONFIGS = json.loads((FIXTURES / "configs.json").read_text())
# weights, arrays, side of the square of positions that a transformer token stands for
CASES = {
    "p16_small": ("bsqvae_p16_d16.pth", "bsqvae_p16_d16_small.npz", 1),
    "p8_256": ("bsqvae_p8_d8.safetensors", "bsqvae_p8_d8_256.npz", 2),
}
LATENT, IMAGE = 1e-4, 3e-4


def _load(file: str) -> BSQVAE:
    config = BSQConfig.from_published(CONFIGS[file.split(".")[0]])
    tensors = sources.open_source(FIXTURES / file, RULE_TABLES["BSQVAE"].signature).tensors
    abstract = parameters.abstract(BSQVAE, config)
    return jax.device_put(rules.apply(bsq_rules(config), tensors, abstract)[0])


def _last(array: np.ndarray) -> np.ndarray:
    """Channels first to channels last."""
    return np.moveaxis(array, -3, -1)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """(codec, reference arrays, schedule of the codec, patch)."""
    weights, arrays, patch = CASES[request.param]
    arrays = dict(np.load(FIXTURES / arrays))
    schedule = Schedule(tuple((int(h), int(w)) for h, w in arrays["schedule"]))
    return _load(weights), arrays, schedule, patch


def test_encoder_and_bits(case):
    codec, arrays, schedule, _ = case
    images = arrays["image_u8"] / np.float32(255) * 2 - 1

    @jax.jit
    def run(codec, images):
        h = codec.encode(images)
        return h, quantizer.features_to_bits(h, schedule), list(quantizer.residuals(h, schedule))

    h, bits, rests = run(codec, images)
    chex.assert_trees_all_close(h, _last(arrays["h"]), rtol=0, atol=LATENT)
    chex.assert_type(bits, jnp.uint8)
    chex.assert_trees_all_equal(bits, arrays["bits"])
    found = [r.reshape(len(h), -1, r.shape[-1]) for r in rests]
    chex.assert_trees_all_close(
        np.concatenate(found, axis=1), arrays["residual_in"], rtol=0, atol=LATENT
    )


def _code_maps(bits, schedule, patch):
    """Running sums, the transformer's inputs, sums shrunk by area as the original encoder gives."""
    maps = quantizer.code_maps(bits, schedule)
    pooled = [resize_area(m, size) for m, size in zip(maps[:-1], schedule.maps[1:], strict=True)]
    return maps, quantizer.teacher_inputs(bits, schedule, patch), pooled


def test_codes(case):
    """Sums of codes, and both ways of shrinking them: for the transformer, and by area."""
    _, arrays, schedule, patch = case
    maps, inputs, pooled = jax.jit(_code_maps, static_argnums=(1, 2))(
        arrays["bits"], schedule, patch
    )
    assert len(maps) == schedule.num_scales
    for name in ("z_quant", "summed_from_bits"):
        chex.assert_trees_all_close(maps[-1], _last(arrays[name]), rtol=0, atol=LATENT)
    chex.assert_trees_all_close(inputs, arrays["tf_input"], rtol=0, atol=LATENT)
    flat = np.concatenate([p.reshape(len(p), -1, p.shape[-1]) for p in pooled], axis=1)
    chex.assert_trees_all_close(flat, arrays["next_in_area"], rtol=0, atol=LATENT)


def test_bits_to_images(case):
    codec, arrays, schedule, _ = case
    decode = jax.jit(BSQVAE.bits_to_images, static_argnums=2)
    images = decode(codec, arrays["bits"], schedule)
    chex.assert_type(images, jnp.float32)
    assert float(jnp.abs(images).max()) <= 1
    for name in {"recon", "recon_from_bits", "recon_sub4"} & set(arrays):
        step = 4 if name.endswith("sub4") else 1
        found = images[:, ::step, ::step]
        chex.assert_trees_all_close(
            found, _last(arrays[name]), rtol=0, atol=IMAGE, custom_message=name
        )


@pytest.fixture(scope="module")
def tiny():
    """A codec of two levels with random weights that bfloat16 holds exactly."""
    config = BSQConfig(
        base_ch=24,
        encoder_ch_mult=(1, 1),
        decoder_ch_mult=(1, 1),
        num_res_blocks=1,
        patch_size=2,
        codebook_dim=6,
    )
    abstract = parameters.abstract(BSQVAE, config)
    rng = np.random.default_rng(0)
    draws = {n: 0.1 * rng.normal(size=x.shape) for n, x in parameters.named(abstract).items()}
    arrays = {n: np.float32(x.astype(jnp.bfloat16)) for n, x in draws.items()}
    return parameters.fill(abstract, arrays)


def test_image_to_bits_to_image(tiny):
    """Rows of a batch do not matter to each other."""
    schedule = Schedule.parse("1x1;2x3;4x5")
    images = np.random.default_rng(1).uniform(-1, 1, (2, 8, 10, 3)).astype(np.float32)

    @jax.jit
    def reconstruct(images):
        return tiny.bits_to_images(tiny.images_to_bits(images, schedule), schedule)

    found, again = reconstruct(images), reconstruct(images[::-1].copy())
    chex.assert_trees_all_close(found, again[::-1], rtol=0, atol=1e-5)
    chex.assert_equal_shape([found, images])
    assert float(jnp.std(found)) > 0.01


@pytest.mark.parametrize("dtype", arithmetic.DTYPES)
@pytest.mark.parametrize("outside", ["default", "highest"])
def test_types_and_precision(tiny, dtype, outside):
    """Convolutions run in the type asked for, float32 ones with full products on every device, TF32
    at the only precision that allows it; images are float32 all the same."""
    latents = jnp.zeros((1, 2, 3, 6))
    run = jax.make_jaxpr(lambda codec, h: codec.encode(codec.decode(h, dtype=dtype), dtype=dtype))
    with jax.default_matmul_precision(outside):
        jaxpr = run(tiny, latents)
    found = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert len(found) > 20
    assert {str(e.outvars[0].aval.dtype) for e in found} == {dtype.replace("tf32", "float32")}
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT
    assert {e.params["precision"] for e in found} == {(precision,) * 2}
    chex.assert_type(jaxpr.out_avals[0], jnp.float32)


# --- the quantiser alone --------------------------------------------------------------------------


def test_codes_have_length_one():
    values = quantizer.codes(jnp.array([[0, 1, 1, 0], [1, 1, 1, 1]], jnp.uint8), 4)
    chex.assert_trees_all_equal(values, np.array([[-0.5, 0.5, 0.5, -0.5], [0.5] * 4]))


@pytest.mark.parametrize("text", ["3x2", "2x2;4x6;3x4;6x4"])
def test_bits_explain_the_map(text):
    """Any schedule, also maps that shrink again: the rest is the map minus the sum of codes."""
    schedule = Schedule.parse(text)
    h = jax.random.normal(jax.random.key(3), (2, *schedule.final_map, 5)) / 2

    @jax.jit
    def run(h):
        bits = quantizer.features_to_bits(h, schedule)
        before = [jnp.zeros_like(h), *quantizer.code_maps(bits, schedule)[:-1]]
        pairs = zip(before, schedule.maps, strict=True)
        rest = [resize_area(h - total, size) for total, size in pairs]
        found = list(quantizer.residuals(h, schedule))
        return bits, rest, found, quantizer.teacher_inputs(bits, schedule)

    bits, rest, found, inputs = run(h)
    chex.assert_shape(bits, (2, schedule.total_tokens, 5))
    jax.tree.map(lambda a, b: chex.assert_trees_all_close(a, b, atol=1e-5), rest, found)
    chex.assert_shape(inputs, (2, schedule.total_tokens - schedule.tokens[0], 5))


def test_zero_is_bit_zero():
    schedule = Schedule.parse("1x1")
    assert not quantizer.features_to_bits(jnp.zeros((1, 1, 1, 3)), schedule).any()


def test_wrong_shapes_are_explained():
    config, schedule = (
        BSQConfig.from_published(CONFIGS["bsqvae_p16_d16"]),
        Schedule.parse("1x1;2x3"),
    )
    codec = parameters.abstract(BSQVAE, config)
    with pytest.raises(UserError, match="2 x 2 positions does not fit schedule 1x1;2x3"):
        quantizer.features_to_bits(jnp.zeros((1, 2, 2, 16)), schedule)
    with pytest.raises(UserError, match=r"\(1, 6, 16\) given: schedule 1x1;2x3 needs \[images, 7"):
        quantizer.code_maps(jnp.zeros((1, 6, 16), jnp.uint8), schedule)
    with pytest.raises(UserError, match="the tokenizer has 16 bits per position"):
        codec.bits_to_images(jnp.zeros((1, 7, 8), jnp.uint8), schedule)
    with pytest.raises(UserError, match="sides that are multiples of 16"):
        codec.encode(jnp.zeros((1, 32, 40, 3)))


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bsqvae_p16_d16", "bsqvae_p8_d8"])
def test_published_names_round_trip(name):
    config = BSQConfig.from_published(CONFIGS[name])
    assert config.to_published() == CONFIGS[name]
    assert json.loads(json.dumps(config.to_published())) == config.to_published()
    assert config.downsample == CONFIGS[name]["patch_size"]


@pytest.mark.parametrize("name", ["bsq-d32", "bsq-d56"])
def test_published_sizes_by_shape(name):
    """Images to bits to images, without arrays: 1024 pixels are 64 or 128 positions."""
    config = PRESETS[name]
    model = parameters.abstract(BSQVAE, config)
    side = 1024 // config.downsample
    schedule = Schedule.square((1, side // 2, side))
    images = jax.ShapeDtypeStruct((1, 1024, 1024, 3), "float32")
    bits = nnx.eval_shape(lambda m, x: m.images_to_bits(x, schedule), model, images)
    chex.assert_shape(bits, (1, schedule.total_tokens, config.codebook_dim))
    found = nnx.eval_shape(lambda m, b: m.bits_to_images(b, schedule), model, bits)
    chex.assert_equal_shape([found, images])


def test_more_levels_than_halvings():
    """Only the finest levels halve, and as many of the others double."""
    config = BSQConfig(
        base_ch=24,
        encoder_ch_mult=(1, 1, 2, 2),
        decoder_ch_mult=(1, 1, 2),
        patch_size=4,
        codebook_dim=6,
    )
    model = parameters.abstract(BSQVAE, config)
    halve = [level.downsample is not None for level in model.encoder.down]
    double = [level.upsample is not None for level in model.decoder.up]
    assert halve == [True, True, False, False] and double == [False, True, True]
    images = jax.ShapeDtypeStruct((2, 8, 12, 3), "float32")
    h = nnx.eval_shape(lambda m, x: m.encode(x), model, images)
    chex.assert_shape(h, (2, 2, 3, 6))
    chex.assert_equal_shape([nnx.eval_shape(lambda m, h: m.decode(h), model, h), images])


WRONG = {
    "unknown": (
        {"codebook_dims": 5},
        "unknown name 'codebook_dims': .*did you mean 'codebook_dim'",
    ),
    "bits": ({"codebook_dim": 0}, "codebook_dim is 0"),
    "too many bits": ({"codebook_dim": 10**9}, "codebook_dim is .*at most 256"),
    "groups": ({"base_ch": 40}, "40 channels, which neither 32 nor 24"),
    "patch": ({"patch_size": 12}, "patch_size is 12, it must be a power of two"),
    "levels": ({"encoder_ch_mult": [1, 2]}, r"encoder_ch_mult is \[1, 2\]: patch_size 16 needs 5"),
    "empty": ({"decoder_ch_mult": []}, r"decoder_ch_mult is \[\]"),
    "deep": ({"decoder_ch_mult": [1] * 100}, "decoder_ch_mult is .*needs 5 to 10 levels"),
    "multipliers": ({"decoder_ch_mult": [1, "a"]}, "decoder_ch_mult .* must list whole numbers"),
    "zero": ({"encoder_ch_mult": [1, 0, 1, 1, 1]}, "each at least 1"),
    "wide": ({"encoder_ch_mult": [10**6] * 5}, "base_ch . encoder_ch_mult is"),
    "attention": ({"cnn_attention": "yes"}, "cnn_attention is 'yes'; only \"no\" is supported"),
    "type": ({"base_ch": "128"}, "base_ch is '128', it must be a whole number"),
    "blocks": ({"num_res_blocks": 10**12}, "num_res_blocks is .*at most 16"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_values(values, message):
    with pytest.raises(UserError, match=message):
        BSQConfig.from_published(values)
