"""`key=value` lists."""

import pytest

from varjax.core.errors import UserError
from varjax.storage.values import parse_pairs


@pytest.mark.parametrize(
    "text, pairs",
    [
        ("", {}),
        ("window=16", {"window": "16"}),
        ("window=16, sinks=3", {"window": "16", "sinks": "3"}),
        ("path=a,b.npz,sinks=3", {"path": "a,b.npz", "sinks": "3"}),
        ("expression=a=b", {"expression": "a=b"}),
    ],
)
def test_parse_pairs(text, pairs):
    assert parse_pairs(text) == pairs


@pytest.mark.parametrize(
    "text, part",
    [
        ("window", "write key=value"),
        ("window=", "write key=value"),
        ("=3", "write key=value"),
        ("a b=3", "write key=value"),
        ("window=1,window=2", "window is given twice"),
    ],
)
def test_parse_pairs_refuses(text, part):
    with pytest.raises(UserError, match=part):
        parse_pairs(text)
