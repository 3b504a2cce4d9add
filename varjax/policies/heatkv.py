"""HeatKV and its two ablations: which head gives up which scale, decided once per model."""

from dataclasses import dataclass, field, replace

import numpy as np

from varjax.calibration.data import Calibration, cas, order_heads, orders_from_scores, scas
from varjax.core.allocation import Geometry, StaticAllocation
from varjax.core.errors import UserError
from varjax.policies.heatkv_schedule import PruneSchedule, prune_schedule
from varjax.policies.registry import register
from varjax.policies.scale_rule import CALIBRATE, CONTENTS_FOLLOW
from varjax.policies.windows import MOST_AUTOMATIC_SINKS, SinkPolicy, SinkScales


class HeatKVScales(SinkScales):
    """Which head gives up which scale, from the removal orders of a calibration."""

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "HeatKV":
        _, sinks = self.removal_orders(geometry, calibration)
        return replace(self.policy, sinks=sinks, _calibration=calibration)

    def removal_orders(
        self, geometry: Geometry, calibration: Calibration | None
    ) -> tuple[np.ndarray, int]:
        """(int [S, T, 2], orders of (head, layer), or [1, T, 2] for whole heads; sink scales).
        `UserError`: there is no calibration, it is of another model, or does not fit the policy."""
        policy, own = self.policy, self.policy.sinks
        if calibration is None:
            raise UserError(
                f"policy {policy.name!r} needs measurements of the model: give {CALIBRATE}, or "
                f"removal orders as published with HeatKV (JSON lists of [head, layer])"
            )
        self.check(geometry)
        calibration.check(geometry)
        whole, orders, beta = policy.whole_heads, calibration.orders, calibration.beta
        sinks = self.sink_scales(geometry, policy.budget)
        if beta is not None:
            by_head = order_heads(cas(beta, sinks))[None] if whole else None
            return (by_head if whole else orders_from_scores(scas(beta, sinks), sinks)), sinks
        if orders is None:
            policy.refuse("the calibration holds neither orders nor beta")
        if whole and len(orders) != 1:
            policy.refuse(
                f"it removes whole heads and needs one order of heads (CAS) or beta, the "
                f"calibration holds {len(orders)} lists, one per source scale"
            )
        if whole:
            return orders, sinks
        scales, least = geometry.schedule.num_scales, own or 1
        most, implied = own or MOST_AUTOMATIC_SINKS, scales - 1 - len(orders)
        if not least <= implied <= most:
            policy.refuse(
                f"{len(orders)} order lists for {scales} scales; with {own or '1 to 3'} "
                f"sink scales there are {max(0, scales - 1 - most)} to {scales - 1 - least} (the "
                f"last scale is never stored): give one list for each, or say sinks={implied}"
            )
        return orders, implied

    def schedule(self, geometry: Geometry, budget: float) -> PruneSchedule:
        """The pruning schedule behind `allocate`; `UserError` as in `prepare`."""
        orders, sinks = self.removal_orders(geometry, self.policy._calibration)
        return prune_schedule(
            geometry,
            orders,
            sinks=sinks,
            budget=budget,
            whole_heads=self.policy.whole_heads,
            literal=self.policy.literal,
        )

    def allocate(self, geometry: Geometry, budget: float) -> StaticAllocation:
        last_use = self.schedule(geometry, budget).last_use().astype(np.int16)
        return StaticAllocation(np.repeat(last_use, geometry.schedule.tokens, axis=-1))


@register("heatkv")
@dataclass(frozen=True, kw_only=True)
class HeatKV(SinkPolicy):
    """HeatKV ("Head-tuned KV-cache Compression for Visual Autoregressive Modeling", 2026).

    Idea: how much a head looks back at a given scale hardly depends on the image. So a few images
      tell, once per model, which scales each head can do without. Every head gets its own subset of
      scales, and the subset shrinks as the cache grows.

    1. Importance (Eqs. 2, 4): beta[k, j] is the attention mass of scale k on scale j, S-CAS the
       mean of beta[k, j] over the later scales k > j. For each source scale j after the s sinks,
       S-CAS orders all T heads of the model: O_j, least needed first.
    2. Budget (Eq. 5): after scale k, N_k = ceil(T * (c_k - b * F) / (c_k - c_(s-1))) heads must
       have given up each source scale: G_k is the union of the prefixes of length N_k of
       O_s ... O_k.
    3. Strictness (Algorithm 1): scale k stores layer by layer, so its first layers may exceed the
       budget before the last ones have removed anything. E_k, the fewest removals of G_k taken
       before scale k starts (last layers first, then large scales, then rank), prevents that. What
       attention does not see at scale k is A_k = G_(k-1) + E_k.

    Needs a calibration: removal orders as published with the paper (a JSON list with one list of
    [head, layer] per source scale) or one that holds beta.

    Args:
      budget: fraction of the full cache, kept after every layer of every scale.
      sinks: scales that are never dropped; 3 in the paper. 0 takes what the order lists imply,
        K - 1 minus their number. With beta 0 takes up to 3, as many as fit half of the budget.
        Lists that imply more than 3 sinks are refused unless `sinks` says so: one is probably
        missing.

    Differs from:
      - the paper: Algorithm 2 as printed counts the current scale in layers that have not stored it
        yet and so removes almost everything early (`heatkv_naive`). Like the authors' code, we
        count what is stored.
      - the authors' planner: it counts a scale's early removals from the layer that made them
        necessary. Here, as in their runtime, the cache goes straight to A_(k+1) after layer l of
        scale k: tokens held after a layer are at most what their planner counts, and attention
        sees the same. Any schedule works, not only the square 1M one, and nothing is allocated in
        reserve.
    """

    budget: float = 0.1
    _calibration: Calibration | None = field(default=None, repr=False, compare=False)

    rules = (HeatKVScales,)
    unfit_roles = {"select": f"{CONTENTS_FOLLOW} schedule of scales"}
    unsuited = "its orders say which heads give up which scales"
    summary = "per head the scales that later scales look at; needs a calibration"
    whole_heads = literal = False  # see `prune_schedule`
    uses_calibration = True


@register("binary_heatkv")
@dataclass(frozen=True, kw_only=True)
class BinaryHeatKV(HeatKV):
    """Binary-HeatKV: a head keeps all its scales or only its sinks (HeatKV, Table 3c).

    Heads are ordered once, by CAS (Eq. 3): the attention mass of the last scale on what is cached
    between the sinks and itself. After scale k the first N_k heads keep their sinks only; early
    removals as in `heatkv`, but of heads: last layers first, then rank.

    Needs a calibration with a single order of heads, or with beta.

    Args:
      budget, sinks: as in `heatkv`; a single list says nothing about sinks.

    Differs from: not part of the authors' code. The paper's cache size counts the current scale in
      layers that have not run; as in `heatkv` we count what is stored.
    """

    summary = "all scales or only the sinks, per head; needs a calibration"
    whole_heads = True


@register("heatkv_naive")
@dataclass(frozen=True, kw_only=True)
class HeatKVNaive(HeatKV):
    """HeatKV with early removal counted as Algorithm 2 is printed: the naive ablation (Table 3c).

    Layers that have not run are taken to hold the current scale already. The count then exceeds the
    budget from the first layer on, and nearly all of G_k minus G_(k-1) is removed before scale k
    starts: within the budget at all times, but the budget is not used.

    Needs a calibration as `heatkv` does (as `binary_heatkv` with `whole_heads`).

    Args:
      budget, sinks: as in `heatkv`.
      whole_heads: remove whole heads, as the paper's table does; by default single scales, so that
        only the time of removal differs from `heatkv`.

    Differs from: the table's naive policy removes all of G_k minus G_(k-1) early. The literal count
      spares the few that it does not need (Infinity-2B at 10 %: 4044 of 4167 are early).
    """

    whole_heads: bool = False

    examples = ({}, {"whole_heads": "true"})
    summary = "as heatkv, but nearly everything is removed a scale early"
    literal = True
