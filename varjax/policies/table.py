"""Run any retention pattern from a file, for ablations."""

import hashlib
import pathlib
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from varjax.calibration.data import Calibration
from varjax.core.allocation import (
    Allocation,
    Geometry,
    RegionAllocation,
    StageAllocation,
    StaticAllocation,
)
from varjax.core.errors import UserError, about, some
from varjax.core.observation import Observation
from varjax.policies.registry import register
from varjax.policies.scale_rule import CONTENTS_FOLLOW, ScaleRule, refuse_more
from varjax.policies.token_rule import ListedRule, StagedPolicy, period_of
from varjax.storage import npz
from varjax.storage.values import path

LARGEST = 512 * 2**20  # bytes; tables pack well, one of the largest published models has 200 MB


class TableScales(ScaleRule):
    """A `table` on models that draw scale by scale: entries for scales or for tokens."""

    policy: "Table"

    def check(self, geometry: Geometry) -> None:
        schedule = geometry.schedule
        self.policy.check_file(geometry, schedule.num_scales, schedule.total_tokens, "scales")

    def allocate(self, geometry: Geometry, budget: float) -> Allocation:
        visible = self.policy.visible(geometry, geometry.schedule.scale_of_token)
        if not self.policy.per_row:
            allocation = StaticAllocation.from_visibility(geometry, visible)
        else:
            for row in range(visible.shape[2]):
                StaticAllocation.from_visibility(geometry, visible[:, :, row])
            counts = visible.sum(-1)
            ragged = bool((counts != counts[:, :, :1]).any())
            allocation = RegionAllocation(counts.max(2).astype(np.int32), ragged=ragged)
        held = allocation.capacity(geometry).sum((1, 2)).max()
        refuse_more(self.policy, geometry, budget, held, self.policy.path)
        return allocation

    def known_capacity(self, geometry: Geometry, budget: float) -> np.ndarray:
        """Known even where rows hold less than others."""
        return self.allocate(geometry, budget).capacity(geometry)

    def inputs(self, geometry: Geometry, allocation: Allocation, image_index: np.ndarray):
        if not self.policy.per_row:
            return None
        visible = self.policy.visible(geometry, geometry.schedule.scale_of_token)
        following = np.concatenate([visible[1:], np.zeros_like(visible[:1])])
        return following[:, :, self.policy.rows_of(geometry, image_index)]

    def select(self, obs: Observation):
        return obs.live & jnp.take_along_axis(obs.inputs, obs.position, axis=-1)


class TableTokens(ListedRule):
    """A `table` on models that draw token by token: entries for stages, or image tokens."""

    policy: "Table"

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Table":
        """With the period that gives the file's number of stages."""
        table, sequence = self.policy, geometry.schedule
        array = table.stored[1]
        period = period_of(sequence, (len(array) if array.ndim else 0) - 1)
        stages = 1 + -(-sequence.steps // period)
        table.check_file(geometry, stages, sequence.image_tokens, "stages")
        table.require(
            "period",
            table.period in (None, period),
            f": the {stages} stages of {table.path} are of {period} tokens each, leave it out",
        )
        return replace(table, period=period)

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

    def _visible(self, geometry: Geometry) -> np.ndarray:
        """bool [K, L, (rows,) N, image tokens]: what each stage may see."""
        table, token = self.policy, np.arange(geometry.schedule.image_tokens)
        stage = np.minimum(1 + token // table.period, len(table.stored[1]) - 1)
        keep = table.visible(geometry, stage)
        # the last token is read by none
        return keep & (token < token[-1]) if table.stored[0] == "keep_scale" else keep

    def layer_slots(self, geometry: Geometry) -> np.ndarray:
        held, layers = self._visible(geometry).sum(-1), geometry.num_layers
        return np.moveaxis(held, 1, 0).reshape(layers, -1).max(-1) + self.policy.period

    def minimum_slots(self, geometry: Geometry) -> int:
        return self.slots(geometry, self.policy.budget)

    def allocate(self, geometry: Geometry, budget: float) -> StageAllocation:
        needed, sequence = self.layer_slots(geometry), geometry.schedule
        if (needed >= sequence.steps).all():  # nothing is ever dropped
            return StageAllocation.known(geometry, sequence.steps)
        held = geometry.num_heads * (needed + sequence.condition).sum()
        refuse_more(self.policy, geometry, budget, held, self.policy.path)
        return StageAllocation(needed, self.policy.period)

    def inputs(
        self, geometry: Geometry, allocation: StageAllocation, image_index: np.ndarray
    ) -> np.ndarray:
        following = self._visible(geometry)[2:].swapaxes(0, 1)
        if self.policy.per_row:
            return following[:, :, self.policy.rows_of(geometry, image_index)]
        return following[:, :, None]


@register("table")
@dataclass(frozen=True, kw_only=True)
class Table(StagedPolicy):
    """Keep what a file says: `path=KEEP.npz`.

    The file holds exactly one of
      keep_scale: bool [K, layers, heads, K]; [s, l, n, j] = scale s may see the tokens of scale j
        in that head.
      keep_token: bool [K, layers, heads, tokens], or [K, layers, rows, heads, tokens] with rows = 2
        * images (conditional, then unconditional; without guidance only the former count):
        contents differ per row, as they do with content-dependent policies.
    Entries for the current and later scales must be False, and what is dropped never returns; both
    are checked. Capacities follow from the file (the most that any row keeps), so the budget is a
    check: a table that keeps more than `budget` is refused.

    On models that draw token by token a stage of P tokens takes the place of a scale. Stage 0 is
    the condition, which always stays, whatever the file says. N image tokens have K = 1 + ceil((N -
    1) / P) stages. `keep_token` lists the tokens of the image, the last one included, which nothing
    reads. The buffer of P tokens counts: a table needs a budget for the most that a layer keeps
    before a stage, and P tokens more.

    Args:
      path: the npz file.
      period: P, token by token; it follows from the number of stages and need not be given.
    """

    path: str = ""

    rules = (TableScales, TableTokens)
    unfit_roles = {"select": f"{CONTENTS_FOLLOW} file"}
    summary = "what a file says, for ablations"
    names_files = ("path",)
    budgeted = False
    shrinks = False

    # --- the file ---------------------------------------------------------------------------------

    @cached_property
    def stored(self) -> tuple[str, np.ndarray]:
        """The name of the file's array, and the array. Raises `UserError` if there is none."""
        if not self.path:
            raise UserError("policy 'table' needs a file: path=KEEP.npz")
        with about(f"policy {self.name!r}"):
            if not pathlib.Path(path("path", self.path)).is_file():
                raise UserError(f"there is no file {self.path!r}")
            names = npz.names(self.path)
            kinds = [name for name in ("keep_scale", "keep_token") if name in names]
            if len(kinds) != 1:
                raise UserError(
                    f"{self.path} must hold exactly one of keep_scale and keep_token, it holds: "
                    f"{some(names) or 'nothing'}"
                )
            return npz.load(self.path, kinds, LARGEST).popitem()

    def check_file(self, geometry: Geometry, stages: int, tokens: int, unit: str) -> None:
        """Refuses arrays of another type or shape. unit: what stages are called."""
        name, keep = self.stored
        layers, heads = geometry.num_layers, geometry.num_heads
        last, what, also = stages, unit, ""
        if name == "keep_token":
            last, what = tokens, "tokens"
            also = ", or with rows = 2 * images as third axis"
        rows = keep.shape[2:3] if also and keep.ndim == 5 else ()
        needed = (stages, layers, *rows, heads, last)
        if keep.shape != needed or any(n == 0 or n % 2 for n in rows):
            self.refuse(
                f"{name} has shape {keep.shape}, this model needs {needed} ({unit}, layers, heads, "
                f"{what}){also}"
            )
        if keep.dtype.kind not in "biuf" or not (keep.dtype == bool or np.isin(keep, (0, 1)).all()):
            self.refuse(f"{name} has type {str(keep.dtype):.60}: store bool, or 0 and 1")

    @property
    def per_row(self) -> bool:
        """Whether contents differ per row."""
        return self.stored[1].ndim == 5

    def visible(self, geometry: Geometry, stage: np.ndarray) -> np.ndarray:
        """bool [K, L, (rows,) N, tokens]: what each scale or stage may see, without unconditional
        rows where the model has none. stage: int [tokens], of each token."""
        keep = self.stored[1].astype(bool)
        if self.per_row:
            keep = keep[:, :, : keep.shape[2] // 2 * geometry.rows_per_image]
        return keep[..., stage] if self.stored[0] == "keep_scale" else keep

    def rows_of(self, geometry: Geometry, image_index: np.ndarray) -> np.ndarray:
        """int: the file's rows of these images, conditional ones first."""
        images = self.stored[1].shape[2] // 2
        return np.concatenate([image_index + i * images for i in range(geometry.rows_per_image)])

    def content(self) -> str:
        """SHA-256 of the table, so that a run is not continued with another one."""
        name, keep = self.stored
        return name + ":" + hashlib.sha256(np.packbits(keep.astype(bool)).tobytes()).hexdigest()

    def check_images(self, num_images: int) -> None:
        if self.per_row and (rows := self.stored[1].shape[2]) != 2 * num_images:
            self.refuse(
                f"{self.path} has {rows} rows (two per image), but the run makes {num_images} "
                f"images"
            )
