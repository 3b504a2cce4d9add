"""One policy says how much every head holds, another which tokens."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from varjax.arguments import instance
from varjax.cache.allocation import Allocation, Geometry, RegionAllocation
from varjax.cache.observation import Observation
from varjax.cache.stages import StageAllocation
from varjax.errors import UserError, choose, nearest, show
from varjax.policies import building_blocks as blocks
from varjax.policies import stage_blocks
from varjax.policies.base import Policy, per_layer
from varjax.policies.registry import POLICIES, get_policy, register
from varjax.policies.staged import TokenPolicy
from varjax.policies.windows import SinkPolicy, SlidingWindow, Streaming
from varjax.sequence import TOKENS

ROLES = {"allocate": "heatkv", "select": "snapkv"}  # with what they are if not said
TOKEN_ROLES = {**ROLES, "allocate": "streaming"}  # likewise on models that draw token by token
DECIDES = {"allocate": "how much heads hold", "select": "which tokens heads keep"}
SHARED = ("budget", "accounting", "block_size")  # arguments of the composition, not of its parts
_GIVEN = "its contents are not chosen by a score, they follow from its own "
REFUSED = {
    ("allocate", "full"): "it keeps everything, so there is nothing to select",
    ("allocate", "headkv"): "how much a head gets is decided for every image, by its own grouping",
    ("allocate", "compose"): "compositions do not nest",
    ("select", "full"): "it keeps everything; any other policy does that with budget 1",
    ("select", "table"): _GIVEN + "file",
    ("select", "compose"): "compositions do not nest",
} | {
    ("select", name): _GIVEN + "schedule of scales"
    for name in ("heatkv", "binary_heatkv", "heatkv_naive")
}


def _answered_by(role: str, name: str) -> property:
    """A member of `Policy` that one of the parts answers."""
    return property(lambda composed: getattr(getattr(composed, role), name))


@register("compose")
@dataclass(frozen=True, kw_only=True)
class Compose(TokenPolicy):
    """Capacities of one policy, contents of another: `allocate=heatkv,select=snapkv`.

    Idea: how much each head may hold and which tokens it holds are separate questions, and the
    papers answer both at once. With every pair at hand the answers can be compared one by one.

    Every head holds, when a scale starts, as many tokens as it does under the policy `allocate`;
    after every scale `select` chooses which. In Python: `Compose.of(allocate=HeatKV(budget=0.1),
    select=SnapKV())`, where the budget of the first counts.

    Args:
      budget: fraction of the full cache, by default that of the policy `allocate`.
      allocate: the policy that gives the capacities (heatkv): any but full (nothing is left to
        select), headkv and online amskv (who gets how much is decided while generating).
      select: the policy that chooses (snapkv): swa and streaming (the newest, without or with
        sinks), amskv (condensed and newest), or any that scores (snapkv, h2o, hack, scalekv,
        headkv).
      period: see `help(varjax.policies.staged.TokenPolicy)`; that of a table where one allocates.
      allocate_NAME, select_NAME: argument NAME of either policy, for example allocate_sinks=3 or
        select_window=8. Only arguments that matter to the role: what hack's asymmetry says about
        capacities is refused as select_asymmetry.

    What a part needs (a calibration, a file) it needs here too, but `scalekv` as `select` needs
    neither budgets nor calibration.

    Differs from the parts: sinks of `select` that exceed a head's capacity stay as far as they fit,
      the oldest first; so no budget is too small for `select`. `headkv` as `select` keeps the
      recent tokens that it would give a local head of the same budget, and groups no heads.

    On models that draw token by token all policies but `table` give all heads the same, so it is
    `allocate=table` that makes a difference: layers hold what the file keeps at most, and `select`
    chooses which. Not said, `allocate` is streaming there. Both parts must serve such models, and
    what `select` never drops must fit.
    """

    budget: float = 0.1
    parts: tuple[tuple[str, str], ...] = ()  # all arguments but the shared ones, as text
    _prepared: tuple[Policy, ...] = field(default=(), repr=False)

    summary = "capacities of one policy, selection of another"
    examples = (
        {},
        {"allocate": "hack", "select": "scalekv"},
        {"allocate": "scalekv", "select": "streaming"},
    )

    # --- arguments --------------------------------------------------------------------------------

    def __post_init__(self):
        super().__post_init__()
        held = self._prepared if isinstance(self._prepared, tuple) else (None,)
        if len(held) not in (0, 2) or not all(isinstance(part, Policy) for part in held):
            self.refuse(f"_prepared={show(self._prepared)}: `prepare` fills it in, leave it out")
        pairs = self.parts if isinstance(self.parts, tuple) else (None,)
        if any(not isinstance(p, tuple) or [type(x) for x in p] != [str, str] for p in pairs):
            self.refuse(f"parts={show(self.parts)}: Compose.of makes it from two policies")
        if pairs and not self._prepared:
            self.from_arguments(dict(pairs))

    @classmethod
    def of(cls, *, allocate: Policy, select: Policy) -> "Compose":
        """From two policies; budget, accounting and block size are those of `allocate`."""
        for role, part in zip(ROLES, (allocate, select), strict=True):
            instance(role, part, Policy, "a policy of varjax.policies")
        parts = {"allocate": allocate.name, "select": select.name}
        for role, part in zip(ROLES, (allocate, select), strict=True):
            default = type(part)()
            for name in _own_arguments(type(part)):
                if getattr(part, name) != getattr(default, name):
                    parts[f"{role}_{name}"] = str(getattr(part, name))
        shared = {name: getattr(allocate, name) for name in SHARED}
        return cls(**(cls.from_arguments(parts) | shared))

    @classmethod
    def from_arguments(cls, arguments: dict[str, str]) -> dict[str, Any]:
        own = {k: v for k, v in arguments.items() if k in (*SHARED, "period")}
        parts = ROLES | {k: v for k, v in arguments.items() if k not in own}
        known = [*SHARED[1:], "period", *ROLES]
        for role in ROLES:
            chosen = _choose_part(role, parts[role])
            known += [f"{role}_{name}" for name in _own_arguments(chosen, role)]
        for name in parts:
            if name not in known:
                _explain_idle(name, parts)
                raise UserError(
                    f"policy 'compose' has no argument {name!r}{nearest(name, known)}; here it "
                    f"has: {', '.join(known)}"
                )
        values = super().from_arguments(own)
        built = {role: _build(role, parts) for role in ROLES}
        for name in parts.keys() - ROLES:  # 3 and 3.0 are the same policy
            role, _, own_name = name.partition("_")
            parts[name] = str(getattr(built[role], own_name))
        given = tuple(sorted((name, parts[name]) for name in arguments if name in parts))
        return values | {"parts": given, "budget": built["allocate"].budget}

    @cached_property
    def _roles(self) -> tuple[Policy, Policy]:
        """(allocator, selector) with what the composition and the calibration decide filled in."""
        return self._prepared or self._built(ROLES)

    def _built(self, defaults: dict[str, str]) -> tuple[Policy, Policy]:
        """Allocator and selector. defaults: what they are if not said."""
        allocate, select = (_build(role, defaults | dict(self.parts)) for role in ROLES)
        if isinstance(select, SlidingWindow | Streaming):
            sinks, protects = getattr(select, "sinks", 0), isinstance(select, Streaming)
            select = Newest(sinks=sinks, protects=protects)
        shared = {name: getattr(self, name) for name in SHARED}
        return dataclasses.replace(allocate, **shared), dataclasses.replace(select, **shared)

    allocator = property(lambda composed: composed._roles[0])  # the policy that says how much
    selector = property(lambda composed: composed._roles[1])  # the policy that says which

    # --- what the parts say -----------------------------------------------------------------------

    budgeted, shrinks, minimum_budget, smallest_reason = (
        _answered_by("allocator", name)
        for name in ("budgeted", "shrinks", "minimum_budget", "smallest_reason")
    )
    needs, inputs, window_tokens, init_state, update_state = (
        _answered_by("selector", name)
        for name in ("needs", "inputs", "window_tokens", "init_state", "update_state")
    )

    @property
    def uses_calibration(self) -> bool:
        return self.allocator.uses_calibration or self.selector.uses_calibration

    def prepare(self, geometry: Geometry, calibration: Any) -> "Compose":
        allocator = self.allocator.prepare(geometry, calibration)
        selector = dataclasses.replace(self.selector, budget=allocator.budget)
        selector = selector.prepare(geometry, calibration)
        whole = {"budget": allocator.budget, "_prepared": (allocator, selector)}
        return dataclasses.replace(self, parts=self._named(ROLES), **whole)

    def _named(self, defaults: dict[str, str]) -> tuple[tuple[str, str], ...]:
        """`parts` with what was not said: a composition is the same, said or not."""
        return tuple(sorted((defaults | dict(self.parts)).items()))

    def plan_lines(self, geometry: Geometry, calibration: Any = None) -> list[str]:
        by_token = geometry.kind == TOKENS
        named = (TOKEN_ROLES if by_token else ROLES) | dict(self.parts)
        lines = [f"parts     {', '.join(f'{name}={value}' for name, value in named.items())}"]
        if by_token:
            return lines + super().plan_lines(geometry, calibration)
        return lines + self.allocator.plan_lines(geometry, calibration)

    def check(self, geometry: Geometry) -> None:
        self.allocator.check(geometry)
        # its capacities are given, so no budget is too small for it
        dataclasses.replace(self.selector, budget=1.0).check(geometry)

    def content(self) -> str | None:
        return ";".join(filter(None, (self.allocator.content(), self.selector.content()))) or None

    def check_images(self, num_images: int) -> None:
        self.allocator.check_images(num_images)
        self.selector.check_images(num_images)

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> Allocation:
        given = self.allocator.allocate(geometry, budget, calibration)
        ragged = getattr(given, "ragged", False) and self.allocator.name != "table"
        if ragged or getattr(given, "regroup_scale", None) is not None:
            self.refuse(
                f"allocate={self.allocator.name} with these arguments decides "
                f"while generating how much a head holds; capacities must be known beforehand"
            )
        return self.selector.adopt(geometry, budget, given.capacity(geometry))

    def select(self, obs: Observation):
        kept = self.selector.select(obs)
        return blocks.top(-obs.position, kept, obs.capacity)

    # --- models that draw token by token ----------------------------------------------------------

    stage_needs, stay_always, select_stage = (
        _answered_by("selector", name) for name in ("stage_needs", "stay_always", "select_stage")
    )

    def check_kind(self, geometry: Geometry) -> None:
        super().check_kind(geometry)
        for part in self._built(TOKEN_ROLES if geometry.kind == TOKENS else ROLES):
            part.check_kind(geometry)

    def prepare_stages(self, geometry: Geometry) -> "Compose":
        allocator, selector = (
            dataclasses.replace(part, period=self.period) for part in self._built(TOKEN_ROLES)
        )
        if allocator.name == "table":
            allocator = allocator.prepare_stages(geometry)
            selector = dataclasses.replace(selector, period=allocator.period)
        selector = selector.prepare_stages(geometry)
        whole = {"period": selector.period, "_prepared": (allocator, selector)}
        return dataclasses.replace(self, parts=self._named(TOKEN_ROLES), **whole)

    def check_stage_arguments(self, geometry: Geometry) -> None:
        super().check_stage_arguments(geometry)
        self.selector.check_stage_arguments(geometry)
        if self.allocator.name == "table":
            self.allocator.check_stage_arguments(geometry)
            room, least = self.allocator.needed(geometry).min(), self.minimum_slots(geometry)
            if room < least:
                self.refuse(
                    f"the table leaves a layer {room} image tokens per head, its buffer of "
                    f"{self.period} included, but {self.selector.name} needs {least}: keep more"
                )

    def wanted_slots(self, geometry: Geometry) -> int:
        of = self.allocator if self.allocator.name == "table" else super()
        return of.wanted_slots(geometry)

    def allocate_stages(self, geometry: Geometry, slots: int) -> StageAllocation:
        if self.allocator.name != "table":
            return StageAllocation.uniform(geometry, slots, self.period)
        return self.allocator.allocate_stages(geometry, slots)


@dataclass(frozen=True, kw_only=True)
class Newest(TokenPolicy, SinkPolicy):
    """The rule of `swa` and, with `protects`, of `streaming`, as a selection."""

    protects: bool = False

    @property
    def name(self) -> str:
        return "streaming" if self.protects else "swa"

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> RegionAllocation:
        protected = self.protected(geometry, budget) if self.protects else 0
        return RegionAllocation(capacity, protected=protected)

    def inputs(self, geometry: Geometry, allocation: RegionAllocation, image_index: np.ndarray):
        """int32 [K, L]: the protected tokens."""
        return per_layer(geometry, np.int32(allocation.protected))

    def select(self, obs: Observation):
        first = blocks.protect(obs.position, obs.live, obs.inputs)
        kept = blocks.top(-obs.position, first, obs.capacity)
        return kept | blocks.recent(obs.position, obs.live & ~kept, obs.capacity - kept.sum(-1))

    def stay_always(self, geometry: Geometry) -> int:
        return 1 + (self.sinks if self.protects else 0)

    def select_stage(self, obs: Observation):
        first = obs.live & (obs.position < (self.sinks if self.protects else 0))
        count = obs.capacity - first.sum(-1)
        return first | stage_blocks.newest(obs.position, obs.live & ~first, count)


def _own_arguments(cls: type[Policy], role: str = "") -> list[str]:
    """Arguments of a part, with a role those that matter to it."""
    used = {"allocate": cls.allocation_arguments, "select": cls.selection_arguments}.get(role)
    idle = (*SHARED, "period")
    names = [name for name in cls.argument_types() if name not in idle]
    return names if used is None else [name for name in names if name in used]


def _choose_part(role: str, name: str) -> type[Policy]:
    fitting = [other for other in POLICIES if (role, other) not in REFUSED]
    if reason := REFUSED.get((role, name)):
        raise UserError(
            f"policy 'compose': {role}={name} makes no sense: {reason}; choose one of "
            f"{', '.join(fitting)}"
        )
    return POLICIES[choose(f"policy for {role}:", name, fitting)]


def _build(role: str, parts: dict[str, str]) -> Policy:
    """The part that has the role, as given; its own budget is the default."""
    own = f"{role}_"
    named = {n.removeprefix(own): v for n, v in parts.items() if n.startswith(own)}
    return get_policy(_choose_part(role, parts[role]).name, arguments=named)


def _explain_idle(name: str, parts: dict[str, str]) -> None:
    """Refuse an argument that a part has, but not for its role; return if it has none such."""
    role, _, own = name.partition("_")
    if role not in ROLES or own not in _own_arguments(POLICIES[parts[role]]):
        return
    part, other = parts[role], next(r for r in ROLES if r != role)
    usable = ", ".join(f"{role}_{n}" for n in _own_arguments(POLICIES[part], role))
    instead = f", or give it to {other}: {other}={part},{other}_{own}={parts[name]}"
    raise UserError(
        f"policy 'compose': {name}={parts[name]} has no effect: {own!r} of {part!r} is about "
        f"{DECIDES[other]}, and {role} decides {DECIDES[role]} (with {part} it takes "
        f"{usable or 'no arguments'}); leave it out" + ("" if (other, part) in REFUSED else instead)
    )
