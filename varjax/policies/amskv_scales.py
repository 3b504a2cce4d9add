"""The rule of AMS-KV on models that draw scale by scale; its manual is
`varjax.policies.amskv.AMSKV`."""

import dataclasses

import numpy as np

from varjax.calibration.data import Calibration
from varjax.core import allocator, planner
from varjax.core.allocation import Allocation, Geometry, RegionAllocation, StaticAllocation
from varjax.core.observation import Observation
from varjax.core.policy import Policy
from varjax.policies import amskv_rules as rules
from varjax.policies import capacities
from varjax.policies.refusals import NotGiven, refuse_more
from varjax.policies.scale_rule import ScaleRule, per_layer


class AMSKVScales(ScaleRule):
    """Sizes of efficient and demanding layers, and their contents where they are known."""

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> Policy:
        if calibration is not None:
            calibration.check(geometry)
        given = self.policy
        values = rules.preset_values(given, geometry) if given.preset else {}
        policy = dataclasses.replace(given, preset="", _calibration=calibration, **values)
        rules.check(policy, geometry)
        policy = policy.with_layers(geometry, guess=bool(given.preset))
        if policy.budgeted:
            return policy
        allocation = AMSKVScales(policy).allocate(geometry, 1.0)
        if isinstance(given.budget, NotGiven):  # then it is what the sizes cost
            budget = planner.cost(geometry, allocation, given.block_size)
            return dataclasses.replace(policy, budget=budget)
        sizes, peak = f"cmin={policy.cmin}, cmax={policy.cmax}", allocator.peak_tokens
        refuse_more(policy, geometry, policy.budget, peak(geometry, allocation), sizes)
        return policy

    def minimum_budget(self, geometry: Geometry) -> float:
        least = 1 + self.policy.locked_tokens(geometry, 0)
        return min(1.0, least / max(1, geometry.schedule.persistent_tokens))

    def allocate(self, geometry: Geometry, budget: float) -> Allocation:
        schedule, sizes = geometry.schedule, self.policy.sizes(geometry, budget)
        if self.policy.online:
            recent = min(sizes.cmin, schedule.persistent_tokens) - sizes.condensed
            held = capacities.capacity(geometry, sizes.cmax)
            return RegionAllocation(held, ragged=True, protected=sizes.condensed, recent=recent)
        below = self.policy.below(geometry)
        kinds, kind_of_layer = np.unique(below, axis=0, return_inverse=True)
        held = np.stack([sizes.contents(schedule.tokens, kind)[0] for kind in kinds])
        last_use = (schedule.scale_of_token + held[:, :-1].sum(1)).astype(np.int16)
        last_use = last_use[kind_of_layer.reshape(-1), None]
        shape = (geometry.num_layers, geometry.num_heads, schedule.total_tokens)
        return StaticAllocation(np.broadcast_to(last_use, shape))

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> RegionAllocation:
        """Condensed and newest tokens (CLRU) in capacities that another policy has decided."""
        locked = self.policy.locked_tokens(geometry, capacities.uniform(geometry, budget))
        recent = geometry.schedule.persistent_tokens
        return RegionAllocation(capacity, protected=locked, recent=recent)

    def steady_tokens(self, geometry: Geometry) -> int:
        sizes = self.policy.sizes(geometry, self.policy.budget)
        wide = self.policy.wide(geometry, sizes)
        return int(np.where(wide, sizes.cmax, sizes.cmin).sum())

    def plan_lines(self, geometry: Geometry) -> list[str]:
        sizes = self.policy.sizes(geometry, self.policy.budget)
        rounded = "" if self.policy.cmax else " (before rounding to blocks)"
        rest = f"{sizes.condensed} of them condensed{rounded}"
        if self.policy.online:
            theta = f"{self.policy.theta:g}"
            lines = [
                f"layers    demanding ones are found while generating (similarity below {theta}), "
                f"so every layer is planned with Cmax"
            ]
            if isinstance(self.policy.theta, NotGiven):
                lines.append(
                    f"theta     {theta} is assumed, for keys of norm 1; if this model does not "
                    f"normalise its keys, calibrate it or give theta="
                )
            return [*lines, f"sizes     Cmin {sizes.cmin}, Cmax {sizes.cmax} tokens, {rest}"]
        if sizes.cmin == sizes.cmax:
            return [f"sizes     {sizes.cmin} tokens in every layer, {rest}"]
        named = np.flatnonzero(self.policy.wide(geometry, sizes)).tolist()
        return [
            f"layers    demanding: {' '.join(map(str, named)) or 'none'}",
            f"sizes     Cmax {sizes.cmax} tokens in {len(named)} of {geometry.num_layers} layers, "
            f"Cmin {sizes.cmin} in the others, {rest}",
        ]

    def inputs(self, geometry: Geometry, allocation: Allocation, image_index: np.ndarray):
        """int32 [K, L, 4]: Cmin, Cmax, condensed tokens, and whether oversize scales fill what is
        left; None for static contents."""
        if not isinstance(allocation, RegionAllocation):
            return None
        cmin = allocation.protected + allocation.recent
        cmax = max(cmin, int(allocation.region_capacity.max(initial=0)))
        adopted = allocation.recent >= geometry.schedule.persistent_tokens
        fill = self.policy.fill or adopted
        return per_layer(geometry, np.array([cmin, cmax, allocation.protected, fill], np.int32))

    def init_state(self, geometry: Geometry, rows: int):
        """bool [R], whether the layer is demanding."""
        return np.zeros(rows, bool) if self.policy.online else None

    def update_state(self, obs: Observation):
        if not self.policy.online:
            return obs.state
        cmin, cmax, _, fill = obs.inputs
        new, held = (obs.live & obs.own)[:, 0].sum(-1), obs.live[:, 0].sum(-1)
        exhausted = (held > cmin) & ((new <= cmax) | (fill > 0)) & (obs.scale > 0)
        return obs.state | (exhausted & (obs.key_similarity < self.policy.theta))
