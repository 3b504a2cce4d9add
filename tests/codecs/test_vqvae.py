"""The codec against arrays of the original implementation.

Tolerances are for float32 on CPU, about ten times the distance of the reference from float64.
"""

import dataclasses
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ported_weights import rules
from ported_weights.readers import sources
from ported_weights.tables.codecs import vqvae_rules
from tests.often import often
from varjax.codecs.vqvae import VQVAE, VQVAEConfig
from varjax.storage import parameters

FIXTURES = Path(__file__).parents[1] / "fixtures" / "var"
WEIGHTS = {"vae_small": "vae.safetensors", "vae_full": "vae.pth"}
F_TOLERANCE, MAP_TOLERANCE, IMAGE_TOLERANCE = 1e-4, 3e-5, 5e-5


def _load(name: str) -> VQVAE:
    folder = FIXTURES / name
    config = VQVAEConfig.from_published(json.loads((folder / "config.json").read_text()))
    tensors = sources.open_source(folder / WEIGHTS[name]).tensors
    abstract = parameters.abstract(VQVAE, config)
    return jax.device_put(rules.apply(vqvae_rules(config), tensors, abstract)[0])


def _last(array: np.ndarray) -> np.ndarray:
    """Channels first to channels last."""
    return np.moveaxis(array, -3, -1)


@pytest.fixture(scope="module", params=often(("vae_small",), WEIGHTS))
def case(request):
    """(codec, reference arrays, function that samples an image as the reference does)."""
    arrays = np.load(FIXTURES / request.param / "vqvae.npz")
    offset, stride = int(arrays["image_offset"]), int(arrays["image_stride"])
    return _load(request.param), arrays, lambda x: x[:, offset::stride, offset::stride]


def test_encoder_and_tokens(case):
    codec, arrays, _ = case
    images = _last(arrays["image_u8"]) / np.float32(127.5) - 1
    encoded, f, tokens = jax.jit(
        lambda codec, x: (codec.encoder(x), codec.encode(x), codec.images_to_tokens(x))
    )(codec, images)
    chex.assert_trees_all_close(encoded, _last(arrays["enc_out"]), rtol=0, atol=F_TOLERANCE)
    chex.assert_trees_all_close(f, _last(arrays["f"]), rtol=0, atol=F_TOLERANCE)
    chex.assert_trees_all_equal(tokens, arrays["idx"])


def test_quantizer(case):
    codec, arrays, _ = case
    quantizer, tokens = codec.quantizer, jnp.asarray(arrays["idx"])
    found, maps, inputs = jax.jit(
        lambda q, f, tokens: (q.quantize(f)[1], q.code_maps(tokens), q.teacher_inputs(tokens))
    )(quantizer, _last(arrays["f"]), tokens)
    chex.assert_trees_all_equal(found, tokens)
    chex.assert_trees_all_close(maps, _last(arrays["f_hat_per_scale"]), rtol=0, atol=MAP_TOLERANCE)
    chex.assert_trees_all_close(inputs, arrays["var_input"], rtol=0, atol=MAP_TOLERANCE)


def test_decoder(case):
    codec, arrays, sample = case
    decode = jax.jit(VQVAE.decode, static_argnames="clip")
    final = jnp.asarray(_last(arrays["f_hat_per_scale"])[-1])
    found = sample(decode(codec, final))
    chex.assert_trees_all_close(found, _last(arrays["recon"]), rtol=0, atol=IMAGE_TOLERANCE)
    raw = sample(decode(codec, _last(arrays["f_hat_rand"]), clip=False))
    expected = _last(arrays["decoder_raw_rand"])
    chex.assert_trees_all_close(raw, expected, rtol=0, atol=IMAGE_TOLERANCE)


@pytest.mark.parametrize("share", often([1], [0, 1, 2]))
def test_published_names_of_phi(share):
    """The three ways in which published checkpoints name the phi convolutions are all read."""
    config = dataclasses.replace(_load("vae_small").config, share_quant_resi=share)
    tensors = dict(sources.open_source(FIXTURES / "vae_small" / "vae.safetensors").tensors)
    old = "quantize.quant_resi.qresi_ls."
    phi = {n: tensors.pop(n) for n in list(tensors) if n.startswith(old)}
    for kind in ("weight", "bias"):
        for i in range(config.num_phi):
            name = "qresi" if share == 1 else f"qresi_ls.{i}" if share else str(i)
            tensors[f"quantize.quant_resi.{name}.{kind}"] = phi[f"{old}{i % 4}.{kind}"]
    abstract = parameters.abstract(VQVAE, config)
    codec = rules.apply(vqvae_rules(config), tensors, abstract)[0]
    reference = _load("vae_small").quantizer.phi_kernel[...]
    expected = [reference[i % 4] for i in range(config.num_phi)]
    chex.assert_trees_all_equal(codec.quantizer.phi_kernel[...], np.stack(expected))
