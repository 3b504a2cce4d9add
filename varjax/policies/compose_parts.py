"""The parts of `compose`: which policies it takes for which role, which of their arguments matter
there, and what its rules for both kinds of models ask them. Its manual is
`varjax.policies.compose.Compose`."""

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from varjax.cache.allocation import Geometry
from varjax.cache.observation import Observation
from varjax.cache.stages import StageAllocation
from varjax.calibration.data import Calibration
from varjax.errors import UserError, choose
from varjax.policies.base import Policy
from varjax.policies.registry import POLICIES, get_policy
from varjax.policies.rule import Rule
from varjax.policies.token_rule import TokenRule

if TYPE_CHECKING:
    from varjax.policies.compose import Compose

ROLES = {"allocate": "heatkv", "select": "snapkv"}  # each with its default
TOKEN_ROLES = {**ROLES, "allocate": "streaming"}  # the same, on models that draw token by token
SHARED = ("budget", "accounting", "block_size")  # arguments of the composition, not of its parts


def own_arguments(cls: type[Policy], role: str = "") -> list[str]:
    """Names of a part's arguments; if a role is given, only those that matter to the role."""
    used = {"allocate": cls.allocation_arguments, "select": cls.selection_arguments}.get(role)
    idle = (*SHARED, "period")
    names = [name for name in cls.argument_types() if name not in idle]
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
    """The policy that has the role, with the arguments that `parts` gives it and its own default
    budget."""
    own = f"{role}_"
    named = {n.removeprefix(own): v for n, v in parts.items() if n.startswith(own)}
    return get_policy(choose_part(role, parts[role]).name, arguments=named)


class Composed(Rule):
    """Base of the rules of a composition. default_parts: policies for the roles that
    the arguments do not name."""

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

    def inputs(self, geometry: Geometry, allocation, image_index: np.ndarray):
        return self.selecting.inputs(geometry, allocation, image_index)

    def named(self) -> str:
        """A line of a printed plan that names all parts, said or not."""
        named = self.default_parts | dict(self.policy.parts)
        return f"parts     {', '.join(f'{name}={value}' for name, value in named.items())}"


class ComposeTokens(Composed, TokenRule):
    """All heads hold the same, but where the policy that allocates says what layers hold."""

    default_parts = TOKEN_ROLES

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Compose":
        period = self.policy.period
        allocator, selector = (
            dataclasses.replace(part, period=period)
            for part in self.policy.built(self.default_parts)
        )
        allocator = allocator.rule(self.kind).prepare(geometry, calibration)
        if allocator.rule(self.kind).layer_slots(geometry) is not None:
            selector = dataclasses.replace(selector, period=allocator.period)
        selector = selector.rule(self.kind).prepare(geometry, calibration)
        return self.policy.with_parts(
            allocator, selector, self.default_parts, period=selector.period
        )

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

    def layer_slots(self, geometry: Geometry) -> np.ndarray | None:
        return self.allocating.layer_slots(geometry)

    def stay_always(self, geometry: Geometry) -> int:
        return self.selecting.stay_always(geometry)

    def allocate(self, geometry: Geometry, budget: float) -> StageAllocation:
        if self.layer_slots(geometry) is None:
            return super().allocate(geometry, budget)
        return self.allocating.allocate(geometry, budget)

    def plan_lines(self, geometry: Geometry) -> list[str]:
        return [self.named(), *super().plan_lines(geometry)]

    def select(self, obs: Observation):
        return self.selecting.select(obs)
