"""Generation through ported checkpoints against the original PyTorch implementation, float32."""

import itertools

import numpy as np
import pytest

from tests import models_under_test as models
from tests.often import often
from varjax import policies
from varjax.core.planner import plan_cache

pytestmark = pytest.mark.usefixtures("optimized")
MODELS = tuple(models.TOKENIZER)


def subsampled(images: np.ndarray, arrays: dict) -> np.ndarray:
    """[N, H, W, 3] -> the pixels that the fixture kept, [N, 3, h, w]."""
    offset, stride = int(arrays["image_offset"]), int(arrays["image_stride"])
    return np.moveaxis(np.asarray(images), -1, 1)[:, :, offset::stride, offset::stride]


def check_images(results, arrays: dict) -> None:
    """Latent maps and pictures of the original."""
    code_map = np.moveaxis(np.asarray(results["code_map"]), -1, 1)
    np.testing.assert_allclose(code_map, arrays["f_hat"], rtol=0, atol=models.CODE_MAP)
    np.testing.assert_allclose(
        subsampled(results["images"], arrays), arrays["image"], rtol=0, atol=models.IMAGE
    )


OFTEN = list(zip(MODELS, ("1.5", "4", "1.5"), strict=True))[2:]


@pytest.mark.parametrize(("name", "cfg"), often(OFTEN, itertools.product(MODELS, ("1.5", "4"))))
def test_generation_is_identical(name, cfg):
    """Drawn greedily, and with the original's tokens given; one program serves both."""
    arrays, given = models.fixture(name, f"gen_cfg{cfg}"), models.fixture(name, "gen_forced")
    model, images = models.fixture_model(name), len(arrays["labels"])
    assert len(given["labels"]) == images
    generator = models.greedy_generator(
        model, cfg=float(cfg), batch_size=images, segments="auto" if name == "c_k5_nol2norm" else 1
    )
    none = {"given": model.token_arrays.no_tokens(images), "given_scales": 0}
    results, _ = generator.run_batch(arrays["labels"], np.arange(images), **none)
    np.testing.assert_array_equal(results["tokens"], arrays["tokens"])
    logits = np.asarray(results["logits"])[:, arrays["logit_pos"]]
    np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=models.LOGITS[cfg])
    check_images(results, arrays)
    means = np.asarray(results["images"]).mean((1, 2))
    np.testing.assert_allclose(means, arrays["image_channel_mean"], rtol=0, atol=models.IMAGE)

    results, _ = generator.run_batch(given["labels"], np.arange(images), given=given["tokens"])
    np.testing.assert_array_equal(results["tokens"], given["tokens"])
    logits = np.asarray(results["logits"])[:, given["logit_pos"]]
    expected = given["logits_cfg" + cfg.replace(".", "p")]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=models.LOGITS[cfg])
    check_images(results, given)


def test_cache_content():
    """Keys and values in the pool, read back through the plan, are those of the original's
    cache."""
    arrays = models.fixture("b_k6_sharedaln", "kv_cache")
    model = models.fixture_model("b_k6_sharedaln")
    plan = plan_cache(model.geometry, policies.Full())
    generator = models.greedy_generator(model, plan=plan)
    forced = models.fixture("b_k6_sharedaln", "gen_forced")
    _, state = generator.run_batch(forced["labels"], np.arange(2), given=forced["tokens"])
    pool = np.asarray(state.kv_pool)
    slots = pool.reshape(pool.shape[0], -1, pool.shape[-1])
    stored = arrays["pos"] < model.geometry.schedule.persistent_tokens
    index = plan.write_slots[:, :, arrays["pos"][stored]]
    found = np.moveaxis(slots[:, index], 0, 1)  # layers, rows, heads, tokens, 2 H
    half = pool.shape[-1] // 2
    assert stored.sum() > 20
    np.testing.assert_allclose(found[..., :half], arrays["k"][:, :, :, stored], rtol=0, atol=3e-5)
    np.testing.assert_allclose(found[..., half:], arrays["v"][:, :, :, stored], rtol=0, atol=1e-4)


EVICTIONS = [
    *itertools.product(("a_k10", "b_k6_sharedaln"), ("evict_headscale", "evict_token_equal")),
    ("b_k6_sharedaln", "evict_streaming"),
    ("b_k6_sharedaln", "evict_token_ragged"),
]
# By scale, and by token with rows that differ.
DIFFERENT = [("b_k6_sharedaln", f"evict_{kind}") for kind in ("headscale", "token_ragged")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), often(DIFFERENT, EVICTIONS))
def test_table_policy_deletes_what_the_original_masks(name, file, tmp_path):
    """All kinds of eviction, deleted from a smaller pool here, masked in the original: identical
    greedy tokens."""
    arrays = models.fixture(name, file)
    kept = (
        {"keep_scale": arrays["keep_scale"]}
        if "keep_scale" in arrays
        else {"keep_token": models.unpack_keep_token(arrays)}
    )
    np.savez(tmp_path / "keep.npz", **kept)
    model = models.fixture_model(name)
    policy = policies.Table(path=str(tmp_path / "keep.npz"))
    generator = models.greedy_generator(model, policy)
    results, state = generator.run_batch(arrays["labels"], np.arange(2))
    np.testing.assert_array_equal(results["tokens"], arrays["tokens"])
    assert (arrays["tokens"] != arrays["tokens_full_cache"]).any()
    assert (
        generator.allocated_bytes == state.kv_pool.nbytes < generator.plan.dense_bytes(2, "float32")
    )
