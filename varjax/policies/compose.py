"""One policy says how much every head holds, another which tokens."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

from varjax.calibration.data import Calibration
from varjax.core import masks
from varjax.core.allocation import Allocation, Geometry, StageAllocation
from varjax.core.arguments import instance
from varjax.core.errors import UserError, choose, nearest
from varjax.core.observation import Observation
from varjax.core.policy import Policy, Rule
from varjax.core.sequence import SCALES
from varjax.policies import text_arguments
from varjax.policies.registry import POLICIES, get_policy, register
from varjax.policies.scale_rule import ScaleRule
from varjax.policies.token_rule import StagedPolicy, TokenRule

ROLES = {"allocate": "heatkv", "select": "snapkv"}  # each with its default
SHARED = ("budget", "accounting", "block_size")  # arguments of the composition, not of its parts


def own_arguments(cls: type[Policy], role: str = "") -> list[str]:
    """Names of a part's arguments; if a role is given, only those that matter to the role."""
    used = {"allocate": cls.allocation_arguments, "select": cls.selection_arguments}.get(role)
    names = [name for name in text_arguments.argument_types(cls) if name not in (*SHARED, "period")]
    return names if used is None else [name for name in names if name in used]


def choose_part(role: str, name: str) -> type[Policy]:
    """The policy of this name; `UserError` if there is none or it cannot have the role."""
    fitting = [other for other, cls in POLICIES.items() if role not in cls.unfit_roles]
    if name in POLICIES and name not in fitting:
        raise UserError(
            f"policy 'compose': {role}={name} makes no sense: {POLICIES[name].unfit_roles[role]}; "
            f"choose one of {', '.join(fitting)}"
        )
    return POLICIES[choose(f"policy for {role}:", name, fitting)]


def build(role: str, parts: dict[str, str]) -> Policy:
    """The policy that has the role, with the arguments of `parts` and its own default budget."""
    own = f"{role}_"
    named = {n.removeprefix(own): v for n, v in parts.items() if n.startswith(own)}
    return get_policy(choose_part(role, parts[role]).name, arguments=named)


class Composed(Rule):
    """Base of the rules of a composition. default_parts: policies for roles without one."""

    default_parts: ClassVar[dict[str, str]]
    policy: "Compose"

    @property
    def allocating(self) -> Rule:
        """The rule of the policy that says how much heads hold."""
        return self.policy.allocator.rule(self.kind)

    @property
    def selecting(self) -> Rule:
        """The rule of the policy that says which tokens they hold."""
        return self.policy.selector.rule(self.kind)

    needs = property(attrgetter("selecting.needs"))
    compares_heads = property(attrgetter("selecting.compares_heads"))
    inputs_heads = property(attrgetter("selecting.inputs_heads"))
    inputs = property(attrgetter("selecting.inputs"))

    def prepared(self, allocator: Policy, selector: Policy, **values: float | int) -> "Compose":
        """The composition with prepared parts. `parts` also lists the defaults, so compositions are
        equal whether or not a default was typed."""
        parts = tuple(sorted((self.default_parts | dict(self.policy.parts)).items()))
        pair = (allocator, selector)
        return replace(self.policy, parts=parts, _prepared=pair, **values)

    def plan_lines(self, geometry: Geometry) -> list[str]:
        """All parts, said or not, and what the sizes follow from."""
        named = self.default_parts | dict(self.policy.parts)
        parts = f"parts     {', '.join(f'{name}={value}' for name, value in named.items())}"
        sizes = self.allocating.plan_lines if self.kind == SCALES else super().plan_lines
        return [parts, *sizes(geometry)]


class ComposeScales(Composed, ScaleRule):
    """Capacities are those of the policy that allocates."""

    default_parts = ROLES

    # Capacities are given to the selector, so no budget is too small for it.
    check_budget = property(attrgetter("allocating.check_budget"))
    minimum_budget = property(attrgetter("allocating.minimum_budget"))
    window_tokens = property(attrgetter("selecting.window_tokens"))
    init_state = property(attrgetter("selecting.init_state"))
    update_state = property(attrgetter("selecting.update_state"))

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Compose":
        allocator = self.allocating.prepare(geometry, calibration)
        selector = replace(self.policy.selector, budget=allocator.budget)
        selector = selector.rule(self.kind).prepare(geometry, calibration)
        return self.prepared(allocator, selector, budget=allocator.budget)

    def check(self, geometry: Geometry) -> None:
        self.allocating.check(geometry)
        self.selecting.check(geometry)

    def allocate(self, geometry: Geometry, budget: float) -> Allocation:
        capacity = self.allocating.known_capacity(geometry, budget)
        if capacity is None:
            self.policy.refuse(
                f"allocate={self.policy.allocator.name} with these arguments decides "
                f"while generating how much a head holds; capacities must be known beforehand"
            )
        return self.selecting.adopt(geometry, budget, capacity)

    def select(self, obs: Observation):
        kept = self.selecting.select(obs)
        return masks.oldest(obs, kept, obs.capacity)


class ComposeTokens(Composed, TokenRule):
    """All heads hold the same, but where the policy that allocates says what layers hold."""

    default_parts = {**ROLES, "allocate": "streaming"}

    layer_slots = property(attrgetter("allocating.layer_slots"))
    stay_always = property(attrgetter("selecting.stay_always"))
    longest_period = property(attrgetter("selecting.longest_period"))
    select = property(attrgetter("selecting.select"))

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Compose":
        period = self.policy.period
        allocator, selector = self.policy.built(self.default_parts)
        allocator = replace(allocator, period=period).rule(self.kind)
        allocator = allocator.prepare(geometry, calibration)
        if allocator.rule(self.kind).layer_slots(geometry) is not None:
            period = allocator.period
        elif period is None:
            period = super().prepare(geometry, calibration).period
        selector = replace(selector, period=period).rule(self.kind)
        selector = selector.prepare(geometry, calibration)
        return self.prepared(allocator, selector, period=period)

    def check(self, geometry: Geometry) -> None:
        super().check(geometry)
        self.selecting.check(geometry)
        given = self.layer_slots(geometry)
        if given is None:
            return
        self.allocating.check(geometry)
        room, least, policy = given.min(), self.minimum_slots(geometry), self.policy
        if room < least:
            policy.refuse(
                f"allocate={policy.allocator.name} leaves a layer {room} image tokens per head, "
                f"its buffer of {policy.period} included, but {policy.selector.name} needs "
                f"{least}: keep more"
            )

    def allocate(self, geometry: Geometry, budget: float) -> StageAllocation:
        if self.layer_slots(geometry) is None:
            return super().allocate(geometry, budget)
        return self.allocating.allocate(geometry, budget)


@register("compose")
@dataclass(frozen=True, kw_only=True)
class Compose(StagedPolicy):
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

    rules = (ComposeScales, ComposeTokens)
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
        values = text_arguments.read_fields(cls, own)
        built = {role: build(role, parts) for role in ROLES}
        for name in parts.keys() - ROLES:  # 3 and 3.0 are the same policy
            role, _, own_name = name.partition("_")
            parts[name] = str(getattr(built[role], own_name))
        given = tuple(sorted((name, parts[name]) for name in arguments if name in parts))
        return values | {"parts": given, "budget": built["allocate"].budget}

    # --- parts ------------------------------------------------------------------------------------

    def built(self, defaults: dict[str, str]) -> tuple[Policy, ...]:
        """Returns allocator and selector with the arguments that the composition decides. defaults:
        the parts that a role has if `parts` does not name one."""
        shared = {name: getattr(self, name) for name in SHARED}
        parts = defaults | dict(self.parts)
        return tuple(replace(build(role, parts), **shared) for role in ROLES)

    @cached_property
    def _pair(self) -> tuple[Policy, ...]:
        """Unprepared as on models that draw scale by scale."""
        return self._prepared or self.built(ROLES)

    allocator = property(lambda self: self._pair[0])  # the policy that says how much
    selector = property(lambda self: self._pair[1])  # the policy that says which

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

    @property
    def calibration_files(self) -> tuple[str, ...]:
        users = [part for part in self._pair if part.uses_calibration]
        return tuple(dict.fromkeys(name for part in users for name in part.calibration_files))

    def content(self) -> str | None:
        return ";".join(filter(None, (part.content() for part in self._pair))) or None

    def check_images(self, num_images: int) -> None:
        for part in self._pair:
            part.check_images(num_images)
