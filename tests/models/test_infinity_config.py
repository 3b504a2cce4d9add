"""The transformer's configuration in published names."""

import json
from pathlib import Path

import pytest

from varjax.errors import UserError
from varjax.models.infinity.config import InfinityConfig

FIXTURES = Path(__file__).parents[1] / "fixtures" / "infinity"
PUBLISHED = json.loads((FIXTURES / "configs.json").read_text())


@pytest.mark.parametrize("name", ["infinity_A", "infinity_B_sharded"])
def test_published_notes_follow(name):
    """Width of the feed-forward and heads of the text's pool are those that we derive."""
    config = InfinityConfig.from_published(PUBLISHED[name])
    assert config.hidden_dim == PUBLISHED[name]["ffn_hidden"]
    assert config.pool_heads == PUBLISHED[name]["text_pool_heads"]
    assert InfinityConfig.from_published(config.to_published()) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ffn_hidden": 512}, "ffn_hidden is 512, but embed_dim 64 and mlp_ratio 4 make it 256"),
        ({"text_pool_heads": 4}, "is 4, but text_channels 256 and embed_dim 64 make it 2"),
        ({"text_pool_heads": "two"}, "is 'two', but text_channels 256"),
    ],
)
def test_notes_that_do_not_follow(given, message):
    with pytest.raises(UserError, match=message):
        InfinityConfig.from_published({**PUBLISHED["infinity_A"], **given})
