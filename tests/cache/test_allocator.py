"""The block allocator, checked by simulating reads and writes of every (scale, layer) event."""

import numpy as np
import pytest

from varjax.cache import allocator
from varjax.cache.allocation import Geometry, RegionAllocation, StaticAllocation
from varjax.cache.plan import build_plan
from varjax.errors import UserError
from varjax.schedule import Schedule

GEOMETRY = Geometry(
    schedule=Schedule.parse("1x1;2x1;2x3;3x3;4x2;4x4"), num_layers=3, num_heads=2, head_dim=4
)


def random_static(seed: int) -> StaticAllocation:
    """Every token of every head lives for a random number of scales."""
    rng = np.random.default_rng(seed)
    scale, last = GEOMETRY.schedule.scale_of_token, GEOMETRY.schedule.num_scales
    shape = (GEOMETRY.num_layers, GEOMETRY.num_heads, scale.size)
    return StaticAllocation(rng.integers(scale, last, shape).astype(np.int16))


def random_regions(seed: int) -> RegionAllocation:
    rng = np.random.default_rng(seed)
    limit = np.array(GEOMETRY.schedule.starts)[:, None, None]
    shape = (GEOMETRY.schedule.num_scales, GEOMETRY.num_layers, GEOMETRY.num_heads)
    return RegionAllocation(np.minimum(rng.integers(0, 20, shape), limit).astype(np.int32))


def read_slots(plan, scale, layer, head) -> list[int]:
    """Slots listed by the block table."""
    entries = zip(*(a[scale, layer, head] for a in (plan.ids, plan.start, plan.stop)), strict=True)
    return [block * plan.block_size + offset for block, a, b in entries for offset in range(a, b)]


@pytest.mark.parametrize("block_size", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_static_reads_find_exactly_the_visible_tokens(seed, block_size):
    """Write every token where the plan says, at the time the program does; reads must then find
    what is visible, and nothing else."""
    allocation = random_static(seed)
    plan = build_plan(GEOMETRY, allocation, block_size=block_size, budget=1.0, accounting="tokens")
    schedule = GEOMETRY.schedule
    memory = {}
    for s in range(schedule.num_scales):
        for layer in range(GEOMETRY.num_layers):
            for head in range(GEOMETRY.num_heads):
                found = sorted(memory.get(slot) for slot in read_slots(plan, s, layer, head))
                tokens = np.flatnonzero(allocation.visible(GEOMETRY, s)[layer, head])
                assert found == [(layer, head, t) for t in tokens]
            for head in range(GEOMETRY.num_heads):  # all heads attend before any stores
                for token in range(schedule.starts[s], schedule.ends[s]):
                    slot = plan.write_slots[layer, head, token]
                    if slot >= 0 and s < schedule.num_scales - 1:
                        assert slot < plan.pool_tokens
                        memory[slot] = (layer, head, token)


@pytest.mark.parametrize("make", [random_static, random_regions])
@pytest.mark.parametrize("block_size", [1, 4])
def test_pool_is_the_peak_of_live_blocks(make, block_size):
    plan = build_plan(GEOMETRY, make(1), block_size=block_size, budget=1.0, accounting="tokens")
    assert plan.pool_blocks == plan.blocks_after_store.max()
    assert (plan.blocks_after_store * block_size >= plan.live_tokens).all()
    if block_size == 1:
        assert plan.pool_tokens == plan.live_tokens.max()


@pytest.mark.parametrize("make", [random_static, random_regions])
def test_blocks_are_never_shared(make):
    plan = build_plan(GEOMETRY, make(2), block_size=2, budget=1.0, accounting="tokens")
    for s in range(GEOMETRY.schedule.num_scales):
        owners = {}
        for layer in range(GEOMETRY.num_layers):
            for head in range(GEOMETRY.num_heads):
                used = plan.stop[s, layer, head] > plan.start[s, layer, head]
                for block in plan.ids[s, layer, head][used]:
                    assert owners.setdefault(block, (layer, head)) == (layer, head)


def test_region_tables_grow_and_shrink_at_their_end():
    """The slots of a region after a scale start with those before it: stored tokens need not
    move."""
    plan = build_plan(GEOMETRY, random_regions(3), block_size=2, budget=1.0, accounting="tokens")
    for s in range(GEOMETRY.schedule.num_scales - 1):
        for layer in range(GEOMETRY.num_layers):
            for head in range(GEOMETRY.num_heads):
                before, after = (read_slots(plan, t, layer, head) for t in (s, s + 1))
                common = min(len(before), len(after))
                assert before[:common] == after[:common]


def test_equal_lifetimes_share_blocks():
    """Six tokens of the same last use fit two blocks of four, although they come from different
    scales."""
    schedule = Schedule.parse("1x1;1x2;1x3;1x4")
    layout = allocator.static_layout(np.full(schedule.total_tokens, 3), schedule, 4)
    assert layout.stored_at.size == 2
    assert [len(r) for r in layout.runs] == [0, 1, 1, 2]


def test_after_each_store():
    held = np.array([[0, 0], [1, 2], [5, 6]])
    np.testing.assert_array_equal(allocator.after_each_store(held), [[1, 3], [7, 11], [11, 11]])


@pytest.mark.parametrize(
    ("entry", "message"), [((1, 0, 0, 5), "does not exist yet"), ((3, 0, 0, 0), "cannot return")]
)
def test_impossible_visibility_is_refused(entry, message):
    visible = np.zeros((6, 3, 2, GEOMETRY.schedule.total_tokens), bool)
    visible[1, :, :, 0] = True
    visible[entry] = True
    with pytest.raises(UserError, match=message):
        StaticAllocation.from_visibility(GEOMETRY, visible)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("seed", range(6))
def test_counting_blocks_equals_laying_them_out(seed, block_size):
    """For last uses per token and for whole scales with one last use."""
    allocation = random_static(seed)
    if seed % 2:
        first = allocation.last_use[..., np.array(GEOMETRY.schedule.starts)]
        allocation = StaticAllocation(np.repeat(first, GEOMETRY.schedule.tokens, axis=-1))
    grid = allocator.layouts(allocation, GEOMETRY, block_size)
    laid_out = allocator.live_blocks(grid, GEOMETRY.schedule.num_scales).max()
    assert allocator.peak_blocks(allocation, GEOMETRY, block_size) == laid_out
    counted = [allocation.visible(GEOMETRY, s).sum(-1) for s in range(6)]
    np.testing.assert_array_equal(allocation.capacity(GEOMETRY), counted)
