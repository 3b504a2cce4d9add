"""Infinity's templates, sizes and rope positions against the published tables."""

import json
from pathlib import Path

import chex
import numpy as np
import pytest

from varjax.core.errors import UserError
from varjax.models.infinity.config import PIXELS, TEMPLATES, name_of, resolve, rope_positions

FIXTURES = Path(__file__).parents[1] / "fixtures" / "infinity"
PUBLISHED = json.loads((FIXTURES / "dynamic_resolution.json").read_text())


@pytest.mark.parametrize("aspect", TEMPLATES)
def test_tables(aspect):
    """Maps, pixels and positions of every size; positions of a size start those of 1M."""
    positions = np.load(FIXTURES / "rope_tables.npz")[f"pos_{aspect}"]
    for size, entry in PUBLISHED["table"][aspect].items():
        found = resolve(aspect, size)
        assert name_of(**found) == (aspect, size)
        assert [list(m) for m in found["schedule"].maps] == [scale[1:] for scale in entry["scales"]]
        assert [side * PIXELS for side in found["schedule"].final_map] == entry["pixel"]
        ours = rope_positions(found["schedule"], found["rope_map"])
        chex.assert_type(ours, np.int32)
        chex.assert_shape(ours, (found["schedule"].total_tokens, 2))
        chex.assert_trees_all_equal(ours, positions[: len(ours)])
    assert len(ours) == len(positions)


@pytest.mark.parametrize(
    ("aspect", "name"),
    [(1, "1.000"), ("1.0", "1.000"), (1.1, "1.000"), (9 / 16, "0.571"), (0.3, "0.333")]
    + [("3.9", "3.000"), (0.25, "0.333"), (1.29, "1.250"), (2 / 3, "0.666"), (1.125, "1.000")],
)
def test_nearest_template(aspect, name):
    """The last case is as far from 1.0 as from 1.25: the first of the published list is taken."""
    assert name_of(**resolve(aspect, "1M"))[0] == name


@pytest.mark.parametrize("aspect", ["x", "16:9", 0, -1, 5, 0.2, float("nan"), "inf", None])
def test_impossible_aspect(aspect):
    with pytest.raises(UserError, match=r"aspect .* is not supported: .*from 0\.333, 0\.400, .*3"):
        resolve(aspect, "1M")
