"""The transformer's configuration in published names."""

import json
from pathlib import Path

import pytest

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
