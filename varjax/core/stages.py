"""The plan of a model that draws token by token.

A stage is a run of P tokens. Every head has slots for the condition and for B image tokens, the
same in all heads of a layer, so a layer's pool is one array [rows, N, M + B, 2 H] and needs no
tables. Where a policy decides, the last P slots are the buffer: a stage's tokens are written there,
one slot for all rows and heads, and after the stage those that stay move into the slots of those
that leave; nothing else moves. Contents that are known go straight to their slot: B - S of them are
a ring behind S tokens that stay. Capacities are the same in all stages but the first, in which
nothing has to leave, so nothing here grows with the number of tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import jax
import numpy as np
from jaxtyping import Array

from varjax.core import token_state
from varjax.core.allocation import Geometry, StageAllocation
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan, check_block_size
from varjax.core.policy import Policy, Rule
from varjax.core.token_state import LayerCache

BLOCK_SIZES = (16, 8, 4, 2, 1)  # slots of a head are a multiple, if that loses at most 1 %
LOST_AT_MOST = 0.01


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TokenPlan(CachePlan):
    """Slots of every layer's heads, for a model that draws token by token. Stage 0 is the
    condition; `pool_blocks` times `block_size` are the slots of all layers and heads."""

    allocation: StageAllocation

    sequence = property(attrgetter("geometry.schedule"))
    chooses = property(attrgetter("allocation.decides"))
    static_content = property(lambda self: not self.allocation.decides)

    @property
    def layer_slots(self) -> tuple[int, ...]:
        """Slots of a head in every layer, those of the condition included."""
        return tuple(int(b) + self.sequence.condition for b in self.allocation.slots)

    @cached_property
    def live_tokens(self) -> np.ndarray:
        """int64 [K, L]: most tokens in the whole cache (one row) during each stage: before its
        policy has decided. All layers have then stored, so the last axis is constant."""
        held, g = self.allocation.held(self.geometry), self.geometry
        decided, last = self.sequence.stages(self.allocation.period)
        # What a stage draws lies beside what it found until its decision, so that is the peak.
        new = np.array([0] + decided * [self.allocation.period] + [last])
        most = np.minimum(held + new[:, None], self.allocation.slots) + self.sequence.condition
        return np.repeat(most.sum(-1, keepdims=True) * g.num_heads, g.num_layers, axis=1)

    @property
    def used_slots(self) -> np.ndarray:
        """All slots at any time: every head has its own from the start."""
        return np.full_like(self.live_tokens, self.pool_tokens)

    @property
    def whole_because(self) -> str | None:
        # Every head decides by itself about slots of its own, so it may do so anywhere.
        compares = None if self.static_content else self.rule.compares_heads
        if compares is None:
            return None
        return f"compares heads ({compares}), so they must lie on one device: use data only"

    # --- the cache on the device ------------------------------------------------------------------

    def empty_state(
        self, batch_size: int, dtype, compute_dtype="float32", *, groups: int = 1
    ) -> tuple[LayerCache, ...]:
        # Heads have an axis of their own here, so groups of them lie side by side as they are.
        return token_state.empty(self, batch_size, dtype, compute_dtype)

    def kv_arrays(self, state: tuple[LayerCache, ...]) -> list[Array]:
        return jax.tree.leaves([(layer.pool, layer.scale) for layer in state])

    def divide(self, groups: int) -> tuple["TokenPlan", ...]:
        heads = self.geometry.num_heads // groups
        group = replace(
            self,
            geometry=replace(self.geometry, num_heads=heads),
            capacity=self.capacity[..., :heads],
            pool_blocks=self.pool_blocks // groups,
        )
        # All heads of a layer have equally many slots, whatever the policy: groups are alike.
        return (group,) * groups

    # --- for people -------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        stage = np.arange(len(self.capacity))
        # stage 0 is the condition, so stage 1 starts with image token 0, too
        found = {"stages": np.maximum(stage - 1, 0) * self.allocation.period}
        return found if self.allocation.reads is None else found | {"reads": self.allocation.reads}

    def facts(self) -> dict[str, str]:
        return super().facts() | ({} if self.reads is None else {"reads": self.reads})

    @property
    def read_tokens(self) -> int | None:
        a = self.allocation
        return None if a.reads is None else self.sequence.condition + a.protected + int(a.reads[0])

    @property
    def reads(self) -> str | None:
        a, condition = self.allocation, self.sequence.condition
        if a.reads is None:
            return None
        ring, read = int(a.slots[0]) - a.protected, int(a.reads[0])
        share = self.read_tokens / self.sequence.persistent_tokens
        first = f"the first {a.protected} image tokens, " if a.protected else ""
        return (
            f"{first}{read} of the newest {ring} image tokens, which are stored, and the condition "
            f"({condition}): {share:.2%} of full; chosen from image token "
            f"{a.protected + read - 1} to {a.protected + ring - 2}"
        )

    def _decided(self) -> tuple[np.ndarray | None, ...]:
        a = self.allocation
        last = -1 if a.group_stage is None else a.group_stage
        numbers = np.array([a.period, a.decides, a.protected, last])
        found = a.slots, numbers, a.kept
        return found if a.reads is None else (*found, a.reads)


def fit_slots(
    geometry: Geometry, rule: Rule, allocate: Callable[[float], StageAllocation], groups: int = 1
) -> tuple[StageAllocation, int]:
    """The allocation that is left when the slots of every head are rounded to blocks of a size that
    kernels like, and the size of these blocks. What papers count is not rounded, nor a full cache.

    allocate: the allocation of a budget. `UserError` where too few slots are left. groups: of
      heads, which are alike here.
    """
    policy, sequence = rule.policy, geometry.schedule
    wanted, asked = rule.slots(geometry, policy.budget), policy.block_size
    total = wanted + sequence.condition
    exact = policy.accounting == "tokens" or wanted == sequence.steps
    # The largest size that loses at most 1 % of the slots is the best one for kernels; a size that
    # was asked for may lose more.
    most = 0 if exact else total if asked else LOST_AT_MOST * total
    for size in (check_block_size(asked),) if asked and not exact else BLOCK_SIZES:
        lost = total % size
        if lost <= most and wanted - lost >= rule.minimum_slots(geometry):
            break
    else:
        raise UserError(
            f"policy {policy.name!r} at budget {policy.budget:g} has {total} slots per head, which "
            f"are too few in blocks of {asked}: choose a smaller block_size, or accounting=tokens"
        )
    # The rule divides a budget by itself, so it is told one that pays for the rounded slots.
    rounded = lost and policy.shrinks
    budget = (total - lost) / sequence.persistent_tokens if rounded else policy.budget
    allocation = allocate(budget)
    if ((allocation.slots + sequence.condition) % size).any():
        size = 1  # sizes that the policy was given, not the planner
    return allocation, size


def build_plan(
    geometry: Geometry, allocation: StageAllocation, block_size: int, policy: Policy
) -> TokenPlan:
    """Lays out an allocation: every head of a layer has slots of its own."""
    condition, heads = geometry.schedule.condition, geometry.num_heads
    of_heads, held = allocation.slots + condition, allocation.held(geometry)
    # Stage 0 stores the condition; from then on every head holds it besides its image tokens.
    capacity = np.concatenate([held[:1], held[1:] + condition]).astype(np.int32)
    return TokenPlan(
        geometry=geometry,
        allocation=allocation,
        block_size=block_size,
        pool_blocks=int(of_heads.sum()) * heads // block_size,
        capacity=np.broadcast_to(capacity[..., None], (*capacity.shape, heads)),
        policy=policy,
    )
