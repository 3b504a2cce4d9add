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

from ported_weights import rules
from ported_weights.readers import sources
from ported_weights.tables.codecs import bsq_rules
from ported_weights.tables.registry import RULE_TABLES
from tests.models_under_test import sums_of_bits
from varjax.codecs import arithmetic
from varjax.codecs import bsq as quantizer
from varjax.codecs.bsq import BSQVAE, BSQConfig
from varjax.codecs.codes import flatten_maps
from varjax.core.errors import UserError
from varjax.core.maps import patchify, resize_area, resize_bilinear
from varjax.core.sequence import Schedule
from varjax.storage import parameters

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
        return h, codec.images_to_bits(images, schedule), list(quantizer.residuals(h, schedule))

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
    maps = sums_of_bits(bits, schedule)
    later = list(zip(maps[:-1], schedule.maps[1:], strict=True))
    inputs = flatten_maps([patchify(resize_bilinear(m, size), patch) for m, size in later])
    return maps, inputs, [resize_area(m, size) for m, size in later]


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


@pytest.mark.slow
def test_bits_to_images(case):
    codec, arrays, schedule, _ = case
    decode = jax.jit(lambda codec, bits: codec.decode(sums_of_bits(bits, schedule)[-1]))
    images = decode(codec, arrays["bits"])
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


# --- configuration --------------------------------------------------------------------------------


WRONG = {
    "groups": ({"base_ch": 40}, "40 channels, which neither 32 nor 24"),
    "patch": ({"patch_size": 12}, "patch_size is 12, it must be a power of two"),
    "levels": ({"encoder_ch_mult": [1, 2]}, r"encoder_ch_mult is \[1, 2\]: patch_size 16 needs 5"),
    "multipliers": ({"decoder_ch_mult": [1, "a"]}, "decoder_ch_mult .* must list whole numbers"),
    "wide": ({"encoder_ch_mult": [10**6] * 5}, "base_ch . encoder_ch_mult is"),
    "attention": ({"cnn_attention": "yes"}, "cnn_attention='yes' is not supported"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_values(values, message):
    with pytest.raises(UserError, match=message):
        BSQConfig.from_published(values)
