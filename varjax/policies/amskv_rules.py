"""AMS-KV on the host: its two algorithms; the sizes that a budget buys; its arguments, published
configurations and checks; its rule. A policy here is a `varjax.policies.AMSKV`, with the manual.

A layer's capacity (the paper's C_bgt) is C_min, or C_max once the layer turned demanding. A scale
with more tokens than the capacity is oversize.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from varjax.calibration.data import Calibration
from varjax.core import allocator, planner
from varjax.core.allocation import Allocation, Geometry, RegionAllocation, StaticAllocation
from varjax.core.errors import choose
from varjax.core.observation import Observation
from varjax.core.policy import Policy
from varjax.core.sequence import Schedule
from varjax.policies import capacities
from varjax.policies.scale_rule import NotGiven, ScaleRule, per_layer, refuse_more

VAR_256 = Schedule.square((1, 2, 3, 4, 5, 6, 8, 10, 13, 16))
VAR_512 = Schedule.square((1, 2, 3, 4, 6, 9, 13, 18, 24, 32))
MODELS = {"d30": (VAR_256, 30), "d36": (VAR_512, 36)}  # schedule and layers, by preset's first word
# whole scales (in braces) that give the published memory; one capacity of each pair is stated
PRESETS = {
    "d30-table3": {"cmin": 41, "cmax": 430, "demanding": 8},  # {1, 2, 6} and {1, 2, 13, 16}
    "d36-table3": {"cmin": 581, "cmax": 1029, "demanding": 5},  # {1, 2, 24} and {1, 2, 32}
    "d30-abstract": {"cmin": 41, "cmax": 274, "demanding": 8},  # {1, 2, 6} and {1, 2, 10, 13}
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens per head: C_min, C_max, and the condensed ones, which are locked.

    fill: whether the newest tokens of an oversize scale that still fit are kept; otherwise none.
    """

    cmin: int
    cmax: int
    condensed: int
    fill: bool = False

    def contents(self, tokens: Sequence[int], below: Sequence[bool]) -> tuple[np.ndarray, list]:
        """Algorithm 1: (bool [K, sum of tokens], what a layer holds after each scale, the last one
        included; its capacity before each scale and after the last). below: whether each scale's
        similarity is below the threshold."""
        starts = np.cumsum([0, *tokens])
        retained = np.zeros((len(tokens), starts[-1]), bool)
        held, sizes = np.zeros(0, np.int64), [self.cmin]
        for i, count in enumerate(tokens):
            stored = self.fill or count <= self.cmax
            turns = stored and below[i] and held.size + count > sizes[-1]
            sizes.append(self.cmax if turns else sizes[-1])
            if stored:
                held = self._append(held, np.arange(starts[i], starts[i + 1]), sizes[-1])
            retained[i, held] = True
        return retained, sizes

    def _append(self, held: np.ndarray, own: np.ndarray, capacity: int) -> np.ndarray:
        """Algorithm 2 (CLRU): the condensed and the newest of both."""
        both = np.concatenate([held, own])
        if both.size <= capacity:
            return both
        if own.size <= capacity:
            return np.concatenate([both[: self.condensed], both[self.condensed - capacity :]])
        return np.concatenate([held, own[both.size - capacity :]]) if self.fill else held

    def wide(self, tokens: Sequence[int], below: np.ndarray) -> np.ndarray:
        """bool [L]: layers that end with C_max, from bool [L, K]."""
        return np.array([self.contents(tokens, row)[1][-1] == self.cmax for row in below])


def divide(
    geometry: Geometry, budget: float, demanding: int | None, least: int, ratio: float
) -> tuple[int, int]:
    """(C_min, C_max) of a budget.

    `demanding` layers hold `ratio` times as much as the others, as nearly as whole tokens and C_min
    >= `least` allow. All layers together hold at most budget * F * L tokens, with budget 1 exactly
    that many. None: it is not known which layers are demanding, so any layer can hold C_max.
    """
    full, layers = geometry.schedule.persistent_tokens, geometry.num_layers
    if demanding is None:
        cmax = capacities.uniform(geometry, budget)
        return (full if cmax == full else min(cmax, max(least, round(cmax / ratio)))), cmax
    total, efficient = int(budget * full * layers + 1e-6), layers - demanding
    if not demanding or not efficient:
        return (total // layers,) * 2
    cmin = min(total // layers, max(least, round(total / (efficient + ratio * demanding))))
    cmax = (total - efficient * cmin) // demanding
    if cmax < full:
        return cmin, cmax
    return min(full, (total - demanding * full) // efficient), full


# --- arguments ---


def preset_values(policy: Policy, geometry: Geometry) -> dict[str, int]:
    """The values that a policy's preset fills in; `UserError` if it is for another model or
    contradicts an argument."""
    name = policy.preset
    values = PRESETS[choose("preset of policy 'amskv'", name, PRESETS)]
    schedule, layers = MODELS[name[:3]]
    if (schedule, layers) != (geometry.schedule, geometry.num_layers):
        policy.refuse(
            f"preset={name} is for another model, of {layers} layers and the schedule {schedule}: "
            f"choose another preset, or cmin and cmax, or a budget"
        )
    for field in values:
        if getattr(policy, field) != getattr(type(policy), field):
            policy.refuse(
                f"preset={name} and {field}={getattr(policy, field)} contradict each other: the "
                f"preset decides {', '.join(values)}; leave out one of the two"
            )
    return values if policy.mode == "profiled" else values | {"demanding": -1}


def check(p: Policy, geometry: Geometry) -> None:
    """Raises `UserError` for arguments that are wrong in themselves or contradict each other."""
    choose("mode of policy 'amskv'", p.mode, ("profiled", "online"))
    choose("oversize of policy 'amskv'", p.oversize, ("auto", "skip", "fill"))
    schedule, layers, total = geometry.schedule, geometry.num_layers, geometry.schedule.total_tokens
    largest = (schedule.num_scales - 1, schedule.persistent_tokens, layers)
    for name, most in zip(("condensed", "condensed_tokens", "demanding"), largest, strict=True):
        p.require(
            name, -1 <= getattr(p, name) <= most, f": choose 0 to {most}, or -1 for automatic"
        )
    if p.condensed >= 0 and p.condensed_tokens >= 0:
        p.refuse("condensed and condensed_tokens say the same: keep one of them")
    if p.cmin or p.cmax:
        if not 1 <= p.cmin <= p.cmax <= total:
            sizes = f"cmin={p.cmin}, cmax={p.cmax}"
            p.refuse(
                f"{sizes}: give both, or none and a budget; needed are 1 <= cmin <= cmax <= "
                f"{total}, the tokens of all scales"
            )
        if (locked := p.locked_tokens(geometry, p.cmin)) >= p.cmin:
            p.refuse(
                f"the condensed scales take {locked} tokens, which leaves no room in "
                f"cmin={p.cmin}: choose a larger cmin or fewer condensed scales"
            )
        if p.ratio != type(p).ratio:
            p.refuse(
                f"ratio={p.ratio:g} divides a budget, but cmin={p.cmin} and cmax={p.cmax} are "
                f"given (a preset gives them too): leave out one of the two"
            )
    online = p.mode == "online"
    if online and p.layers:
        p.refuse("mode=online finds the layers while generating: leave out layers")
    named = [name for name in ("layers", "theta") if getattr(p, name)]
    named += ["demanding"] * (p.demanding >= 0 and p.theta != 0)
    if not online and len(named) > 1:
        p.refuse(f"{' and '.join(named)} contradict each other: keep one of them")
    number = len(named_layers(p, layers)) if p.layers else p.demanding
    if p.demanding not in (-1, number):
        p.refuse(f"layers={p.layers} are {number} layers, but demanding={p.demanding}")


def named_layers(policy: Policy, num_layers: int) -> list[int]:
    """The layers of `0;3;5`, `0-7`, `all` or `none`."""
    text = {"all": f"0-{num_layers - 1}"}.get(policy.layers, policy.layers)
    found: set[int] = set()
    for part in re.split("[;,]", text) if text != "none" else ():
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < num_layers:
            policy.refuse(
                f"cannot read {part!r:.40} of layers={text!r:.100}: write numbers from 0 to "
                f"{num_layers - 1}, as in 0;2;3 or 0-2, or all, or none"
            )
        found |= set(range(first, last + 1))
    return sorted(found)


# --- the rule ---


class AMSKVScales(ScaleRule):
    """Sizes of efficient and demanding layers, and their contents where they are known."""

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> Policy:
        if calibration is not None:
            calibration.check(geometry)
        given = self.policy
        values = preset_values(given, geometry) if given.preset else {}
        policy = replace(given, preset="", _calibration=calibration, **values)
        check(policy, geometry)
        policy = policy.with_layers(geometry, guess=bool(given.preset))
        if policy.budgeted:
            return policy
        allocation = AMSKVScales(policy).allocate(geometry, 1.0)
        if isinstance(given.budget, NotGiven):  # then it is what the sizes cost
            budget = planner.cost(geometry, allocation, given.block_size)
            return replace(policy, budget=budget)
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
