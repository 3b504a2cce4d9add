"""What the plan says about FLOPs and bytes, counted by hand on small geometries."""

import numpy as np

from experiments.aot import floor
from experiments.geometry import read_geometry
from varjax.core.segments import plan_segments
from varjax.generation import api
from varjax.policies import POLICIES

GEOMETRY = read_geometry("layers=3,heads=2,head_dim=8,schedule=1x1;2x2;3x3")
ROWS, LAYERS, HEADS, SIZE = 2, 3, 2, 8


def planned(policy, **arguments):
    return api.plan(GEOMETRY, POLICIES[policy](**arguments))


def test_full_cache():
    plan = planned("full", block_size=1)
    pairs = 1 * 1 + 4 * (1 + 4) + 9 * (5 + 9)
    for count in (1, 3):
        segments = plan_segments(GEOMETRY.schedule, count)
        found = floor.attention_flops(plan, segments)
        assert found == 4 * SIZE * ROWS * LAYERS * HEADS * pairs


def test_padding_and_empty_slots_do_not_count():
    """Large blocks and one padded segment change nothing: kernels may skip what they add."""
    least = floor.attention_flops(
        planned("full", block_size=1), plan_segments(GEOMETRY.schedule, 3)
    )
    coarse = planned("full", block_size=8, accounting="tokens")
    assert coarse.block_size == 8
    assert floor.attention_flops(coarse, plan_segments(GEOMETRY.schedule, 1)) == least


def test_pool_traffic():
    """Scale 1 reads one token per head, scale 2 five; five are written."""
    plan = planned("full", block_size=1)
    assert floor.tokens_moved(plan) == (1 + 5 + 5) * LAYERS * HEADS


def test_contents_that_the_device_decides():
    plan = planned("headkv", budget=0.6)
    read = plan.capacity.sum()
    written = np.maximum(plan.capacity[1:] - plan.capacity[:-1], 0).sum()
    assert floor.tokens_moved(plan) == read + written


def test_looking_at_attention_costs_a_product():
    exact = plan_segments(GEOMETRY.schedule, 3)
    plan = planned("h2o", budget=0.6)
    held = plan.capacity.sum((1, 2))
    pairs = [
        t * (h + LAYERS * HEADS * t) for t, h in zip(GEOMETRY.schedule.tokens, held, strict=True)
    ]
    passes = [3, 3, 2]  # nothing is decided after the last scale
    wanted = 2 * SIZE * ROWS * np.dot(passes, pairs)
    assert floor.attention_flops(plan, exact) == wanted
