"""A `table` on models that draw token by token: stages take the place of scales. Its manual is
`varjax.policies.table.Table`."""

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from varjax.cache.allocation import Geometry
from varjax.cache.observation import Observation
from varjax.cache.stages import StageAllocation
from varjax.calibration.data import Calibration
from varjax.policies.token_rule import TokenRule

if TYPE_CHECKING:
    from varjax.policies.table import Table


class TableTokens(TokenRule):
    """The file's entries for stages, or for image tokens before each stage."""

    policy: "Table"
    inputs_heads = 1  # [R or 1, N, image tokens]

    # --- arguments --------------------------------------------------------------------------------

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Table":
        """With the period that gives the file's number of stages."""
        table, sequence = self.policy, geometry.schedule
        array = table.stored[1]
        period = -(-sequence.steps // max(1, (len(array) if array.ndim else 0) - 1))
        stages = 1 + -(-sequence.steps // period)
        table.check_file(geometry, stages, sequence.image_tokens, "stages")
        table.require(
            "period",
            table.period in (None, period),
            f": the {stages} stages of {table.path} are of {period} tokens each, leave it out",
        )
        return dataclasses.replace(table, period=period)

    def check(self, geometry: Geometry) -> None:
        keep, period = self._visible(geometry), self.policy.period
        first = np.maximum(np.arange(len(keep)) - 1, 0)[:, None] * period
        drawn = np.arange(geometry.schedule.image_tokens) < first  # when a stage starts
        drawn = drawn.reshape(len(keep), *(1,) * (keep.ndim - 2), -1)
        if (early := keep & ~drawn).any():
            s, layer, *_, head, token = np.argwhere(early)[0]
            self.policy.refuse(
                f"stage {s} is said to see image token {token} (layer {layer}, head {head}), which "
                f"does not exist before stage {1 + token // period} ends: entries for the current "
                f"and later stages must be False"
            )
        if (returns := keep[1:] & ~keep[:-1] & drawn[:-1]).any():
            s, layer, *_, head, token = np.argwhere(returns)[0]
            self.policy.refuse(
                f"image token {token} (layer {layer}, head {head}) is dropped before stage {s} and "
                f"visible again at stage {s + 1}: what is dropped cannot return"
            )

    # --- sizes and contents -----------------------------------------------------------------------

    def _visible(self, geometry: Geometry) -> np.ndarray:
        """bool [K, L, (rows,) N, image tokens]: what each stage may see."""
        keep, sequence = self.policy.keep(geometry), geometry.schedule
        if self.policy.stored[0] == "keep_token":
            return keep
        stage = 1 + np.arange(sequence.image_tokens) // self.policy.period
        last = np.arange(sequence.image_tokens) == sequence.steps  # is read by none
        return keep[..., np.minimum(stage, len(keep) - 1)] & ~last

    def layer_slots(self, geometry: Geometry) -> np.ndarray:
        held, layers = self._visible(geometry).sum(-1), geometry.num_layers
        return np.moveaxis(held, 1, 0).reshape(layers, -1).max(-1) + self.policy.period

    def minimum_slots(self, geometry: Geometry) -> int:
        return self.slots(geometry, self.policy.budget)

    def allocate(
        self, geometry: Geometry, budget: float, calibration: Calibration | None = None
    ) -> StageAllocation:
        needed, sequence = self.layer_slots(geometry), geometry.schedule
        if (needed >= sequence.steps).all():  # nothing is ever dropped
            return StageAllocation.known(geometry, sequence.steps)
        held = geometry.num_heads * (needed + sequence.condition).sum()
        self.policy.refuse_more(geometry, budget, held)
        return StageAllocation(needed, self.policy.period)

    def inputs(
        self, geometry: Geometry, allocation: StageAllocation, image_index: np.ndarray
    ) -> np.ndarray:
        """bool [L, stages that end with a decision, R or 1, N, image tokens]: what the next stage
        sees."""
        following = self._visible(geometry)[2:].swapaxes(0, 1)
        if self.policy.per_row:
            return following[:, :, self.policy.rows_of(geometry, image_index)]
        return following[:, :, None]

    # --- device -----------------------------------------------------------------------------------

    def select(self, obs: Observation):
        kept = jnp.broadcast_to(obs.inputs, (*obs.position.shape[:2], obs.inputs.shape[-1]))
        return obs.live & jnp.take_along_axis(kept, obs.position, axis=-1)
