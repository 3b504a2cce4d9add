"""LlamaGen through ported checkpoints against the original PyTorch implementation, float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ported_weights import rules
from ported_weights.tables.registry import RULE_TABLES
from tests import models_under_test as models
from tests import released_shapes
from tests.generation.token_by_token import draw
from varjax.models import registry
from varjax.sampling import Sampling
from varjax.text.features import TextFeatures

LOGITS = 3e-4  # the reference's own distance from float64 is 3e-5
CACHE = 3e-5
CASES = {  # fixture: model
    "gpt_c2i_gen": "llamagen_c2i",
    "gpt_c2i_gen_interval": "llamagen_c2i",
    "gpt_t2i_gen": "llamagen_t2i",
}
MORE = "gpt_more_gen"  # further cases, of the original's code on the same weights
WIDE_HEADS = {  # heads of 100, and every option of the constructor that changes a number
    **{"model_type": "c2i", "dim": 200, "n_layer": 2, "n_head": 2, "vocab_size": 64},
    **{"block_size": 16, "num_classes": 5, "multiple_of": 32, "ffn_dim_multiplier": 1.3},
    **{"rope_base": 5000, "norm_eps": 1e-4},
}


def features(arrays: dict) -> TextFeatures:
    """What a user gives: the rows of all texts that are no padding, one after the other."""
    mask = arrays["t5_mask"].astype(bool)
    return TextFeatures(kv=arrays["t5_features"][mask], lens=mask.sum(1), text_maxlen=120)


def condition_of(arrays: dict):
    if "class_ids" in arrays:
        return arrays["class_ids"]
    return features(arrays).take(range(len(arrays["t5_mask"])))


def drawn(name: str, condition, cfg: float, interval: int = -1, **options):
    sampling = Sampling(cfg=cfg, cfg_interval=interval, greedy=True)
    return draw(models.fixture_model(name).transformer, condition, sampling, **options)


def mixed(arrays: dict) -> np.ndarray:
    """Guided logits of the fixture, as the original mixes them."""
    cond, uncond = arrays["logits_cond"], arrays["logits_uncond"]
    guided, interval = uncond + arrays["cfg_scale"] * (cond - uncond), int(arrays["cfg_interval"])
    if interval >= 0:
        guided[:, interval + 2 :] = cond[:, interval + 2 :]
    return guided


@functools.cache
def as_the_original(file: str, one_slot: bool = False):
    arrays = models.llamagen_fixture(file)
    settings = float(arrays["cfg_scale"]), int(arrays["cfg_interval"])
    return drawn(CASES[file], condition_of(arrays), *settings, one_slot=one_slot)


def close(found, expected, limit: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("file", CASES)
def test_generation_is_identical(file):
    """Greedy tokens, the logits of both rows and their mix; layer 1 of the cache."""
    arrays = models.llamagen_fixture(file)
    found = as_the_original(file)
    np.testing.assert_array_equal(found.tokens, arrays["tokens"])
    close(found.plain, np.concatenate([arrays["logits_cond"], arrays["logits_uncond"]]), LOGITS)
    close(found.guided, mixed(arrays), LOGITS)
    if "layer1_k_cache" in arrays:
        for ours, name in ((found.keys, "layer1_k_cache"), (found.values, "layer1_v_cache")):
            stored = ours[1][[0, -1]]
            assert stored.shape[2] == 64  # the condition and all tokens but the last
            close(stored, arrays[name][:, :, :64], CACHE)


def test_generation_without_guidance():
    arrays = models.llamagen_fixture(MORE)
    found = drawn("llamagen_c2i", arrays["c2i_class_ids"], 1.0)
    np.testing.assert_array_equal(found.tokens, arrays["c2i_tokens"])
    close(found.plain[:, ::4], arrays["c2i_logits"], LOGITS)
    assert len(found.plain) == len(found.tokens)


def test_one_slot_for_the_condition():
    """120 slots of the condition and one draw the same; the padded text has 17 tokens."""
    arrays = models.llamagen_fixture("gpt_t2i_gen")
    all_slots, one = (as_the_original("gpt_t2i_gen", flag) for flag in (False, True))
    assert all_slots.keys.shape[3] == 120 + 35 and one.keys.shape[3] == 1 + 35
    np.testing.assert_array_equal(one.tokens, arrays["tokens"])
    close(one.plain, all_slots.plain, 2e-5)  # float32's own noise is 6e-6
    close(one.guided, mixed(arrays), LOGITS)


def forced(name: str, condition, tokens: np.ndarray, guided: bool) -> np.ndarray:
    """Plain logits of all steps at once, of the original's tokens."""

    @jax.jit
    def run(transformer, condition, tokens):
        context = transformer.encode_condition(condition, guided=guided)
        return transformer.teacher_forced(context, tokens)

    transformer = models.fixture_model(name).transformer
    return np.array(run(transformer, condition, jnp.asarray(tokens[:, :-1])))


def test_all_tokens_at_once():
    """Teacher forcing gives the logits of every step."""
    arrays = models.llamagen_fixture("gpt_c2i_gen")
    found = forced("llamagen_c2i", arrays["class_ids"], arrays["tokens"], True)
    close(found, np.concatenate([arrays["logits_cond"], arrays["logits_uncond"]]), LOGITS)


@pytest.mark.parametrize(("case", "cfg", "last"), [("t2i", 1, 0), ("t2i_interval0", 3, 1)])
def test_texts_without_guidance_and_with_the_shortest(case, cfg, last):
    """Of the original's tokens every one is the largest of the logits that it was drawn from."""
    arrays, given = models.llamagen_fixture(MORE), models.llamagen_fixture("gpt_t2i_gen")
    tokens = arrays[f"{case}_tokens"]
    found = forced("llamagen_t2i", condition_of(given), tokens, cfg > 1)
    close(found[:, ::4], arrays[f"{case}_logits"], LOGITS)
    rows = np.split(found, 2) if cfg > 1 else [found, found]
    rows[1][:, last + 1 :] = rows[0][:, last + 1 :]
    guided = rows[1] + cfg * (rows[0] - rows[1])
    np.testing.assert_array_equal(guided.argmax(-1), tokens)


def test_images_do_not_depend_on_the_others_of_a_batch():
    """With keys of their own, drawn and not greedy."""
    transformer = models.fixture_model("llamagen_c2i").transformer
    sampling = Sampling(cfg=2.0, tau=0.9, top_k=50, top_p=0.9)
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    labels, others = np.array([1, 19, 7], np.int32), np.array([2, 0, 2])
    together = draw(transformer, labels, sampling, keys=keys).tokens
    again = draw(transformer, labels[others], sampling, keys=keys[others]).tokens
    np.testing.assert_array_equal(again, together[others])
    assert len(np.unique(together)) > 20


# --- other sizes ----------------------------------------------------------------------------------


def random_weights(config) -> dict[str, np.ndarray]:
    """Published names in alphabetical order with the numbers of a seed, as the fixture was made."""
    rng, d, f = np.random.RandomState(11), config.dim, config.hidden_dim
    layer = {
        **{"attention.wo.weight": (d, d), "attention.wqkv.weight": (3 * d, d)},
        "attention_norm.weight": (d,),
        **{f"feed_forward.w{i}.weight": (d, f) if i == 2 else (f, d) for i in (1, 2, 3)},
        "ffn_norm.weight": (d,),
    }
    shapes = {f"layers.{i}.{n}": s for i in range(config.n_layer) for n, s in layer.items()}
    shapes |= {"cls_embedding.embedding_table.weight": (config.num_classes + 1, d)}
    shapes |= dict.fromkeys(("tok_embeddings.weight", "output.weight"), (config.vocab_size, d))
    found = {}
    for name in sorted(shapes | {"norm.weight": (d,)}):
        shape = shapes.get(name, (d,))
        numbers = rng.standard_normal(shape)
        spread = 0.5 if "emb" in name else 1.2 / shape[-1] ** 0.5
        numbers = 1 + 0.2 * numbers if len(shape) == 1 else numbers * spread
        found[name] = numbers.astype(np.float32)
    return found


def test_heads_of_100():
    """As the 3B model has them; another width, base and epsilon than the released ones."""
    part = registry.family("llamagen").parts["transformer"]
    config, arrays = part.read(WIDE_HEADS), models.llamagen_fixture(MORE)
    assert config.head_dim == 100 and config.hidden_dim == 704
    weights = random_weights(config)
    tensors = {n: released_shapes.Shape(a.shape, lambda _, a=a: a) for n, a in weights.items()}
    table = RULE_TABLES[part.name].rules(config, tensors)
    transformer = jax.device_put(rules.apply(table, tensors, part.abstract(config))[0])
    labels = np.array([4, 0], np.int32)
    found = draw(transformer, labels, Sampling(cfg=2.5, greedy=True))
    np.testing.assert_array_equal(found.tokens, arrays["h100_tokens"])
    close(found.plain, arrays["h100_logits"], LOGITS)
