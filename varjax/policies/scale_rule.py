"""Base of rules for models that draw scale by scale: a decision is made after every scale. And what
several policies refuse in the same words."""

import numpy as np
from jax.typing import ArrayLike

from varjax.calibration.data import Calibration
from varjax.core.allocation import Allocation, Geometry, RegionAllocation
from varjax.core.errors import UserError
from varjax.core.policy import Policy, Rule
from varjax.core.sequence import SCALES
from varjax.policies import capacities

CONTENTS_FOLLOW = "its contents are not chosen by a score, they follow from its own"
CALIBRATE = "a calibration (`python -m experiments.calibrate` writes one)"


class ScaleRule(Rule):
    """Base of rules for models that draw scale by scale; by itself, the same room for every head.

    A decision is made after every scale; a head is in the region of its number until `regroup`
    (int32 [R, N], regions of the layer) assigns heads anew at the allocation's `regroup_scale`.
    """

    kind = SCALES

    def minimum_budget(self, geometry: Geometry) -> float:
        """By default one token per head."""
        return 1 / max(1, geometry.schedule.persistent_tokens)

    def allocate(self, geometry: Geometry, budget: float) -> Allocation:
        """The room of every head at every scale, in tokens."""
        return RegionAllocation(capacities.capacity(geometry, capacities.uniform(geometry, budget)))

    def window_tokens(self, height: int, width: int) -> np.ndarray:
        """By default spread evenly in raster order."""
        turn = (np.arange(self.needs.window) + 0.5) / self.needs.window
        return np.floor(turn * height * width).astype(np.int32)

    def known_capacity(self, geometry: Geometry, budget: float) -> np.ndarray | None:
        """int32 [K, L, N]: what heads hold when each scale starts, for compositions; None where
        that is decided while generating."""
        given = self.allocate(geometry, budget)
        region = isinstance(given, RegionAllocation)
        if region and (given.ragged or given.regroup_scale is not None):
            return None
        return given.capacity(geometry)

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> Allocation:
        """The allocation with which `select` fills capacities int32 [K, L, N] that another policy
        has decided (compositions). `UserError`: the contents of this policy are not a selection."""
        if not self.selects:
            raise UserError(
                f"policy {self.policy.name!r} cannot select for another one: its contents are "
                f"given by its own allocation, not chosen by a score"
            )
        return RegionAllocation(capacity)


def per_layer(geometry: Geometry, values: ArrayLike) -> np.ndarray:
    """[K, L, ...]: the same values for every scale and layer, as `Rule.inputs` wants them."""
    shape = (geometry.schedule.num_scales, geometry.num_layers, *np.shape(values))
    return np.broadcast_to(values, shape)


# --- contents that a budget does not pay for, and measurements that are not there ---


class NotGiven(float):
    """A default that can be told from the same number given by the user."""


def refuse_more(policy: Policy, geometry: Geometry, budget: float, held: float, what: str) -> None:
    """Refuses contents that hold more tokens, in all layers and heads, than the budget."""
    share = held / max(1, geometry.dense_tokens)
    if share > budget + 1e-9:
        policy.refuse(
            f"{what} keeps up to {share:.4f} of the full cache, more than budget={budget:g}: "
            f"keep less, leave the budget out, or give budget={np.ceil(share * 1e4) / 1e4:g}"
        )


def measured(
    policy: Policy,
    calibration: Calibration | None,
    name: str,
    geometry: Geometry,
    *,
    what: str,
    give: str = CALIBRATE,
) -> np.ndarray:
    """float64: measurement `name` of this model, which the policy cannot do without. `UserError`:
    `what` the policy has to know is not there, with what to `give` for it."""
    if getattr(calibration, name, None) is None:
        lacks = "" if calibration is None else f", and the calibration holds no {name}"
        raise UserError(f"policy {policy.name!r} needs to know {what}{lacks}: give {give}")
    calibration.check(geometry)
    return np.asarray(getattr(calibration, name), np.float64)
