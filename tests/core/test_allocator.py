"""The block allocator, checked by simulating reads and writes of every (scale, layer) event."""

import numpy as np
import pytest

from varjax import policies
from varjax.core.allocation import Geometry, RegionAllocation, StaticAllocation
from varjax.core.errors import UserError
from varjax.core.layer_inputs import layer_inputs
from varjax.core.scale_plan import build_plan
from varjax.core.sequence import Schedule

GEOMETRY = Geometry(
    schedule=Schedule.parse("1x1;2x1;2x3;3x3;4x2;4x4"), num_layers=3, num_heads=2, head_dim=4
)
TOKENS = policies.Full(accounting="tokens")


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


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("seed", range(2))
def test_static_reads_find_exactly_the_visible_tokens(seed, block_size):
    """Write every token where the plan says, at the time the program does; reads must then find
    what is visible, and nothing else."""
    allocation = random_static(seed)
    plan = build_plan(GEOMETRY, allocation, block_size, TOKENS)
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


def written_slots(plan, scale, layer) -> set[int]:
    schedule = plan.geometry.schedule
    mine = plan.write_slots[layer, :, schedule.starts[scale] : schedule.ends[scale]]
    return set(mine[mine >= 0].tolist())


@pytest.mark.parametrize("seed", range(2))
def test_overwrites_says_whether_a_layer_stores_where_it_reads(seed):
    allocation = random_static(seed)
    plan = build_plan(GEOMETRY, allocation, 8, TOKENS)
    found = []
    for s in range(GEOMETRY.schedule.num_scales - 1):
        heads = np.ndindex(GEOMETRY.num_layers, GEOMETRY.num_heads)
        clash = any(set(read_slots(plan, s, *n)) & written_slots(plan, s, n[0]) for n in heads)
        assert plan.overwrites(s) == clash
        found.append(clash)
    assert not found[0] and any(found)  # nothing is read at first


def test_following_slots_hold_all_that_was_read_and_stored():
    """`following` is given where a scale gives up nothing: not by the last one, not where one token
    of one head goes."""
    scale, most = GEOMETRY.schedule.scale_of_token, GEOMETRY.schedule.num_scales - 1
    last_use = np.full((GEOMETRY.num_layers, GEOMETRY.num_heads, scale.size), most, np.int16)
    for tokens in ({}, {(1, 1, 0): 2, (2, 0, 5): 3}):
        for place, use in tokens.items():
            last_use[place] = use
        plan = build_plan(GEOMETRY, StaticAllocation(last_use), 4, TOKENS)
        for s in range(most + 1):
            found = layer_inputs(plan, range(s, s + 1), 20).following
            assert (found is None) == (s == most or s in tokens.values())
            for layer, head in np.ndindex(*last_use.shape[:2]) if found is not None else ():
                starts, ends = GEOMETRY.schedule.starts, GEOMETRY.schedule.ends
                own = plan.write_slots[layer, head, starts[s] : ends[s]].tolist()
                mask, slots = found.slot_mask(4)[0, layer, head], found.slots(4)[0, layer, head]
                assert sorted(slots[mask]) == sorted(read_slots(plan, s, layer, head) + own)
    assert layer_inputs(plan, range(1, 3), 20).following is None


@pytest.mark.parametrize("make", [random_static, random_regions])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_pool_is_the_peak_of_live_tokens(make, block_size):
    """Rounded up to one block, whatever the block size."""
    plan = build_plan(GEOMETRY, make(0), block_size, TOKENS)
    assert plan.pool_blocks == -(-plan.live_tokens.max() // block_size)
    assert plan.blocks_after_store.max() <= plan.pool_blocks
    assert (plan.blocks_after_store * block_size >= plan.live_tokens).all()


@pytest.mark.parametrize("make", [random_static, random_regions])
def test_slots_are_never_shared(make):
    plan = build_plan(GEOMETRY, make(2), 4, TOKENS)
    shared = False
    for s in range(GEOMETRY.schedule.num_scales):
        owners, blocks = {}, {}
        for head in np.ndindex(GEOMETRY.num_layers, GEOMETRY.num_heads):
            for slot in read_slots(plan, s, *head):
                assert owners.setdefault(slot, head) == head
                shared |= blocks.setdefault(slot // 4, head) != head
    assert shared  # blocks are


@pytest.mark.parametrize("make", [random_static, random_regions])
def test_last_scales_read_few_runs(make):
    """What has most queries lies together: at most one run more than the blocks that it fills."""
    plan = build_plan(GEOMETRY, make(0), 4, TOKENS)
    runs, last = (plan.stop > plan.start).sum(-1), GEOMETRY.schedule.num_scales - 1
    assert (runs[last] <= -(-plan.capacity[last] // 4) + 1).all() and runs[last].max() > 2


def test_regions_with_two_runs_in_a_block_are_not_written_by_block():
    """Kernels read a block while another one is on its way out, so none may be listed twice. Here
    the last head holds for one scale what the first and the third take of the only block then."""
    held = [[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 3], [1, 1, 1, 1]]
    geometry = Geometry(
        schedule=Schedule.square((1, 2, 3, 4)), num_layers=1, num_heads=4, head_dim=4
    )
    allocation = RegionAllocation(np.array(held, np.int32)[:, None])
    plan = build_plan(geometry, allocation, 4, TOKENS)
    assert plan.pool_blocks == 1 and read_slots(plan, 2, 0, 3) == [3, 2, 0]
    assert [plan.moves(s) for s in range(4)] == [False, True, True, False]


def test_region_tables_grow_and_shrink_at_their_end():
    """The slots of a region after a scale start with those before it: stored tokens need not
    move."""
    plan = build_plan(GEOMETRY, random_regions(3), 2, TOKENS)
    for s in range(GEOMETRY.schedule.num_scales - 1):
        for layer in range(GEOMETRY.num_layers):
            for head in range(GEOMETRY.num_heads):
                before, after = (read_slots(plan, t, layer, head) for t in (s, s + 1))
                common = min(len(before), len(after))
                assert before[:common] == after[:common]


@pytest.mark.parametrize(
    ("entry", "message"), [((1, 0, 0, 5), "does not exist yet"), ((3, 0, 0, 0), "cannot return")]
)
def test_impossible_visibility_is_refused(entry, message):
    visible = np.zeros((6, 3, 2, GEOMETRY.schedule.total_tokens), bool)
    visible[1, :, :, 0] = True
    visible[entry] = True
    with pytest.raises(UserError, match=message):
        StaticAllocation.from_visibility(GEOMETRY, visible)


@pytest.mark.parametrize("seed", range(2))
def test_capacity_counts_what_is_seen(seed):
    """For last uses per token and for whole scales with one last use."""
    allocation = random_static(seed)
    if seed % 2:
        first = allocation.last_use[..., np.array(GEOMETRY.schedule.starts)]
        allocation = StaticAllocation(np.repeat(first, GEOMETRY.schedule.tokens, axis=-1))
    counted = [allocation.visible(GEOMETRY, s).sum(-1) for s in range(6)]
    np.testing.assert_array_equal(allocation.capacity(GEOMETRY), counted)
