"""`compose` on models that draw token by token, and what its rules for both kinds of models share.
Its manual is `varjax.policies.compose.Compose`."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from varjax.cache.allocation import Geometry
from varjax.cache.observation import Needs, Observation
from varjax.cache.stages import StageAllocation
from varjax.calibration.data import Calibration
from varjax.policies.compose_parts import TOKEN_ROLES
from varjax.policies.rule import Rule
from varjax.policies.token_rule import TokenRule

if TYPE_CHECKING:
    from varjax.policies.compose import Compose


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

    @property
    def needs(self) -> Needs:
        return self.selecting.needs

    @property
    def compares_heads(self) -> str | None:
        return self.selecting.compares_heads

    @property
    def inputs_heads(self) -> int | None:
        return self.selecting.inputs_heads

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

    def allocate(
        self, geometry: Geometry, budget: float, calibration: Calibration | None = None
    ) -> StageAllocation:
        if self.layer_slots(geometry) is None:
            return super().allocate(geometry, budget, calibration)
        return self.allocating.allocate(geometry, budget, calibration)

    def plan_lines(self, geometry: Geometry, calibration: Calibration | None = None) -> list[str]:
        return [self.named(), *super().plan_lines(geometry, calibration)]

    def select(self, obs: Observation):
        return self.selecting.select(obs)
