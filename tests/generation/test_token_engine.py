"""Models that draw token by token through the engine, by the public API: what the originals draw
with the full cache, and what holds for every policy."""

import itertools

import jax
import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.generation import test_llamagen_parity as parity
from tests.often import often
from varjax import conditions
from varjax.core.errors import UserError
from varjax.core.sampling import Sampling
from varjax.core.sequence import TOKENS
from varjax.generation import memory
from varjax.generation.generator import Generator
from varjax.generation.mesh import MeshSpec
from varjax.policies import POLICIES, get_policy

# tables need a file, and budget 1 is not what they are for
ELSEWHERE = ("full", "table", "learned")
BY_TOKEN = [n for n, c in POLICIES.items() if c.serves(TOKENS) and n not in ELSEWHERE]
PROMPTED = (*models.PROMPT_SHAPES, models.GROUPS)
DRAWN = Sampling(cfg=2.0, tau=0.9, top_k=50, top_p=0.9)


def generator(name: str, policy="full", budget=None, **options) -> Generator:
    options = {"matmul_precision": "highest", "batch_size": 2, "kv_dtype": "float32", **options}
    return models.built(models.fixture_model(name), policy, budget, **options)


def greedy(arrays: dict) -> Sampling:
    cfg, interval = float(arrays["cfg_scale"]), int(arrays["cfg_interval"])
    return Sampling(cfg=cfg, cfg_interval=interval, greedy=True)


@pytest.mark.parametrize(
    ("file", "one_slot"),
    [
        pytest.param("gpt_c2i_gen", True, marks=pytest.mark.slow),
        ("gpt_c2i_gen_interval", True),
        ("gpt_t2i_gen", False),
        pytest.param("gpt_t2i_gen", True, marks=pytest.mark.slow),
    ],
)
def test_as_the_original(file, one_slot):
    """Tokens, guided logits, the cache of layer 1; texts with padding, in one slot and in all of
    their slots."""
    arrays = models.llamagen_fixture(file)
    model, sampling = models.fixture_model(parity.CASES[file]), greedy(arrays)
    plan = varjax.plan(model.geometry_for(sampling, one_slot=one_slot))
    images = len(arrays["tokens"])
    options = {"plan": plan, "sampling": sampling, "keep_logits": True, "batch_size": images}
    found = generator(parity.CASES[file], **options)
    results, caches = found.run_batch(parity.condition_of(arrays), np.arange(images))
    np.testing.assert_array_equal(results["tokens"], arrays["tokens"])
    parity.close(results["logits"], parity.mixed(arrays), parity.LOGITS)
    slots = model.config.image_tokens - 1 + (1 if one_slot else model.config.condition_tokens)
    assert caches[0].pool.shape == (2 * images, 4, slots, 32)
    assert found.allocated_bytes == plan.dense_bytes(images, "float32")
    if "layer1_k_cache" in arrays:
        keys, values = np.split(np.asarray(caches[1].pool)[[0, -1]], 2, axis=-1)
        parity.close(keys, arrays["layer1_k_cache"][:, :, :slots], parity.CACHE)
        parity.close(values, arrays["layer1_v_cache"][:, :, :slots], parity.CACHE)


def test_without_guidance():
    """Half the rows; only every fourth column of the original's logits is kept."""
    arrays = models.llamagen_fixture(parity.MORE)
    labels = arrays["c2i_class_ids"]
    options = {"sampling": Sampling(cfg=1.0, greedy=True), "keep_logits": True}
    found = generator("llamagen_c2i", batch_size=len(labels), **options)
    results, caches = found.run_batch(labels, np.arange(len(labels)))
    np.testing.assert_array_equal(results["tokens"], arrays["c2i_tokens"])
    parity.close(results["logits"][:, ::4], arrays["c2i_logits"], parity.LOGITS)
    assert len(caches[0].pool) == len(labels)


def run_fixture(name: str, prompts, cfg: float, shape, slots: int):
    """Results and final caches of a prompt model, greedy; `slots` may be more than prompts have."""
    model = models.fixture_model(name).with_grid(shape).with_prompt_tokens(slots)
    options = {"matmul_precision": "highest", "keep_logits": True, "batch_size": len(prompts)}
    found = models.built(model, sampling=model.sampling(cfg=cfg, greedy=True), **options)
    condition = conditions.resolve(model, prompt_ids=prompts)
    return model, *found.run_images(condition, np.arange(len(prompts)))


@pytest.mark.parametrize("slots", often((21,), (14, 21)))
def test_janus_as_the_original(slots):
    """Tokens, guided logits, the cache of layer 1 and the picture."""
    arrays = models.janus_fixture("janus_tiny_gen")
    prompts, cfg = list(arrays["token_rows"][::2]), float(arrays["cfg_weight"])
    model, results, caches = run_fixture("janus_tiny", prompts, cfg, arrays["grid"], slots)
    np.testing.assert_array_equal(results["tokens"], arrays["gen_tokens"])
    cond, uncond = arrays["head_logits"]
    parity.close(results["logits"][0], uncond + cfg * (cond - uncond), cfg * parity.LOGITS)
    stored = np.asarray(caches[1].pool)[[0, 2], :, slots - 14 :]
    keys, values = np.split(stored, 2, axis=-1)
    parity.close(keys, arrays["layer1_k"], parity.CACHE)
    parity.close(values, arrays["layer1_v"], parity.CACHE)
    parity.close(
        2 * results["images"][0] - 1, arrays["decoded"][0].transpose(1, 2, 0).clip(-1, 1), 3e-4
    )


@pytest.mark.parametrize("slots", often((24,), (15, 24)))
def test_lumina_as_the_original(slots):
    """Its new lines are in the cache, not in the results. Its height and width are drawn from all
    ids in the original, given here."""
    arrays = models.lumina_fixture("lumina_tiny_gen")
    cfg, grid = float(arrays["cfg"]), arrays["grids_hw"]
    model, results, caches = run_fixture("lumina_tiny", [arrays["prompt_ids"]], cfg, grid, slots)
    np.testing.assert_array_equal(results["tokens"][0], arrays["vq_indices"].ravel())
    config, sequence = model.config, model.geometry.schedule
    written = np.full(sequence.image_tokens, config.new_line)
    written[sequence.places] = np.array(config.image_ids)[np.asarray(results["tokens"][0])]
    np.testing.assert_array_equal(written, arrays["new_ids"][:-1])  # the end follows
    streams = (arrays[f"step_logits_{name}"] for name in ("cond", "uncond"))
    cond, uncond = (s[sequence.places][:, list(config.image_ids)] for s in streams)
    parity.close(results["logits"][0], uncond + cfg * (cond - uncond), cfg * parity.LOGITS)
    allowed = np.unpackbits(arrays["allowed_mask"], axis=1)[sequence.places, :260]
    np.testing.assert_array_equal(np.flatnonzero(allowed[0]), np.sort(config.image_ids))
    assert (allowed == allowed[0]).all()
    assert caches[0].pool.shape == (2, 4, slots + 29, 32)
    parity.close(
        2 * results["images"][0] - 1, arrays["decoded"][0].transpose(1, 2, 0).clip(-1, 1), 3e-4
    )


# --- drawn, not greedy ----------------------------------------------------------------------------


def drawn(name: str, batch_size: int, numbers) -> dict[str, np.ndarray]:
    condition = models.condition(models.fixture_model(name), numbers)
    options = {"sampling": DRAWN, "batch_size": batch_size}
    policy = ("headkv", 0.7 if name == "lumina_small" else 0.6)
    found = generator(name, *policy, **options).batches(condition)
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *(part for _, part in found))


@pytest.mark.slow
@pytest.mark.parametrize("name", models.TOKEN_MODELS)
def test_a_batch_equals_its_rows_alone(name):
    """Whatever the batch, padded in the end; every image has a key of its own. Prompts are not
    equally long."""
    together, alone = (drawn(name, size, [3, 3, 6]) for size in (2, 1))
    np.testing.assert_array_equal(together["tokens"], alone["tokens"])
    parity.close(together["images"], alone["images"], 1e-4)
    assert (together["tokens"][0] != together["tokens"][1]).any()


@pytest.mark.parametrize("name", often(("lumina_small",), models.TOKEN_MODELS))
def test_generate(name):
    """The one call: prefix of a model's policy and budget, pictures in [0, 1]."""
    model = models.fixture_model(name)
    options = {"policy": "streaming", "budget": 0.7, "sampling": DRAWN}
    images = varjax.generate(model, **models.given(model, [3, 3]), **options)
    assert images.shape == (2, *model.pixels, 3) and 0 <= images.min() < images.max() <= 1


def test_the_full_cache_is_teacher_forcing():
    """Query heads that share keys and values, and prompts of several lengths: the logits of all
    steps at once."""
    model, sampling = models.fixture_model(models.GROUPS), Sampling(cfg=2.0, greedy=True)
    condition = models.condition(model, [0, 1]).take(np.arange(2))
    found = generator(models.GROUPS, sampling=sampling, keep_logits=True)
    results, caches = found.run_batch(condition, np.arange(2))
    assert caches[0].pool.shape[1] == 2 < model.config.num_attention_heads
    places = model.geometry.schedule.places
    written = np.full((2, model.config.image_tokens), model.config.vocab_size, np.int32)
    written[:, places] = results["tokens"]  # the others are new lines
    plain = parity.forced(model.transformer, condition, written, True)[:, places]
    cond, uncond = np.split(plain, 2)
    parity.close(results["logits"], uncond + 2.0 * (cond - uncond), 2e-4)
    assert len(np.unique(results["tokens"])) > 3, "all tokens are alike: the test says little"


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.TOKEN_MODELS)
@pytest.mark.parametrize("policy", ["streaming", "headkv", "diagonal"])
def test_predicted_and_planned_bytes(policy, name):
    """The pool is exact; everything that is carried is within a tenth of it."""
    model = models.fixture_model(name)
    plan = varjax.plan(model, get_policy(policy, 0.7))
    found = memory.predict(model, plan, 2, "float32", "float32")
    pool = plan.num_bytes(2, "float32")
    assert pool <= 0.7 * plan.dense_bytes(2, "float32")
    assert pool <= found.kv_pool <= 1.3 * pool


@pytest.mark.parametrize(
    ("policy", "name"), often([("rkv", models.GROUPS)], itertools.product(BY_TOKEN, PROMPTED))
)
def test_policies_on_prompt_models(policy, name):
    """Empty slots and the padding of prompts may hold anything; the cache stays within its
    budget."""
    model = models.fixture_model(name)
    found = generator(name, policy, 0.7, sampling=DRAWN, keep_logits=True)
    condition = models.condition(model, [0, 1]).take(np.arange(2))
    results, state = found.run_batch(condition, np.arange(2))
    assert found.allocated_bytes <= 0.7 * found.plan.dense_bytes(2, "float32")
    poisoned = jax.tree.map(np.asarray, results)
    empty_state = found.empty_state
    found.empty_state = lambda: jax.tree.map(
        lambda a: np.full_like(a, np.nan) if a.ndim == 4 else a, empty_state()
    )
    again, _ = found.run_batch(condition, np.arange(2))
    np.testing.assert_array_equal(again["tokens"], poisoned["tokens"])
    np.testing.assert_array_equal(again["logits"], poisoned["logits"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 2}, "segments=2: models that draw token by token have no scales to cut"),
        ({"layers": "scan"}, "layers='scan': models that draw token by token run a body per layer"),
        ({"mesh": MeshSpec(data=64), "batch_size": 64}, "takes 64 devices, this machine has"),
        ({"policy": "headkv", "budget": 0.02}, "smallest feasible budget is 0"),
        ({"sampling": Sampling(top_k=257)}, "top_k=257"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(UserError, match=message):
        generator("llamagen_c2i", **options)
