"""A token's layer as products that normalise, gate and add the stream: what LlamaGen and Janus draw
through them is what they draw without, on every fixture of LlamaGen's originals.

By default in the plain JAX of these products; with --slow in JAX's simulator of GPUs, which
multiplies float32, unlike the chip.
"""

import functools

import jax
import numpy as np
import pytest

import varjax
from pallas_kernels import target
from pallas_kernels.token_products import mosaic_gpu
from tests import models_under_test as models
from tests.generation import test_llamagen_parity as parity
from tests.generation.test_token_engine import generator, greedy
from tests.often import often
from tests.pallas_kernels import gpu_simulation
from varjax.core.next_token import TokenLayers
from varjax.core.sampling import Sampling
from varjax.models.llama import decoder
from varjax.models.llama.token_products import TokenProducts

SIMULATED = pytest.param("mosaic-interpret", marks=[gpu_simulation.needed, pytest.mark.slow])


@pytest.fixture(params=["reference", SIMULATED])
def products(request, monkeypatch):
    """Layers are products of this implementation; attention stays as it is."""
    monkeypatch.setattr(mosaic_gpu, "DTYPES", ("float32", *mosaic_gpu.DTYPES))

    def few(self, implementation):
        return TokenProducts(self, request.param)

    monkeypatch.setattr(decoder.LlamaDecoder, "token_layers", few)
    jax.clear_caches()  # programs of other tests are not those of these products


@pytest.mark.slow
@pytest.mark.parametrize("file", often(("gpt_t2i_gen",), parity.CASES))
def test_as_the_original(file, products):
    """Greedy tokens, and guided logits."""
    arrays = models.llamagen_fixture(file)
    model, sampling = models.fixture_model(parity.CASES[file]), greedy(arrays)
    images = len(arrays["tokens"])
    options = {"plan": varjax.plan(model.geometry_for(sampling)), "sampling": sampling}
    found = generator(parity.CASES[file], **options, keep_logits=True, batch_size=images)
    results, _ = found.run_batch(parity.condition_of(arrays), np.arange(images))
    np.testing.assert_array_equal(results["tokens"], arrays["tokens"])
    parity.close(results["logits"], parity.mixed(arrays), parity.LOGITS)


@functools.cache
def with_headkv():
    """Tokens, and what the cache holds at the end."""
    sampling = Sampling(cfg=2.0, greedy=True)
    found = generator("llamagen_c2i", "headkv", 0.6, sampling=sampling, batch_size=3)
    results, caches = found.run_batch(np.array([1, 19, 7], np.int32), np.arange(3))
    return np.asarray(results["tokens"]), [np.asarray(c.position) for c in caches]


EXPECTED = []


@pytest.fixture(scope="module", autouse=True)
def without():
    EXPECTED[:] = [with_headkv()]
    with_headkv.cache_clear()


@pytest.mark.slow
def test_a_policy_decides_the_same(products):
    """The sum of queries that it looks at is made by the product."""
    found = with_headkv()
    with_headkv.cache_clear()
    jax.tree.map(np.testing.assert_array_equal, found, EXPECTED[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({}, "take bfloat16 and float16, not float32"), ({"model_axis": "model"}, "divided over")],
)
def test_a_layer_that_does_not_fit_is_as_before(changes, reason, monkeypatch):
    transformer = models.fixture_model("llamagen_c2i").transformer
    for name, value in changes.items():
        monkeypatch.setattr(transformer, name, value)
    with pytest.warns(UserWarning, match=f"products are XLA's: .*{reason}"):
        assert type(transformer.token_layers("mosaic")) is TokenLayers


def test_others_have_none(monkeypatch, recwarn):
    """Neither do weights that the kernel does not take, where nobody has named it."""
    transformer = models.fixture_model("llamagen_c2i").transformer
    for name in (None, "reference", "tpu", "triton"):
        assert type(transformer.token_layers(name)) is TokenLayers
    monkeypatch.setattr(target, "platform", lambda: "gpu")
    monkeypatch.setattr(target, "capability", lambda: "9.0")
    assert type(transformer.token_layers(None)) is TokenLayers  # float32
    assert not recwarn.list
