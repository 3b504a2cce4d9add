"""From policy and budget to a CachePlan: choose the block size and charge rounding to the
budget."""

from varjax.cache import allocator
from varjax.cache.allocation import Allocation, Geometry
from varjax.cache.allocator import peak_tokens
from varjax.cache.plan import CachePlan, build_plan, check_block_size
from varjax.errors import UserError

BLOCK_SIZES = (64, 32, 16, 8, 4, 2, 1)
LARGEST_BLOCK_SHORT = 32  # schedules with fewer persistent tokens than LONG_SCHEDULE
LONG_SCHEDULE = 1024
# A block size is taken if rounding costs at most 5 % of the tokens; none if nothing is dropped.
KEPT_AT_LEAST = 0.95
SEARCH_STEPS = 14


def plan_cache(geometry: Geometry, policy, calibration=None) -> CachePlan:
    """Plan the cache of `policy` (its `budget`, `accounting` and `block_size` fields count) for a
    model.

    Raises:
      UserError: the budget is infeasible (the message names the smallest feasible one), or the
        block size is.
    """
    policy = policy.prepare(geometry, calibration)
    policy.check(geometry)

    def allocate(budget: float) -> Allocation:
        return policy.allocate(geometry, budget, calibration)

    # Papers count tokens and leave rounding out; here it is charged to the budget by default, so
    # that the bytes of the pool, not a count of tokens, keep the promise.
    if policy.accounting == "tokens":
        allocation = allocate(policy.budget)
        sizes = _candidates(geometry)
        block_size = policy.block_size or _least_rounding(geometry, allocation, sizes)
    else:
        allocation, block_size = _charge_rounding(geometry, policy, allocate)
    return build_plan(
        geometry,
        allocation,
        block_size=check_block_size(block_size),
        budget=policy.budget,
        accounting=policy.accounting,
        policy=policy,
    )


def _candidates(geometry: Geometry) -> tuple[int, ...]:
    long = geometry.schedule.persistent_tokens >= LONG_SCHEDULE
    return tuple(b for b in BLOCK_SIZES if long or b <= LARGEST_BLOCK_SHORT)


def pool_slots(geometry: Geometry, allocation: Allocation, block_size: int) -> int:
    """Slots of the pool that an allocation needs, without building its tables."""
    return allocator.blocks_needed(geometry, allocation, block_size) * block_size


def cost(geometry: Geometry, allocation: Allocation, block_size: int = 0) -> float:
    """What given contents cost, as a budget: the fraction of the full cache that their pool takes
    in blocks of at most `LARGEST_BLOCK_SHORT` slots (or as asked) that round up by at most 5 %."""
    usual = tuple(b for b in BLOCK_SIZES if b <= LARGEST_BLOCK_SHORT)
    if block_size not in (128, *BLOCK_SIZES):
        block_size = _least_rounding(geometry, allocation, usual)
    slots = pool_slots(geometry, allocation, block_size)
    return min(1.0, max(1, slots) / max(1, geometry.dense_tokens))


def _least_rounding(geometry: Geometry, allocation: Allocation, sizes: tuple[int, ...]) -> int:
    """The largest block size whose pool exceeds the live tokens by at most 5 %: blocks of one slot
    round nothing up, so there is one."""
    tokens = peak_tokens(geometry, allocation)
    pools = ((b, pool_slots(geometry, allocation, b)) for b in sizes)
    return next(b for b, slots in pools if slots * KEPT_AT_LEAST <= tokens)


def _charge_rounding(geometry: Geometry, policy, allocate) -> tuple[Allocation, int]:
    """The largest block size that keeps 95 % of the tokens when the rounded pool must fit the
    budget."""
    limit = int(policy.budget * geometry.dense_tokens + 1e-6)  # 0.29 * 100 is 29, not 28
    exact = allocate(policy.budget)
    wanted = peak_tokens(geometry, exact)
    share = 1.0 if wanted == geometry.dense_tokens else KEPT_AT_LEAST
    lowest = policy.minimum_budget(geometry)
    asked = check_block_size(policy.block_size) if policy.block_size else 0
    # Larger blocks first: kernels fetch a block per copy, and tables have fewer entries.
    for block_size in (asked,) if asked else _candidates(geometry):
        allocation = _largest_that_fits(geometry, policy, allocate, lowest, limit, block_size)
        if allocation is None:
            continue
        kept = peak_tokens(geometry, allocation)
        loose = pool_slots(geometry, allocation, block_size) * KEPT_AT_LEAST > kept
        whole = share == 1.0 and kept < wanted  # a budget of 1 must keep everything
        if (asked and not whole) or (kept >= share * wanted and (policy.shrinks or not loose)):
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
