import chex
import numpy as np
import pytest

from experiments.geometry import read_geometry
from varjax.core.errors import UserError
from varjax.core.sequence import Schedule


def test_counts_and_offsets():
    schedule = Schedule.parse("1x1; 2x3;3x4")
    assert schedule.tokens == (1, 6, 12)
    assert schedule.starts == (0, 1, 7) and schedule.ends == (1, 7, 19)
    assert schedule.total_tokens == 19 and schedule.persistent_tokens == 7
    chex.assert_trees_all_equal(schedule.scale_of_token, np.array([0] + [1] * 6 + [2] * 12))
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    "text", ["", "1x1;", "1x0", "ax2", "1,2,3", "2", "²x1", "4097x1", "1x" + "9" * 5000]
)
def test_malformed_schedules(text):
    with pytest.raises(UserError):
        Schedule.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "layers=1",
        "layers=x,heads=1,head_dim=1,schedule=1x1",
        "foo=1",
        "layers=2,heads=2,head_dim=8,tokens=1",
        "layers=2,heads=2,head_dim=8,tokens=16,condition=0",
        "layers=2,heads=2,head_dim=8,tokens=16,schedule=1x1",
        "layers=2,heads=2,head_dim=8,tokens=16,queries_per_head=0",
        "layers=0,heads=1,head_dim=1,schedule=1x1",
        "layers=²,heads=1,head_dim=1,schedule=1x1",
        "layers=1000001,heads=1,head_dim=1,schedule=1x1",
        "layers=1,heads=1,head_dim=1000001,schedule=1x1",
        "layers=100000,heads=100000,head_dim=1,schedule=1x1",
        "layers=" + "9" * 5000 + ",heads=1,head_dim=1,schedule=1x1",
        "layers=1,layers=2,heads=1,head_dim=1,schedule=1x1",
        "layers=1,heads=1,head_dim=1,schedule=1x1;5000x1",
    ],
)
def test_malformed_geometry(text):
    with pytest.raises(UserError):
        read_geometry(text)


def test_geometry_text():
    g = read_geometry("layers=2,heads=3,head_dim=4,schedule=1x1;2x2;3x4")
    assert (g.num_layers, g.num_heads, g.head_dim, g.dense_tokens) == (2, 3, 4, 5 * 6)
