"""LlamaGen through ported checkpoints against the original PyTorch implementation, float32: logits
of its tokens, all at once. Drawn token by token they are compared in test_token_engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ported_weights import rules
from ported_weights.tables.registry import RULE_TABLES
from tests import models_under_test as models
from tests import released_shapes
from varjax.models import registry, teacher_forcing
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


def mixed(arrays: dict) -> np.ndarray:
    """Guided logits of the fixture, as the original mixes them."""
    cond, uncond = arrays["logits_cond"], arrays["logits_uncond"]
    guided, interval = uncond + arrays["cfg_scale"] * (cond - uncond), int(arrays["cfg_interval"])
    if interval >= 0:
        guided[:, interval + 2 :] = cond[:, interval + 2 :]
    return guided


def close(found, expected, limit: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


def forced(transformer, condition, tokens: np.ndarray, guided: bool) -> np.ndarray:
    """Plain logits of all steps at once, of the original's tokens."""

    @jax.jit
    def run(transformer, condition, tokens):
        context = transformer.encode_condition(condition, guided=guided)
        return teacher_forcing.of_tokens(transformer, context, tokens)

    return np.array(run(transformer, condition, jnp.asarray(tokens[:, :-1])))


def test_all_tokens_at_once():
    """Teacher forcing gives the logits of every step."""
    arrays = models.llamagen_fixture("gpt_c2i_gen")
    transformer = models.fixture_model("llamagen_c2i").transformer
    found = forced(transformer, arrays["class_ids"], arrays["tokens"], True)
    close(found, np.concatenate([arrays["logits_cond"], arrays["logits_uncond"]]), LOGITS)


@pytest.mark.parametrize(("case", "cfg", "last"), [("t2i", 1, 0), ("t2i_interval0", 3, 1)])
def test_texts_without_guidance_and_with_the_shortest(case, cfg, last):
    """Of the original's tokens every one is the largest of the logits that it was drawn from."""
    arrays, given = models.llamagen_fixture(MORE), models.llamagen_fixture("gpt_t2i_gen")
    tokens = arrays[f"{case}_tokens"]
    transformer = models.fixture_model("llamagen_t2i").transformer
    found = forced(transformer, condition_of(given), tokens, cfg > 1)
    close(found[:, ::4], arrays[f"{case}_logits"], LOGITS)
    rows = np.split(found, 2) if cfg > 1 else [found, found]
    rows[1][:, last + 1 :] = rows[0][:, last + 1 :]
    guided = rows[1] + cfg * (rows[0] - rows[1])
    np.testing.assert_array_equal(guided.argmax(-1), tokens)


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
    tokens = arrays["h100_tokens"]
    found = forced(transformer, labels, tokens, True)
    close(found, arrays["h100_logits"], LOGITS)
    cond, uncond = np.split(found, 2)
    np.testing.assert_array_equal((uncond + 2.5 * (cond - uncond)).argmax(-1), tokens)
