"""Run any retention pattern from a file, for ablations."""

import hashlib
import pathlib
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from varjax.arguments import path
from varjax.cache.allocation import Allocation, Geometry, RegionAllocation, StaticAllocation
from varjax.errors import UserError, about, some
from varjax.policies.base import Observation, Policy
from varjax.policies.registry import register
from varjax.storage import npz

LARGEST = 512 * 2**20  # bytes; tables pack well, one of the largest published models has 200 MB


@register("table")
@dataclass(frozen=True, kw_only=True)
class Table(Policy):
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

    Args:
      path: the npz file.
    """

    path: str = ""
    unsuited = "its files list scales"
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
        name, keep = self._content
        if keep.dtype.kind not in "biuf":
            self.refuse(f"{name} has type {str(keep.dtype):.60}; store bool")
        k, layers, heads = geometry.schedule.num_scales, geometry.num_layers, geometry.num_heads
        last, what, also = k, "scales", ""
        if name == "keep_token":
            last, what = geometry.schedule.total_tokens, "tokens"
            also = ", or with rows = 2 * images as third axis"
        rows = keep.shape[2:3] if also and keep.ndim == 5 else ()
        needed = (k, layers, *rows, heads, last)
        if keep.shape != needed or any(n == 0 or n % 2 for n in rows):
            self.refuse(
                f"{name} has shape {keep.shape}, this model needs {needed} (scales, layers, heads, "
                f"{what}){also}"
            )
        if keep.dtype != bool and not np.isin(keep, (0, 1)).all():
            self.refuse(f"{name} has type {keep.dtype} with values other than 0 and 1; store bool")

    def _per_row(self) -> bool:
        return self._content[1].ndim == 5

    def _visible(self, geometry: Geometry) -> np.ndarray:
        """bool [K, L, (rows,) N, tokens]."""
        name, keep = self._content
        keep = keep.astype(bool)
        if keep.ndim == 5:
            keep = keep[:, :, : keep.shape[2] // 2 * geometry.rows_per_image]
        return keep[..., geometry.schedule.scale_of_token] if name == "keep_scale" else keep

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
        held = allocation.capacity(geometry).sum((1, 2)).max()
        if held > budget * geometry.dense_tokens + 1e-6:
            self.refuse(
                f"{self.path} keeps up to {held / geometry.dense_tokens:.4f} of the full cache, "
                f"more than budget={budget:g}: raise the budget or drop more"
            )
        return allocation

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
        images = self._content[1].shape[2] // 2
        rows = np.concatenate([image_index + i * images for i in range(geometry.rows_per_image)])
        following = np.concatenate([visible[1:], np.zeros_like(visible[:1])])
        return following[:, :, rows]

    def select(self, obs: Observation):
        return obs.live & jnp.take_along_axis(obs.inputs, obs.position, axis=-1)
