"""One policy says how much every head holds, another which tokens."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from varjax.arguments import instance
from varjax.cache.allocation import Allocation, Geometry
from varjax.cache.observation import Observation
from varjax.calibration.data import Calibration
from varjax.errors import UserError, nearest
from varjax.policies import building_blocks as blocks
from varjax.policies.base import Policy
from varjax.policies.compose_parts import (
    ROLES,
    SHARED,
    Composed,
    ComposeTokens,
    build,
    choose_part,
    own_arguments,
)
from varjax.policies.registry import register
from varjax.policies.rule import Rule
from varjax.policies.token_rule import StagedPolicy


@register("compose")
@dataclass(frozen=True, kw_only=True)
class Compose(Composed, StagedPolicy):
    """Capacities of one policy, contents of another: `allocate=heatkv,select=snapkv`.

    Idea: how much each head may hold and which tokens it holds are separate questions, and the
    papers answer both at once. With every pair at hand the answers can be compared one by one.

    Every head holds, when a scale starts, as many tokens as it does under the policy `allocate`;
    after every scale `select` chooses which. In Python: `Compose.of(allocate=HeatKV(budget=0.1),
    select=SnapKV())`, where the budget of the first counts.

    Args:
      budget: fraction of the full cache, by default the one of the policy `allocate`.
      allocate: the policy that gives the capacities (heatkv): any but full (nothing is left to
        select), headkv and online amskv (who gets how much is decided while generating).
      select: the policy that chooses (snapkv): swa and streaming (the newest, without or with
        sinks), amskv (condensed and newest), or any that scores (snapkv, h2o, hack, scalekv,
        headkv).
      period: see `help(varjax.policies.token_rule.StagedPolicy)`; where a table allocates, its
        file decides.
      allocate_NAME, select_NAME: argument NAME of either policy, for example allocate_sinks=3 or
        select_window=8. Only arguments that matter to the role: what hack's asymmetry says about
        capacities is refused as select_asymmetry.

    What a part needs (a calibration, a file) it needs here too, but `scalekv` as `select` needs
    neither budgets nor calibration.

    Differs from the parts: if the sinks of `select` exceed a head's capacity, the oldest of them
      stay; so no budget is too small for `select`. `headkv` as `select` keeps the recent tokens
      that it would give a local head of the same budget, and groups no heads.

    On models that draw token by token all policies but `table` give all heads the same, so only
    `allocate=table` makes a difference: layers hold what the file keeps at most, and `select`
    chooses which tokens. `allocate` is streaming there by default. Both parts must serve such
    models, and what `select` never drops must fit.
    """

    budget: float = 0.1
    # all arguments but the shared ones, as text
    parts: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    _prepared: tuple[Policy, ...] = field(default=(), repr=False)

    token_rule = ComposeTokens
    default_parts = ROLES
    unfit_roles = dict.fromkeys(ROLES, "compositions do not nest")
    summary = "capacities of one policy, selection of another"
    examples = (
        {},
        {"allocate": "hack", "select": "scalekv"},
        {"allocate": "scalekv", "select": "streaming"},
    )

    # --- arguments --------------------------------------------------------------------------------

    def __post_init__(self):
        super().__post_init__()
        if self.parts and not self._prepared:
            self.from_arguments(dict(self.parts))

    def __repr__(self) -> str:
        parts = (f"{name}={value}" for name, value in self.parts)
        return f"{', '.join([super().__repr__().removesuffix(')'), *parts])})"

    @classmethod
    def of(cls, *, allocate: Policy, select: Policy) -> "Compose":
        """Compose two policies; budget, accounting and block size are taken from `allocate`."""
        for role, part in zip(ROLES, (allocate, select), strict=True):
            instance(role, part, Policy, "a policy of varjax.policies")
        parts = {"allocate": allocate.name, "select": select.name}
        for role, part in zip(ROLES, (allocate, select), strict=True):
            default = type(part)()
            for name in own_arguments(type(part)):
                if getattr(part, name) != getattr(default, name):
                    parts[f"{role}_{name}"] = str(getattr(part, name))
        shared = {name: getattr(allocate, name) for name in SHARED}
        return cls(**(cls.from_arguments(parts) | shared))

    @classmethod
    def from_arguments(cls, arguments: dict[str, str]) -> dict[str, object]:
        own = {k: v for k, v in arguments.items() if k in (*SHARED, "period")}
        parts = ROLES | {k: v for k, v in arguments.items() if k not in own}
        known = [*SHARED[1:], "period", *ROLES]
        for role in ROLES:
            chosen = choose_part(role, parts[role])
            known += [f"{role}_{name}" for name in own_arguments(chosen, role)]
        for name in parts:
            if name not in known:
                raise UserError(
                    f"policy 'compose' has no argument {name!r}{nearest(name, known)}; here it "
                    f"has: {', '.join(known)}"
                )
        values = super().from_arguments(own)
        built = {role: build(role, parts) for role in ROLES}
        for name in parts.keys() - ROLES:  # 3 and 3.0 are the same policy
            role, _, own_name = name.partition("_")
            parts[name] = str(getattr(built[role], own_name))
        given = tuple(sorted((name, parts[name]) for name in arguments if name in parts))
        return values | {"parts": given, "budget": built["allocate"].budget}

    # --- parts ------------------------------------------------------------------------------------

    @cached_property
    def _pair(self) -> tuple[Policy, Policy]:
        """Allocator and selector; unprepared as on models that draw scale by scale."""
        return self._prepared or self.built(ROLES)

    def built(self, defaults: dict[str, str]) -> tuple[Policy, Policy]:
        """Returns allocator and selector with the arguments that the composition decides. defaults:
        the parts that a role has if `parts` does not name one."""
        allocate, select = (build(role, defaults | dict(self.parts)) for role in ROLES)
        shared = {name: getattr(self, name) for name in SHARED}
        selection = dataclasses.replace(select.as_selection(), **shared)
        return dataclasses.replace(allocate, **shared), selection

    @property
    def allocator(self) -> Policy:
        """The policy that says how much."""
        return self._pair[0]

    @property
    def selector(self) -> Policy:
        """The policy that says which."""
        return self._pair[1]

    def with_parts(
        self, allocator: Policy, selector: Policy, defaults: dict[str, str], **values: float | int
    ) -> "Compose":
        """The composition with prepared parts. `parts` also lists the defaults, so compositions are
        equal whether or not a default was typed."""
        parts = tuple(sorted((defaults | dict(self.parts)).items()))
        prepared = (allocator, selector)
        return dataclasses.replace(self, parts=parts, _prepared=prepared, **values)

    def rule(self, kind: str) -> Rule:
        """Both parts have to serve such models, too."""
        found = super().rule(kind)
        for part in self._prepared or self.built(found.default_parts):
            part.rule(kind)
        return found

    # --- what the parts say -----------------------------------------------------------------------

    budgeted = property(attrgetter("allocator.budgeted"))
    shrinks = property(attrgetter("allocator.shrinks"))

    @property
    def uses_calibration(self) -> bool:
        return self.allocator.uses_calibration or self.selector.uses_calibration

    def content(self) -> str | None:
        return ";".join(filter(None, (self.allocator.content(), self.selector.content()))) or None

    def check_images(self, num_images: int) -> None:
        self.allocator.check_images(num_images)
        self.selector.check_images(num_images)

    # --- models that draw scale by scale ----------------------------------------------------------

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Compose":
        allocator = self.allocating.prepare(geometry, calibration)
        selector = dataclasses.replace(self.selector, budget=allocator.budget)
        selector = selector.rule(self.kind).prepare(geometry, calibration)
        return self.with_parts(allocator, selector, ROLES, budget=allocator.budget)

    def check(self, geometry: Geometry) -> None:
        self.allocating.check(geometry)
        self.selecting.check(geometry)

    def check_budget(self, geometry: Geometry) -> None:
        """Capacities are given to the selector, so no budget is too small for it."""
        self.allocating.check_budget(geometry)

    def minimum_budget(self, geometry: Geometry) -> float:
        return self.allocating.minimum_budget(geometry)

    def allocate(self, geometry: Geometry, budget: float) -> Allocation:
        capacity = self.allocating.known_capacity(geometry, budget)
        if capacity is None:
            self.refuse(
                f"allocate={self.allocator.name} with these arguments decides "
                f"while generating how much a head holds; capacities must be known beforehand"
            )
        return self.selecting.adopt(geometry, budget, capacity)

    def window_tokens(self, height: int, width: int):
        return self.selecting.window_tokens(height, width)

    def init_state(self, geometry: Geometry, rows: int):
        return self.selecting.init_state(geometry, rows)

    def update_state(self, obs: Observation):
        return self.selecting.update_state(obs)

    def select(self, obs: Observation):
        kept = self.selecting.select(obs)
        return blocks.top(-obs.position, kept, obs.capacity)

    def plan_lines(self, geometry: Geometry) -> list[str]:
        return [self.named(), *self.allocating.plan_lines(geometry)]
