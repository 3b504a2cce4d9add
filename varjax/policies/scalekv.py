"""ScaleKV: drafter layers keep everything, refiner layers what a window of queries looks at."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from varjax.calibration.data import Calibration
from varjax.core import masks, planner
from varjax.core.allocation import Geometry, RegionAllocation
from varjax.core.arguments import within
from varjax.core.observation import Needs, Observation
from varjax.core.policy import Policy
from varjax.policies import capacities, scalekv_budgets
from varjax.policies.registry import register
from varjax.policies.scale_rule import CALIBRATE, NotGiven, ScaleRule, measured, refuse_more
from varjax.policies.snapkv import WINDOW_SHARE
from varjax.policies.token_rule import check_kernel

GRID = 4


class ScaleKVScales(ScaleRule):
    """Budgets of layers, from a file or a calibration, and the raster of the window."""

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "ScaleKV":
        policy = self.policy
        budget, grid = policy.budget, policy.grid or GRID
        if policy.budgets and isinstance(budget, NotGiven):
            held, tokens = self._published(geometry)
            budget = tokens / geometry.dense_tokens
            if policy.accounting == "bytes":
                budget = planner.cost(geometry, held, policy.block_size)
        elif not (policy.grid or policy.budgets or policy.faithful):
            share = capacities.uniform(geometry, budget) // WINDOW_SHARE
            grid = min(GRID, max(1, math.isqrt(share)))
        return replace(policy, budget=budget, grid=grid, _calibration=calibration)

    def check(self, geometry: Geometry) -> None:
        policy, layers = self.policy, geometry.num_layers
        fits = 0 <= policy.drafters <= layers
        policy.require("drafters", fits, f", but the model has {layers} layers")
        of_own_budgets = ("drafters", "refiner_share")
        given = [n for n in of_own_budgets if getattr(policy, n) != getattr(type(policy), n)]
        if policy.budgets and given:
            policy.refuse(
                f"budgets={policy.budgets} already says what every layer keeps: leave out "
                f"{' and '.join(given)}, or budgets"
            )
        check_kernel(policy)

    def allocate(self, geometry: Geometry, budget: float) -> RegionAllocation:
        policy = self.policy
        if policy.budgets:
            held, tokens = self._published(geometry)
            refuse_more(policy, geometry, budget, tokens, policy.budgets)
            return held
        file = "budgets=FILE (a budget file published with ScaleKV, for models of that shape)"
        give, found = f"{file}, or {CALIBRATE}", policy._calibration
        found = measured(policy, found, "selectivity", geometry, what="the layers", give=give)
        per_layer = scalekv_budgets.own_tokens(
            geometry,
            budget,
            found[:, min(1, found.shape[1] - 1) :].mean(-1),  # the first scale looks at none
            policy.drafters,
            policy.refiner_share,
            peak=policy.accounting == "bytes",
        )
        return RegionAllocation(capacities.capacity(geometry, per_layer[..., None]))

    def _published(self, geometry: Geometry) -> tuple[RegionAllocation, int]:
        """The room that the file gives every head; its most tokens, as `accounting` counts."""
        policy = self.policy
        tokens = scalekv_budgets.published_tokens(policy.budgets, policy.file[0], geometry)
        held = RegionAllocation(capacities.capacity(geometry, tokens[..., None]))
        if policy.accounting == "bytes":
            return held, planner.peak_tokens(geometry, held)
        return held, int(held.region_capacity.sum((1, 2)).max())

    def window_tokens(self, height: int, width: int) -> np.ndarray:
        turn = np.arange(grid := self.policy.grid or GRID)

        def raster(side: int) -> np.ndarray:
            """int [grid]: the middle of each cell; rows spread evenly if fewer than cells."""
            if side < grid:
                return (2 * turn + 1) * side // (2 * grid)
            return turn * (side // grid) + (side // grid - 1) // 2

        return (raster(height)[:, None] * width + raster(width)).ravel().astype(np.int32)


@register("scalekv")
@dataclass(frozen=True, kw_only=True)
class ScaleKV(Policy):
    """ScaleKV ("Memory-Efficient Visual Autoregressive Modeling with Scale-Aware KV Cache
    Compression", Li et al. 2025).

    Idea: few layers, the drafters, spread their attention over all earlier scales; most, the
    refiners, attend to the scale at hand and to few tokens beside it. So drafters get large caches
    and refiners small ones, scale by scale.

    1. Layer class: the selectivity of a layer is its attention on the current scale times the
       concentration of its attention on earlier scales, averaged over scales. The layers of lowest
       selectivity are the drafters.
    2. Budgets: at each scale drafters keep everything and the refiners share the rest equally; the
       mean over layers is the budget. While everything fits nothing is dropped.
    3. Window: the tokens of a grid x grid raster over the scale just generated. With cells of
       S // grid rows, row i of the raster is i * (S // grid) + (S // grid - 1) // 2; the columns
       follow the same rule. These tokens stay, as far as they fit (the best-scored if not all do).
    4. Scores: attention logits (before the softmax) of the window's queries, averaged; max-pooled
       along the cache in order of position, stride 1, `kernel` wide, window positions at -inf
       before and after. The best fill the rest; among equals the higher own score, then the earlier
       token.

    Needs either `budgets`, a file published with the paper (for models of that shape), or a
    calibration that holds selectivity.

    Args:
      budget: fraction of the full cache; the mean over layers whenever a scale starts.
      budgets: published budget file, see `scalekv_budgets.read_budgets`. The budget is then what
        the file costs; a budget that is given is checked.
      drafters: the most drafter layers. 0 takes one in 16 layers, as the published files have.
      refiner_share: capacity that refiners keep at least, relative to the mean over layers; the
        published files go down to 0.31. Where it is not left, fewer layers are drafters, and the
        last of them keeps what is left.
      grid: side of the window's raster. 0 takes 4; with own budgets less if the window would take
        more than a quarter of the mean capacity.
      kernel: width of the pooling, odd.
      faithful: score as the authors' code does, see below.

    Differs from the authors' code:
      - It recomputes the window's queries without bias, normalisation, learned multiplier and
        rotation, which cached keys have: its scores are not the attention logits that the paper
        describes. We use the logits; `faithful=True` does what the code does. Sums and means rank
        tokens in the same order.
      - Which tokens of a pooling plateau survive is unspecified there.
      - It compresses when a cache exceeds 650 tokens; here the capacities say so for every model.
      - Its budget holds when a scale starts. A drafter grows before later layers have shrunk, so
        the cache is larger for a while. accounting=tokens counts like that; accounting=bytes
        lowers own budgets until the peak fits too, and refuses a file whose peak does not fit.
      - With own budgets a layer has the same class at all scales: a layer that was a refiner has
        nothing left to draft with.
      - Maps with sides below the grid, which its sizes never compress, are sampled evenly.
    """

    budget: float = NotGiven(0.25)
    budgets: str = ""
    drafters: int = 0
    refiner_share: float = within(0.3, 0, 1, above=True)
    grid: int = within(0, 0, 16)
    kernel: int = 5
    faithful: bool = False
    _calibration: Calibration | None = field(default=None, repr=False, compare=False)

    rules = (ScaleKVScales,)
    allocation_arguments = ("budgets", "drafters", "refiner_share")
    selection_arguments = ("grid", "kernel", "faithful")
    examples = ({}, {"faithful": "true"})
    unsuited = "it tells layers apart by how they look at the scales before"
    summary = "everything in drafter layers, best logits in refiners; needs budgets or calibration"
    names_files = ("budgets",)

    @property
    def needs(self) -> Needs:
        window = (self.grid or GRID) ** 2
        return Needs(window=window, window_logits=True, raw_queries=self.faithful)

    @property
    def uses_calibration(self) -> bool:
        """Whether measurements decide, and with them the budget; if not, a file does."""
        return not self.budgets

    budgeted = shrinks = uses_calibration

    @cached_property
    def file(self) -> tuple[dict[int, dict[str, int]], str]:
        return scalekv_budgets.read_budgets(self.budgets)

    def content(self) -> str | None:
        """SHA-256 of the budget file, so that a run is not continued with another one."""
        return f"budgets:{self.file[1]}" if self.budgets else None

    def select(self, obs: Observation):
        return masks.window_and_peaks(obs, obs.window_logits, self.kernel)
