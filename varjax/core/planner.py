"""From policy and budget to a CachePlan, for both kinds of models: what the policy may keep, and in
blocks of how many slots, when rounding is charged to the budget."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from varjax.core import arguments, stages
from varjax.core.allocation import (
    Allocation,
    Geometry,
    RegionAllocation,
    StageAllocation,
    StaticAllocation,
)
from varjax.core.allocator import peak_tokens
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan, check_block_size
from varjax.core.policy import Policy, Rule
from varjax.core.scale_plan import build_plan
from varjax.core.sequence import SCALES, TOKENS

BLOCK_SIZES = (64, 32, 16, 8, 4, 2, 1)
# Kernels fetch whole blocks, and what a head holds need not begin where a block does. In blocks of
# S slots, heads of C tokens fetch about 1 + (S - 1) / C slots per token: at most 6 % too many if a
# head fills 16 blocks. Blocks smaller than 16 cost copies and table entries. They are only taken
# where rounding, less than one block in all, costs more than 1 % of the tokens.
BLOCKS_PER_HEAD = 16
USUAL_BLOCK = 16
LOST_AT_MOST = 0.01
SEARCH_STEPS = 14


def plan_cache(
    geometry: Geometry, policy: Policy, calibration: Any = None, *, groups: int = 1
) -> CachePlan:
    """Plans the cache of `policy` (its `budget`, `accounting` and `block_size` fields count) for a
    model. `UserError` if the policy does not serve such a model, or an argument of it cannot work
    there; if the budget is infeasible (the message names the smallest feasible one), or the block
    size is.

    calibration: a `varjax.calibration.Calibration`, which only the policy looks at.
    groups: devices that the heads are divided over; each one's pool keeps the budget by itself.
    """
    if geometry.num_heads % groups:
        raise UserError(
            f"{geometry.num_heads} heads cannot be split evenly over model={groups} devices: "
            f"choose a divisor of {geometry.num_heads}"
        )
    policy, allocation, block_size = choose(geometry, policy, calibration, groups)
    *_, build = WAYS[geometry.kind]
    plan = build(geometry, allocation, block_size, policy)
    if plan.chooses and not plan.rule.selects:
        raise UserError(
            f"policy {policy.name!r}: `allocate` leaves it open which tokens stay, but there is no "
            f"`select` that decides: write one, or return an allocation whose contents are known"
        )
    return plan


def choose(
    geometry: Geometry, policy: Policy, calibration: Any = None, groups: int = 1
) -> tuple[Policy, Allocation | StageAllocation, int]:
    """Returns what `plan_cache` lays out: the prepared policy, its allocation and the slots of a
    block. The errors are the same."""
    policy = policy.rule(geometry.kind).prepare(geometry, calibration)
    # of the prepared policy, whose arguments the calibration and the model have filled in
    rule = policy.rule(geometry.kind)
    rule.check(geometry)
    rule.check_budget(geometry)
    kinds, fit, _ = WAYS[geometry.kind]

    def allocate(budget: float) -> Allocation | StageAllocation:
        found = rule.allocate(geometry, budget)
        words = f"a {' or '.join(kind.__name__ for kind in kinds)}"
        said = f"policy {policy.name!r}: result of `allocate`"
        return arguments.instance(said, found, kinds, words)

    return policy, *fit(geometry, rule, allocate, groups)


def _fit_blocks(
    geometry: Geometry, rule: Rule, allocate: Callable[[float], Allocation], groups: int
) -> tuple[Allocation, int]:
    """The allocation that is left when slots are rounded to blocks of one pool that heads share,
    and the size of these blocks."""
    policy = rule.policy
    # Papers count tokens and leave rounding out; here it is charged to the budget by default, so
    # that the bytes of the pool, not a count of tokens, keep the promise.
    if policy.accounting == "tokens":
        allocation = allocate(policy.budget)
        tokens = peak_tokens(geometry, allocation)
        block_size = policy.block_size or _usual_size(geometry, tokens)
    else:
        search = _Search(geometry, rule, allocate)
        allocation, block_size = search.run()
        # others are not divided
        if groups > 1 and isinstance(allocation, StaticAllocation):
            allocation, block_size = search.divided(groups, allocation, block_size)
    return allocation, check_block_size(block_size)


def _sizes(geometry: Geometry, tokens: int) -> tuple[int, ...]:
    """Block sizes for so many tokens at the peak, the best first."""
    most = tokens / (geometry.num_layers * geometry.num_heads) / BLOCKS_PER_HEAD
    return tuple(b for b in BLOCK_SIZES if b <= max(most, USUAL_BLOCK))


def _usual_size(geometry: Geometry, tokens: int) -> int:
    """The best block size whose pool exceeds the tokens by at most 1 %. There always is one, as
    blocks of one slot round nothing up."""
    # -tokens % b: slots of the last block that stay empty
    fits = (b for b in _sizes(geometry, tokens) if -tokens % b <= LOST_AT_MOST * tokens)
    return next(fits)


def pool_slots(geometry: Geometry, allocation: Allocation, block_size: int) -> int:
    """Slots of the pool that an allocation needs (scale by scale), without building its tables."""
    return -(-peak_tokens(geometry, allocation) // block_size) * block_size


def cost(geometry: Geometry, allocation: Allocation, block_size: int = 0) -> float:
    """The budget that pays for an allocation: the fraction of the full cache that its pool takes.
    block_size: slots of a block; of a size that planning does not use, the usual one."""
    if block_size not in (128, *BLOCK_SIZES):
        block_size = _usual_size(geometry, peak_tokens(geometry, allocation))
    slots = pool_slots(geometry, allocation, block_size)
    return min(1.0, max(1, slots) / max(1, geometry.dense_tokens))


@dataclass(frozen=True)
class _Search:
    """The search for what may be kept, and in blocks of what size, when the rounded pool has to fit
    the budget. allocate: the allocation of a budget."""

    geometry: Geometry
    rule: Rule
    allocate: Callable[[float], Allocation]

    def run(self) -> tuple[Allocation, int]:
        """The best block size that loses at most 1 % of the tokens, and what is kept with it."""
        policy, geometry = self.rule.policy, self.geometry
        wanted = peak_tokens(geometry, self.allocate(policy.budget))
        # a budget of 1 must keep everything
        share = 1.0 if wanted == geometry.dense_tokens else 1 - LOST_AT_MOST
        asked = check_block_size(policy.block_size) if policy.block_size else 0
        for block_size in (asked,) if asked else _sizes(geometry, wanted):
            allocation = self._largest(block_size)
            if allocation is None:
                continue
            kept = peak_tokens(geometry, allocation)
            enough = kept >= share * wanted
            # contents that are given are not kept in part: there the pool may be too large
            loose = not policy.shrinks and -kept % block_size > LOST_AT_MOST * kept
            if (asked and share < 1) or (enough and (asked or not loose)):
                return allocation, block_size
        problem = f"policy {policy.name!r} at budget {policy.budget:g} does not fit"
        problem += f" {self._limit(geometry)} slots" + f" in blocks of {asked}" * bool(asked)
        for size in BLOCK_SIZES:
            if self._largest(size) is not None:
                hint = f"choose block_size={size} or smaller, or accounting=tokens"
                raise UserError(f"{problem}: {hint}")
        raise UserError(
            f"{problem}: after some layer of some scale it holds "
            f"{wanted / max(1, geometry.dense_tokens):.4f} of the full cache; give that budget, or "
            f"accounting=tokens"
        )

    def _limit(self, geometry: Geometry) -> int:
        """Slots that the budget pays for; 0.29 * 100 is 29, not 28."""
        return int(self.rule.policy.budget * geometry.dense_tokens + 1e-6)

    def _largest(self, block_size: int) -> Allocation | None:
        """Allocation of the policy at the largest budget whose rounded pool fits the limit."""

        def attempt(budget: float) -> Allocation | None:
            found = self.allocate(budget)
            fits = pool_slots(self.geometry, found, block_size) <= self._limit(self.geometry)
            return found if fits else None

        return self._bisected(attempt)

    def _bisected(
        self,
        attempt: Callable[[float], Allocation | None],
        full: Callable[[Allocation], bool] | None = None,
    ) -> Allocation | None:
        """Bisects the budget handed to the policy; above the policy's own only where `full` says
        when a pool is full enough. attempt: the allocation of a budget, None if it does not fit."""
        policy = self.rule.policy
        best, low, high = attempt(policy.budget), policy.budget, 1.0
        if not policy.shrinks or (best is not None and full is None):
            return best
        if best is None:
            low, high = self.rule.minimum_budget(self.geometry), policy.budget
            best = attempt(low)
        # What a policy keeps grows with its budget, but in whole tokens, so the search is over real
        # numbers; it stops after so many halvings that less than a token per head is left to find.
        for _ in range(SEARCH_STEPS if best is not None else 0):
            if full is not None and full(best):
                break
            middle = (low + high) / 2
            found = attempt(middle)
            low, high, best = (middle, high, found) if found is not None else (low, middle, best)
        return best

    def divided(
        self, groups: int, allocation: StaticAllocation, block_size: int
    ) -> tuple[Allocation, int]:
        """Returns what every device has room for where heads lie on several, each of which has a
        pool for its own heads and its share of the budget, in blocks of at most `block_size`.

        Heads of one device may ask for more than its share, as HeatKV's do. Every device's heads
        then keep what the policy gives them at a budget of their own, with which their pool is
        full.
        """
        own = replace(self.geometry, num_heads=self.geometry.num_heads // groups)
        parts = _parts(allocation, groups)
        if all(pool_slots(own, part, block_size) <= self._limit(own) for part in parts):
            return allocation, block_size
        policy, asked = self.rule.policy, self.rule.policy.block_size
        least = self._filled(own, groups, 1)  # nothing is rounded up in blocks of one slot
        most = sum(peak_tokens(own, part) for part in least)
        smaller = [b for b in BLOCK_SIZES if b <= block_size]
        # Large blocks come first: kernels read them with the fewest copies and table entries.
        for size in (asked,) if asked else smaller:
            found = self._filled(own, groups, size)
            kept = sum(peak_tokens(own, part) for part in found)
            if len(found) == groups and (asked or kept >= (1 - LOST_AT_MOST) * most):
                return StaticAllocation(np.concatenate([p.last_use for p in found], 1)), size
        problem = f"policy {policy.name!r} at budget {policy.budget:g} does not fit with heads on"
        problem += f" {groups} devices"
        for size in smaller if asked and len(least) == groups else ():
            if len(self._filled(own, groups, size)) == groups:
                problem += f" in blocks of {asked}: choose block_size={size} or smaller"
                raise UserError(f"{problem}, or accounting=tokens")
        raise UserError(
            f"{problem}: the heads of one ask for more than its share; choose accounting=tokens, "
            f"another budget, or fewer devices along model"
        )

    def _filled(self, own: Geometry, groups: int, block_size: int) -> list[StaticAllocation]:
        """The fullest that fits of every device; fewer if one has no room for the least. own: the
        geometry of a device's heads."""
        # The searches of all devices begin alike: the policy is asked once for each budget.
        known, found, limit = {}, [], self._limit(own)
        # what a further halving can find is less than rounding may cost
        enough = (1 - LOST_AT_MOST / 4) * limit
        for number in range(groups):

            def attempt(budget: float, number=number) -> StaticAllocation | None:
                if budget not in known:
                    known[budget] = _parts(self.allocate(budget), groups)
                part = known[budget][number]
                return part if pool_slots(own, part, block_size) <= limit else None

            best = self._bisected(attempt, lambda part: peak_tokens(own, part) >= enough)
            found += [] if best is None else [best]
        return found


def _parts(allocation: StaticAllocation, groups: int) -> list[StaticAllocation]:
    return [StaticAllocation(part) for part in np.split(allocation.last_use, groups, axis=1)]


# Where a model draws scales, or tokens: kinds of allocations; the allocation that is left when
# slots are rounded, with the slots of a block; what lays it out.
WAYS: dict[str, tuple[tuple[type, ...], Callable, Callable[..., CachePlan]]] = {
    SCALES: ((StaticAllocation, RegionAllocation), _fit_blocks, build_plan),
    TOKENS: ((StageAllocation,), stages.fit_slots, stages.build_plan),
}
