"""From policy and budget to a CachePlan: choose the block size and charge rounding to the
budget."""

from collections.abc import Callable
from typing import Any, NamedTuple

from varjax.cache import allocator, stages
from varjax.cache.allocation import Allocation, Geometry
from varjax.cache.allocator import peak_tokens
from varjax.cache.observation import Policy, Rule
from varjax.cache.plan import CachePlan, check_block_size
from varjax.cache.scale_plan import build_plan
from varjax.cache.stages import StageAllocation
from varjax.errors import UserError
from varjax.sequence import SCALES, TOKENS

BLOCK_SIZES = (64, 32, 16, 8, 4, 2, 1)
# Kernels fetch whole blocks, and what a head holds need not begin where a block does. Of a block
# size S, heads of C tokens fetch about 1 + (S - 1) / C slots per token: at most 6 % too many in
# blocks of which they fill 16. Blocks smaller than 16 cost copies and table entries, and are only
# taken where rounding, less than one block in all, costs more than 1 % of the tokens.
BLOCKS_PER_HEAD = 16
USUAL_BLOCK = 16
LOST_AT_MOST = 0.01
SEARCH_STEPS = 14


class Layout(NamedTuple):
    """What planning does in its own way for one kind of model.

    fit: from a geometry, a rule and the allocation of a budget what may be kept when rounding is
      charged to the budget, and in blocks of how many slots.
    build: the plan of that allocation.
    """

    fit: Callable[[Geometry, Rule, Callable], tuple[Allocation | StageAllocation, int]]
    build: Callable[..., CachePlan]


def plan_cache(geometry: Geometry, policy: Policy, calibration: Any = None) -> CachePlan:
    """Plan the cache of `policy` (its `budget`, `accounting` and `block_size` fields count) for a
    model. calibration: a `varjax.calibration.Calibration`, which only the policy looks at.

    Raises:
      UserError: the policy does not serve such a model, or an argument of it cannot work there; the
        budget is infeasible (the message names the smallest feasible one), or the block size is.
    """
    policy, allocation, block_size = choose(geometry, policy, calibration)
    return LAYOUTS[geometry.kind].build(
        geometry,
        allocation,
        block_size=block_size,
        budget=policy.budget,
        accounting=policy.accounting,
        policy=policy,
    )


def choose(
    geometry: Geometry, policy: Policy, calibration: Any = None
) -> tuple[Policy, Allocation | StageAllocation, int]:
    """What `plan_cache` lays out: the policy as it was prepared, what may be kept, and in blocks of
    how many slots. Raises `UserError` as it does."""
    policy = policy.rule(geometry.kind).prepare(geometry, calibration)
    rule = policy.rule(geometry.kind)
    rule.check(geometry)
    rule.check_budget(geometry)

    def allocate(budget: float) -> Allocation | StageAllocation:
        return rule.allocate(geometry, budget, calibration)

    return policy, *LAYOUTS[geometry.kind].fit(geometry, rule, allocate)


def fit_blocks(
    geometry: Geometry, rule: Rule, allocate: Callable[[float], Allocation]
) -> tuple[Allocation, int]:
    """`Layout.fit` where heads share the blocks of one pool."""
    # Papers count tokens and leave rounding out; here it is charged to the budget by default, so
    # that the bytes of the pool, not a count of tokens, keep the promise.
    policy = rule.policy
    if policy.accounting == "tokens":
        allocation = allocate(policy.budget)
        tokens = peak_tokens(geometry, allocation)
        block_size = policy.block_size or _usual_size(geometry, tokens)
    else:
        allocation, block_size = _charge_rounding(geometry, rule, allocate)
    return allocation, check_block_size(block_size)


LAYOUTS = {
    SCALES: Layout(fit_blocks, build_plan),
    TOKENS: Layout(stages.fit_slots, stages.build_plan),
}


def _sizes(geometry: Geometry, tokens: int) -> tuple[int, ...]:
    """Block sizes for so many tokens at the peak, the best first."""
    most = tokens / (geometry.num_layers * geometry.num_heads) / BLOCKS_PER_HEAD
    return tuple(b for b in BLOCK_SIZES if b <= max(most, USUAL_BLOCK))


def _usual_size(geometry: Geometry, tokens: int) -> int:
    """The best block size whose pool exceeds the tokens by at most 1 %: blocks of one slot round
    nothing up, so there is one."""
    fits = (b for b in _sizes(geometry, tokens) if -tokens % b <= LOST_AT_MOST * tokens)
    return next(fits)


def pool_slots(geometry: Geometry, allocation: Allocation, block_size: int) -> int:
    """Slots of the pool that an allocation of a model that draws scale by scale needs, without
    building its tables."""
    return allocator.blocks_needed(geometry, allocation, block_size) * block_size


def cost(geometry: Geometry, allocation: Allocation, block_size: int = 0) -> float:
    """What given contents cost, as a budget: the fraction of the full cache that their pool takes
    in blocks of the usual size, or as asked."""
    if block_size not in (128, *BLOCK_SIZES):
        block_size = _usual_size(geometry, peak_tokens(geometry, allocation))
    slots = pool_slots(geometry, allocation, block_size)
    return min(1.0, max(1, slots) / max(1, geometry.dense_tokens))


def _charge_rounding(
    geometry: Geometry, rule: Rule, allocate: Callable[[float], Allocation]
) -> tuple[Allocation, int]:
    """What may be kept, and in blocks of what size, when the rounded pool must fit the budget: the
    best block size that loses at most 1 % of the tokens."""
    policy = rule.policy
    limit = int(policy.budget * geometry.dense_tokens + 1e-6)  # 0.29 * 100 is 29, not 28
    wanted = peak_tokens(geometry, allocate(policy.budget))
    # a budget of 1 must keep everything
    share = 1.0 if wanted == geometry.dense_tokens else 1 - LOST_AT_MOST
    lowest = rule.minimum_budget(geometry)
    asked = check_block_size(policy.block_size) if policy.block_size else 0
    for block_size in (asked,) if asked else _sizes(geometry, wanted):
        allocation = _largest_that_fits(geometry, policy, allocate, lowest, limit, block_size)
        if allocation is None:
            continue
        kept = peak_tokens(geometry, allocation)
        enough = kept >= share * wanted
        # what was given is not kept in part: here it is the pool that may be too large
        loose = not policy.shrinks and -kept % block_size > LOST_AT_MOST * kept
        if (asked and share < 1) or (enough and (asked or not loose)):
            return allocation, block_size
    raise UserError(_too_large(geometry, policy, allocate, lowest, limit, asked))


def _too_large(geometry: Geometry, policy, allocate, lowest, limit: int, asked: int) -> str:
    """Why no pool fits, and what would."""
    problem = f"policy {policy.name!r} at budget {policy.budget:g} does not fit {limit} slots"
    problem += f" in blocks of {asked}" if asked else ""
    for size in BLOCK_SIZES:
        if _largest_that_fits(geometry, policy, allocate, lowest, limit, size) is not None:
            return f"{problem}: choose block_size={size} or smaller, or accounting=tokens"
    needed = peak_tokens(geometry, allocate(policy.budget)) / max(1, geometry.dense_tokens)
    return (
        f"{problem}: after some layer of some scale it holds {needed:.4f} of the full cache; give "
        f"that budget, or accounting=tokens"
    )


def _largest_that_fits(geometry, policy, allocate, lowest, limit, block_size) -> Allocation | None:
    """Bisect the budget handed to the policy until its rounded pool fits `limit` slots."""

    def attempt(budget):
        allocation = allocate(budget)
        return allocation if pool_slots(geometry, allocation, block_size) <= limit else None

    best = attempt(policy.budget)
    if best is not None or not policy.shrinks:
        return best
    # What a policy keeps grows with its budget, but in whole tokens, so the search is over real
    # numbers; it stops after so many halvings that less than a token per head is left to find.
    low, high = lowest, policy.budget
    best = attempt(low)
    for _ in range(SEARCH_STEPS if best is not None else 0):
        middle = (low + high) / 2
        found = attempt(middle)
        low, high, best = (middle, high, found) if found is not None else (low, middle, best)
    return best
