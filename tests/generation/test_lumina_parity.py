"""The options of the 34B family against the original's forward pass: norms behind the branches,
grouped heads, two sets of weights for the norm of queries and keys. It has no picture to draw."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ported_weights import rules
from ported_weights.readers import sources
from ported_weights.tables.registry import RULE_TABLES
from tests import models_under_test as models
from varjax.core import layers, stacked
from varjax.models import registry

CODES = 90  # of 100 tokens: some are left for the grammar of images
OWN = {"image_ids": list(range(CODES)), "num_codes": CODES, "new_line": CODES}
OWN |= {"image_start": CODES + 1, "size_zero": CODES + 2, "units": [2, 2]}
CLOSE = {"rtol": 0, "atol": 3e-5}


def ported(length: int):
    content = json.loads((models.LUMINA_FIXTURES / "lumina_swin_config.json").read_text())
    part = registry.family("lumina").parts["transformer"]
    config = part.read({**content, **OWN, "prompt_tokens": length})
    tensors = sources.open_source(models.LUMINA_FIXTURES / "lumina_swin.safetensors").tensors
    table = RULE_TABLES[part.name].rules(config, tensors)
    return rules.apply(table, tensors, part.abstract(config), dtype="float32")[0]


@pytest.mark.slow
def test_forward_of_the_larger_family():
    """Hidden state behind layer 0, keys and values of layer 1, logits."""
    expected = np.load(models.LUMINA_FIXTURES / "lumina_swin_forward.npz")
    rows, length = expected["input_ids"].shape
    model = jax.tree.map(jnp.asarray, ported(length))
    ids = jnp.asarray(expected["input_ids"])
    given = {"ids": ids, "length": jnp.full(rows, length, jnp.int32)}
    context = model.encode_condition(given, guided=False)
    x, rotation = context["condition"], model.rotation(context, jnp.arange(-length, 0))
    mask, groups = model.condition_mask(context["visible"]), model.config.queries_per_head
    for index in range(2):
        block = stacked.layer(model.blocks, index)
        p = model.project(block, rotation, x)
        k, v = p.keys(), p.values()
        if index == 1:
            np.testing.assert_allclose(x, expected["hidden_after_layer0"], **CLOSE)
            np.testing.assert_allclose(k, expected["layer1_k"], **CLOSE)
            np.testing.assert_allclose(v, expected["layer1_v"], **CLOSE)
        k, v = (jnp.repeat(a, groups, axis=1) for a in (k, v))
        attended = layers.dense_attention(p.queries(), k, v, mask)
        x = model.post_attention(block, x, attended)
    np.testing.assert_allclose(model.plain_logits(x), expected["logits"][..., :CODES], **CLOSE)
