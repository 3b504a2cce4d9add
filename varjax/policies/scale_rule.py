"""Base of rules for models that draw scale by scale: a decision is made after every scale."""

import numpy as np
from jax.typing import ArrayLike

from varjax.core.allocation import Allocation, Geometry, RegionAllocation
from varjax.core.errors import UserError
from varjax.core.policy import Rule
from varjax.core.sequence import SCALES
from varjax.policies import capacities


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
        has decided (compositions).

        Raises:
          UserError: the contents of this policy are not a selection.
        """
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
