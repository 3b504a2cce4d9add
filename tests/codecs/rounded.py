"""Decoders in the arithmetic of `varjax.codecs.arithmetic`, on a CPU: the pixels of codecs, and how
far they are from those in float32. A CPU has no TF32. Here operands of products and convolutions
are rounded to its 10 bits of mantissa, and sums are float32: an emulation.
"""

import jax
import numpy as np
from jax.extend.core import Literal

import varjax
from tests import models_under_test as models
from varjax.codecs import arithmetic
from varjax.engine import pixels
from varjax.model import Model

MANTISSA = 10  # bits of TF32; float32 has 23, bfloat16 7
PRODUCTS = ("conv_general_dilated", "dot_general")
FIXTURES = {
    "VAR": "a_k10",
    "Infinity": "infinity_a",
    "LlamaGen": "llamagen_c2i",
    "Janus-Pro": "janus_tiny",
    "Lumina-mGPT": "lumina_tiny",
}
EMBEDDED = ("demo", "demo-llamagen")


def decoded(model: Model, code_map, dtype: str) -> np.ndarray:
    """Pixels in [0, 1] of latent maps [B, P, Q, C]. dtype: one of `arithmetic.DTYPES`."""

    def decode(codec, code_map):
        return pixels.decode(codec, code_map, pixels.Decoding(dtype))

    if dtype == arithmetic.TF32:
        decode = with_rounded_operands(decode)
    return np.asarray(jax.jit(decode)(model.codec, code_map))


def with_rounded_operands(function):
    """The function with operands of all products and convolutions rounded as TF32 has them."""

    def run(*arguments):
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        found = _evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


def _evaluate(jaxpr, consts, arguments) -> list:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    for equation in jaxpr.eqns:
        given = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
        name, parameters = equation.primitive.name, equation.params
        if inner := parameters.get("jaxpr") or parameters.get("call_jaxpr"):
            assert name in ("jit", "pjit", "custom_jvp_call", "closed_call"), name  # no loops
            found = _evaluate(inner.jaxpr, inner.consts, given)
        else:
            if name in PRODUCTS:
                given = [jax.lax.reduce_precision(a, 8, MANTISSA) for a in given]
            found = equation.primitive.bind(*given, **parameters)
            found = found if equation.primitive.multiple_results else [found]
        values |= zip(equation.outvars, found, strict=True)
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def code_maps(model: Model, images: int = 4) -> jax.Array:
    """Latent maps of images whose codes are drawn greedily for the first labels or prompts."""
    options = {"batch_size": images, "keep_logits": False, "segments": "auto"}
    generator = models.greedy_generator(model, **options)
    results, _ = generator.run_images(models.condition(model, range(images)), np.arange(images))
    return results["code_map"]


def psnr(found: np.ndarray, exact: np.ndarray) -> float:
    """Decibels of all pictures together, of numbers in [0, 1]."""
    return float(-10 * np.log10(np.square(np.float64(found) - exact).mean()))


def distances(name: str) -> dict[str, float]:
    """PSNR against float32 by dtype, of codes that an embedded model or a fixture draws: 4 images
    of a fixture, 16 of an embedded model."""
    own = name in EMBEDDED
    model = varjax.load(name, "float32") if own else models.fixture_model(FIXTURES[name])
    maps = code_maps(model, 16 if own else 4)
    exact = decoded(model, maps, arithmetic.FLOAT32)
    others = (arithmetic.BFLOAT16, arithmetic.TF32)
    return {dtype: psnr(decoded(model, maps, dtype), exact) for dtype in others}
