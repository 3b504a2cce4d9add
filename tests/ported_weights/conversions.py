"""Conversions of small published models, and what becomes of them."""

from pathlib import Path

import chex
import numpy as np
import pytest

from ported_weights.configurations import PublishedModel
from ported_weights.convert import convert
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.storage import checkpoint, parameters


def converted(folder: Path, published: PublishedModel, **options) -> tuple[dict, dict, str]:
    """Parts and description of the checkpoint in `folder`, read from disk, and what was said."""
    lines = []
    convert(published, str(folder / "out"), say=lines.append, **options)
    return *checkpoint.load(folder / "out", registry.CATALOGUE), "\n".join(lines)


def refused(folder: Path, published: PublishedModel, match: str) -> None:
    """It is refused, and nothing in `folder` has changed."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=match):
        convert(published, str(folder / "out"), say=lambda line: None)
    assert sorted(folder.rglob("*")) == before


def assert_same(one, other) -> None:
    """Two modules have the same parameters, whatever type they are stored in."""
    ours, theirs = parameters.named(one), parameters.named(other)
    assert list(ours) == list(theirs)
    for name in ours:
        chex.assert_trees_all_equal(np.float32(ours[name]), np.float32(theirs[name]))
