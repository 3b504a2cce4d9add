"""Infinity through ported checkpoints against the original PyTorch implementation, float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.often import often
from varjax import Model
from varjax.core.planner import plan_cache
from varjax.core.sampling import Sampling, filter_logits
from varjax.models import teacher_forcing
from varjax.policies import Full
from varjax.text.features import TextFeatures

pytestmark = pytest.mark.usefixtures("optimized")
# float32 against float32 of another order of operations, from tests/fixtures/README.md
HEAD, GUIDED, CODES, IMAGE = 5e-4, 2e-3, 1e-4, 1e-3
CASES = {  # fixture: (model, aspect)
    "infinity_A_gen_square": ("infinity_a", 1.0),
    "infinity_A_gen_1.5_b2": ("infinity_a", 1.5),
    "infinity_A_gen_layer-2_neg": ("infinity_a", 1.0),
    "infinity_A_forced_square": ("infinity_a", 1.0),
    "infinity_B_gen_square": ("infinity_b", 1.0),
    "infinity_B_forced_square": ("infinity_b", 1.0),
}


def model_of(case: str) -> Model:
    name, aspect = CASES[case]
    if aspect == 1.0:
        return models.fixture_model(name)
    return varjax.load(models.checkpoint_folder(name), "float32", aspect=aspect)


def features(arrays: dict) -> TextFeatures:
    negative = {}
    if "neg_text_kv" in arrays:
        negative = {"negative_kv": arrays["neg_text_kv"], "negative_lens": arrays["neg_text_lens"]}
    return TextFeatures(kv=arrays["text_kv"], lens=arrays["text_lens"], **negative)


def sampling_of(arrays: dict) -> Sampling:
    lists = {name: arrays[name].tolist() for name in ("cfg", "tau", "cfg_insertion_layer")}
    return Sampling(**lists, greedy=True)


def run(case: str, plan=None):
    """(model, fixture arrays, results, final cache), as the original was called."""
    model, arrays = model_of(case), models.infinity_fixture(case)
    assert [list(m) for m in model.geometry.schedule.maps] == arrays["schedule"].tolist()
    text = features(arrays)
    index, forced = np.arange(len(text)), {}
    if "gt_bits" in arrays:
        scales = int(arrays["gt_leak"])
        given = model.token_arrays.tokens_from_file(arrays["gt_bits"], len(text), scales)
        forced = {"given": given, "given_scales": scales}
    generator = models.built(
        model,
        sampling=sampling_of(arrays),
        batch_size=len(text),
        keep_logits=True,
        matmul_precision="highest",
        plan=plan,
        segments={"infinity_A_gen_1.5_b2": "auto", "infinity_A_forced_square": 2}.get(case, 1),
    )
    return model, arrays, *generator.run_batch(text.take(index), index, **forced)


def expected_logits(arrays: dict, model: Model) -> tuple[np.ndarray, float]:
    """What the original drew from, [B, L / 4, 2 C], made of its raw head logits of every fourth
    token; and what to accept."""
    head, images = arrays["head_logits_sub4"], len(arrays["text_lens"])
    scale = model.geometry.schedule.scale_of_token[::4]
    cfg, tau = (arrays[name][scale][:, None] for name in ("cfg", "tau"))
    if 0 not in arrays["cfg_insertion_layer"]:
        return head[:images] / tau, HEAD / tau.min()
    uncond = np.where(cfg == 1, 0, head[images:])  # absent where a scale has no guidance
    return (cfg * head[:images] + (1 - cfg) * uncond) / tau, GUIDED


# Both models; guidance from a layer on, a negative prompt, bits that are given.
OFTEN = ("infinity_A_gen_layer-2_neg",)


@pytest.mark.parametrize("case", often(OFTEN, CASES))
def test_generation_is_identical(case):
    model, arrays, results, _ = run(case)
    bits = model.token_arrays.tokens_to_file(np.asarray(results["tokens"]))
    np.testing.assert_array_equal(bits, arrays["bits"])
    if "token_bits" in arrays and "gt_bits" not in arrays:  # what it would draw, where it is forced
        np.testing.assert_array_equal(results["tokens"], arrays["token_bits"])
    logits = np.asarray(results["logits"])[:, ::4]
    expected, accepted = expected_logits(arrays, model)
    np.testing.assert_allclose(logits.reshape(expected.shape), expected, rtol=0, atol=accepted)
    if "sample_logits_sub4" in arrays:
        np.testing.assert_allclose(logits, arrays["sample_logits_sub4"], rtol=0, atol=GUIDED)
    code_map = np.moveaxis(np.asarray(results["code_map"]), -1, 1)
    np.testing.assert_allclose(code_map, arrays["summed_codes"], rtol=0, atol=CODES)
    pixels = np.asarray(results["images"])
    original = np.moveaxis(np.clip(arrays["image_sub4"], -1, 1), 1, -1)
    np.testing.assert_allclose(2 * pixels[:, ::4, ::4] - 1, original, rtol=0, atol=IMAGE)
    bgr = (pixels[:, ::4, ::4, ::-1] * 255).astype(np.uint8).astype(int)
    assert np.abs(bgr - arrays["image_u8_out_sub4"]).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", often(("B",), ("A", "B")))
def test_teacher_forcing(name):
    transformer = models.fixture_model(f"infinity_{name.lower()}").transformer
    arrays = models.infinity_fixture(f"infinity_{name}_forward")
    text = TextFeatures(kv=arrays["text_kv"], lens=arrays["text_lens"])
    batch = jax.tree.map(jnp.asarray, text.take(np.arange(len(text))))

    @jax.jit
    def run(transformer, kv, length, codes):
        context = transformer.encode_rows(kv, length)
        scale = transformer.config.schedule.scale_of_token
        x = jnp.concatenate([context["start"], transformer.words(len(codes), codes)], axis=1)
        x = (x + transformer.level_embedding[scale]).astype(jnp.float32)
        rotation = transformer.rotation(jnp.arange(len(scale)))
        shared = {"rotation": rotation, "text": context["text"]}
        visible = jnp.arange(kv.shape[1]) < length[:, None]
        condition = transformer.encode_text(kv, visible)[0]
        return condition, teacher_forcing.of_scales(transformer, context, shared, x)

    codes = jnp.asarray(arrays["x_wo_prefix"])
    condition, logits = run(transformer, batch["kv"], batch["length"], codes)
    np.testing.assert_allclose(condition, arrays["cond_vec"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[:, ::4], arrays["logits_sub4"], rtol=0, atol=HEAD)


@pytest.mark.slow
def test_cache_content():
    """Keys (normalised and rotated) and values of layer 1 in the pool, read back through the plan,
    are those of the original's cache."""
    model = models.fixture_model("infinity_a")
    plan = plan_cache(model.geometry, Full())
    _, arrays, _, state = run("infinity_A_forced_square", plan)
    stored = model.geometry.schedule.persistent_tokens
    slots = np.asarray(state.kv_pool[0]).reshape(-1, state.kv_pool.shape[-1])
    found = slots[plan.write_slots[1, :, :stored]]  # heads, tokens, 2 H
    keys, values = np.split(found, 2, axis=-1)
    np.testing.assert_allclose(keys, arrays["layer1_k"][0, :, :stored], rtol=0, atol=3e-5)
    np.testing.assert_allclose(values, arrays["layer1_v"][0, :, :stored], rtol=0, atol=1e-4)


def test_rotation_angles():
    """Cosines and sines of a template's 0.06M schedule, one per pair of neighbouring numbers."""
    tables = models.infinity_fixture("rope_tables")
    names = [name for name in tables if name.startswith("cos_sin_hd16_")]
    assert names
    for name in names:
        aspect = name.removeprefix("cos_sin_hd16_").replace("p", ".")
        model = models.fixture_model("infinity_a").with_template(aspect, "0.06M")
        tokens = jnp.arange(model.config.schedule.total_tokens)
        found = jax.jit(lambda transformer, tokens: transformer.rotation(tokens))(
            model.transformer, tokens
        )
        for array, expected in zip(map(np.asarray, found), tables[name], strict=True):
            np.testing.assert_allclose(array[:, ::2], expected, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(array[:, ::2], array[:, 1::2])


def test_sampler_vectors():
    """Probabilities after top-k and top-p; of two values a small one is dropped."""
    arrays = models.infinity_fixture("sampler_vectors")
    checked = 0
    for name, expected in arrays.items():
        if "probs_" in name:
            source = "wide_logits" if name.startswith("wide") else "bit_logits"
            top_k, top_p = name.split("_k")[1].split("_p")
            kept = jax.jit(filter_logits, static_argnums=(1, 2))(
                jnp.asarray(arrays[source]), int(top_k), float(top_p)
            )
            found = np.exp(kept) / np.exp(kept).sum(-1, keepdims=True)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=name)
            checked += 1
    assert checked == 7
