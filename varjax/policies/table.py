"""Run any retention pattern from a file, for ablations."""

import dataclasses
import hashlib
import pathlib
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from varjax.arguments import path
from varjax.cache.allocation import Allocation, Geometry, RegionAllocation, StaticAllocation
from varjax.cache.observation import Observation
from varjax.cache.stages import StageAllocation
from varjax.errors import UserError, about, some
from varjax.policies.registry import register
from varjax.policies.staged import TokenPolicy
from varjax.storage import npz

LARGEST = 512 * 2**20  # bytes; tables pack well, one of the largest published models has 200 MB


@register("table")
@dataclass(frozen=True, kw_only=True)
class Table(TokenPolicy):
    """Keep what a file says: `path=KEEP.npz`.

    The file holds exactly one of
      keep_scale: bool [K, layers, heads, K]; [s, l, n, j] = scale s may see the tokens of scale j
        in that head.
      keep_token: bool [K, layers, heads, tokens], or [K, layers, rows, heads, tokens] with rows = 2
        * images (conditional, then unconditional; without guidance only the former count):
        contents that differ per row, as those of content-dependent policies do.
    Entries for the current and later scales must be False, and what is dropped never returns; both
    are checked. Capacities follow from the file (the most that any row keeps), so the budget is a
    check: a table that keeps more than `budget` is refused.

    On models that draw token by token a stage of P tokens takes the place of a scale, and stage 0
    is the condition, which always stays, whatever the file says: K = 1 + ceil((N - 1) / P) stages
    for N image tokens. The tokens of `keep_token` are those of the image, its last one included,
    which nothing reads. The buffer of P tokens counts, so the smallest budget of a table is what a
    layer keeps at most before a stage, and P tokens more.

    Args:
      path: the npz file.
      period: P; it follows from the number of stages and need not be given.
    """

    path: str = ""
    summary = "what a file says, for ablations"
    budgeted = False
    shrinks = False

    @cached_property
    def _content(self) -> tuple[str, np.ndarray]:
        if not self.path:
            raise UserError("policy 'table' needs a file: path=KEEP.npz")
        with about(f"policy {self.name!r}"):
            path("path", self.path)
        if not pathlib.Path(self.path).is_file():
            self.refuse(f"there is no file {self.path!r}")
        try:
            names = npz.names(self.path)
            kinds = [name for name in ("keep_scale", "keep_token") if name in names]
            if len(kinds) != 1:
                raise UserError(
                    f"{self.path} must hold exactly one of keep_scale and keep_token, it holds: "
                    f"{some(names) or 'nothing'}"
                )
            return npz.load(self.path, kinds, LARGEST).popitem()
        except UserError as error:
            self.refuse(str(error))

    def check(self, geometry: Geometry) -> None:
        super().check(geometry)
        schedule = geometry.schedule
        self._check_file(geometry, schedule.num_scales, schedule.total_tokens, "scales")

    def _check_file(self, geometry: Geometry, stages: int, tokens: int, unit: str) -> None:
        """Refuse arrays of another type or shape. unit: what stages are called."""
        name, keep = self._content
        if keep.dtype.kind not in "biuf":
            self.refuse(f"{name} has type {str(keep.dtype):.60}; store bool")
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
        if keep.dtype != bool and not np.isin(keep, (0, 1)).all():
            self.refuse(f"{name} has type {keep.dtype} with values other than 0 and 1; store bool")

    def _per_row(self) -> bool:
        return self._content[1].ndim == 5

    def _visible(self, geometry: Geometry) -> np.ndarray:
        """bool [K, L, (rows,) N, tokens]."""
        name, keep = self._content
        keep = self._of_rows(geometry)
        return keep[..., geometry.schedule.scale_of_token] if name == "keep_scale" else keep

    def _of_rows(self, geometry: Geometry) -> np.ndarray:
        """The file's array as bool, without unconditional rows where there are none."""
        keep = self._content[1].astype(bool)
        return (
            keep[:, :, : keep.shape[2] // 2 * geometry.rows_per_image] if keep.ndim == 5 else keep
        )

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> Allocation:
        visible = self._visible(geometry)
        if not self._per_row():
            allocation = StaticAllocation.from_visibility(geometry, visible)
        else:
            for row in range(visible.shape[2]):
                StaticAllocation.from_visibility(geometry, visible[:, :, row])
            counts = visible.sum(-1)
            ragged = bool((counts != counts[:, :, :1]).any())
            allocation = RegionAllocation(counts.max(2).astype(np.int32), ragged=ragged)
        self._check_budget(geometry, budget, allocation.capacity(geometry).sum((1, 2)).max())
        return allocation

    def _check_budget(self, geometry: Geometry, budget: float, held: int) -> None:
        if held > budget * geometry.dense_tokens + 1e-6:
            self.refuse(
                f"{self.path} keeps up to {held / geometry.dense_tokens:.4f} of the full cache, "
                f"more than budget={budget:g}: raise the budget or drop more"
            )

    def content(self) -> str:
        """SHA-256 of the table, so that a run is not continued with another one."""
        name, keep = self._content
        return name + ":" + hashlib.sha256(np.packbits(keep.astype(bool)).tobytes()).hexdigest()

    def check_images(self, num_images: int) -> None:
        if self._per_row() and (rows := self._content[1].shape[2]) != 2 * num_images:
            self.refuse(
                f"{self.path} has {rows} rows (two per image), but the run makes {num_images} "
                f"images"
            )

    def inputs(self, geometry: Geometry, allocation: Allocation, image_index: np.ndarray):
        if not self._per_row():
            return None
        visible = self._visible(geometry)
        following = np.concatenate([visible[1:], np.zeros_like(visible[:1])])
        return following[:, :, self._rows(geometry, image_index)]

    def _rows(self, geometry: Geometry, image_index: np.ndarray) -> np.ndarray:
        """int: the file's rows of these images, conditional ones first."""
        images = self._content[1].shape[2] // 2
        return np.concatenate([image_index + i * images for i in range(geometry.rows_per_image)])

    def select(self, obs: Observation):
        return obs.live & jnp.take_along_axis(obs.inputs, obs.position, axis=-1)

    # --- models that draw token by token ----------------------------------------------------------

    def prepare_stages(self, geometry: Geometry) -> "Table":
        """With the period that gives the file's number of stages."""
        sequence, stages = geometry.schedule, len(self._content[1]) if self._content[1].ndim else 0
        period = -(-sequence.steps // max(1, stages - 1))
        self._check_file(
            geometry, 1 + -(-sequence.steps // period), sequence.image_tokens, "stages"
        )
        self.require(
            "period",
            self.period in (None, period),
            f": the {stages} stages of {self.path} are of {period} tokens each, leave it out",
        )
        return dataclasses.replace(self, period=period)

    def check_stage_arguments(self, geometry: Geometry) -> None:
        """What is wrong with the table; its budget is checked with the allocation."""
        keep, period = self._stage_visible(geometry), self.period
        first = np.maximum(np.arange(len(keep)) - 1, 0)[:, None] * period
        drawn = np.arange(geometry.schedule.image_tokens) < first  # when a stage starts
        drawn = drawn.reshape(len(keep), *(1,) * (keep.ndim - 2), -1)
        if (early := keep & ~drawn).any():
            s, layer, *_, head, token = np.argwhere(early)[0]
            self.refuse(
                f"stage {s} is said to see image token {token} (layer {layer}, head {head}), which "
                f"does not exist before stage {1 + token // period} ends: entries for the current "
                f"and later stages must be False"
            )
        if (returns := keep[1:] & ~keep[:-1] & drawn[:-1]).any():
            s, layer, *_, head, token = np.argwhere(returns)[0]
            self.refuse(
                f"image token {token} (layer {layer}, head {head}) is dropped before stage {s} and "
                f"visible again at stage {s + 1}: what is dropped cannot return"
            )

    def _stage_visible(self, geometry: Geometry) -> np.ndarray:
        """bool [K, L, (rows,) N, image tokens]."""
        keep, sequence = self._of_rows(geometry), geometry.schedule
        if self._content[0] == "keep_token":
            return keep
        stage = 1 + np.arange(sequence.image_tokens) // self.period
        last = np.arange(sequence.image_tokens) == sequence.steps  # is read by none
        return keep[..., np.minimum(stage, len(keep) - 1)] & ~last

    def needed(self, geometry: Geometry) -> np.ndarray:
        """int64 [L]: image slots of a head, the buffer included."""
        held = self._stage_visible(geometry).sum(-1)
        return np.moveaxis(held, 1, 0).reshape(geometry.num_layers, -1).max(-1) + self.period

    def minimum_slots(self, geometry: Geometry) -> int:
        return min(geometry.schedule.steps, int(self.needed(geometry).max()))

    def wanted_slots(self, geometry: Geometry) -> int:
        return self.minimum_slots(geometry)

    def allocate_stages(self, geometry: Geometry, slots: int) -> StageAllocation:
        needed, sequence = self.needed(geometry), geometry.schedule
        if (needed >= sequence.steps).all():  # nothing is ever dropped
            return StageAllocation.known(geometry, sequence.steps)
        held = geometry.num_heads * (needed + sequence.condition).sum()
        self._check_budget(geometry, self.budget, held)
        return StageAllocation(needed, self.period)

    def stage_inputs(self, geometry: Geometry, image_index: np.ndarray) -> np.ndarray:
        """bool [L, stages that end with a decision, R or 1, N, image tokens]: what the next stage
        sees."""
        following = self._stage_visible(geometry)[2:].swapaxes(0, 1)
        if self._per_row():
            return following[:, :, self._rows(geometry, image_index)]
        return following[:, :, None]

    def select_stage(self, obs: Observation):
        kept = jnp.broadcast_to(obs.inputs, (*obs.position.shape[:2], obs.inputs.shape[-1]))
        return obs.live & jnp.take_along_axis(kept, obs.position, axis=-1)
