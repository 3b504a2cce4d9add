"""`Calibration`: what was measured on a model before it is compressed, whether it fits, and the
scores of heads and scales that follow from it.

Letters: K scales, L layers, N heads, T = L * N, S source scales after the sinks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from varjax.core.allocation import Geometry
from varjax.core.errors import UserError, show
from varjax.core.sequence import TOKENS, Schedule
from varjax.storage.values import measured

LARGEST = 1e6  # of a measurement: attention mass is at most 1, distances of keys a few hundred
AXES = {  # of the arrays; the last scale is never stored
    "beta": ("layers", "heads", "scales", "scales"),
    "key_discrepancy": ("layers", "scales"),
    "query_variance": ("layers", "heads"),
    "selectivity": ("layers", "scales"),
    "rank_dispersion": ("stored scales",),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Calibration:
    """Measurements of one model. What was not measured, or what a file does not say, is None.

    model, model_digest, schedule, num_layers, num_heads, guidance, num_samples: what was measured,
      and how (schedule: `order_of`). The digest tells models of one shape apart.
    orders: int32 [S, T, 2], (head, layer), least needed first; the last list belongs to scale K - 2
      (HeatKV's S-CAS orders). A single list may order whole heads.
    beta: float64 [L, N, K, K], attention mass from query scale to source scale, averaged over
      queries and samples.
    key_discrepancy: float64 [L, K], mean over heads, tokens and samples of ||k_i - resized
      k_(i-1)||_2 (AMS-KV, Eq. 3); 0 for the first scale.
    query_variance: float64 [L, N], how much the queries of a head disagree (HACK): sum over keys of
      the variance over queries of their attention, averaged over scales and samples.
    selectivity: float64 [L, K], attention on the current scale times the concentration of what
      goes to earlier scales (ScaleKV's index); 0 for the first scale.
    rank_dispersion: float64 [K - 1], standard deviation of a head's rank in the order of each
      source scale over repeated calibrations, averaged over heads (HeatKV, Figure 6).
    learned: {budget: uint8 [K - 1, L, N, F]}, how much every scale from the second on needs a token
      that is cached, as `experiments.learn` has learned it under that budget: 255 sqrt(P), where P
      is the probability that the scale still sees the token. Token by token a stage takes the place
      of a scale, the condition that of the first, and F are the image tokens that are cached.
    digest: SHA-256 of the file it was read from; of two files both, with a + between them.
    """

    model: str | None = None
    model_digest: str | None = None
    schedule: Schedule | str | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    guidance: float | str | None = None
    num_samples: int | None = None
    orders: np.ndarray | None = None
    beta: np.ndarray | None = None
    key_discrepancy: np.ndarray | None = None
    query_variance: np.ndarray | None = None
    selectivity: np.ndarray | None = None
    rank_dispersion: np.ndarray | None = None
    learned: Mapping[float, np.ndarray] | None = None
    digest: str | None = None

    def check(self, geometry: Geometry) -> None:
        """Raises `UserError` if this was measured on a model of another shape or schedule, or holds
        what no measurement gives: not numbers from 0 to `LARGEST`, or nothing but zeros."""
        for name in ("schedule", "num_layers", "num_heads"):
            made_for, wanted = getattr(self, name), getattr(geometry, name)
            wanted = order_of(geometry) if name == "schedule" else wanted
            if made_for is not None and made_for != wanted:
                raise UserError(
                    f"the calibration was made for another model: its {name} is {made_for}, this "
                    f"model has {wanted}; calibrate this model"
                )
        scales = geometry.schedule.num_scales
        size = {"layers": geometry.num_layers, "heads": geometry.num_heads}
        size |= {"scales": scales, "stored scales": scales - 1}
        # a model of one scale, or of scales of one token, has no distances and no variances
        compares = scales > 1 and max(geometry.schedule.tokens) > 1
        for name, axes in AXES.items():
            if getattr(self, name) is None:
                continue
            array = measured(f"the calibration's {name}", getattr(self, name), LARGEST)
            shape = tuple(size[axis] for axis in axes)
            if array.shape != shape:
                raise UserError(
                    f"the calibration's {name} has shape {array.shape}, this model needs {shape} "
                    f"({', '.join(axes)})"
                )
            # orders may be the same in all calibrations
            if compares and not array.any() and name != "rank_dispersion":
                raise UserError(
                    f"the calibration's {name} holds nothing but zeros, which no model gives: "
                    f"calibrate this model again"
                )
        stored = geometry.schedule.persistent_tokens
        for budget, seen in (self.learned or {}).items():
            later = scales - 1
            if geometry.kind == TOKENS:
                stored = geometry.schedule.steps
                # as many stages as periods of whole tokens can give
                later = -(-stored // -(-stored // max(1, len(seen) if seen.ndim else 0)))
            needed = (later, geometry.num_layers, geometry.num_heads, stored)
            name = f"the calibration's learned table of budget {budget:g}"
            if (seen.dtype, seen.shape) != (np.uint8, needed):
                raise UserError(f"{name} is {seen.dtype} {seen.shape}, not uint8 {needed}")
            if seen.size and not seen.any():
                raise UserError(f"{name} holds nothing but zeros: learn it again")
        if self.orders is not None:
            lists = self.orders.tolist() if isinstance(self.orders, np.ndarray) else self.orders
            if read_orders(lists, geometry).shape != np.shape(self.orders):
                raise UserError("the calibration's orders must be [lists, heads in all, 2]")

    def check_origin(self, model_digest: str, guidance: float | str | None = None) -> None:
        """Raises `UserError` if this was measured on other weights, or with other guidance
        (`Sampling.guidance`; None: whatever it was)."""
        if self.model_digest not in (None, model_digest):
            raise UserError(
                f"the calibration was made for other weights (of a model called {self.model!r}); "
                f"calibrate this model: python -m experiments."
                f"{'learn' if self.learned else 'calibrate'}"
            )
        both = (self.guidance, guidance)
        mine, other = (g if isinstance(g, str) else f"{g or 0:g}" for g in both)
        if None not in both and mine != other:
            raise UserError(
                f"the calibration was made with guidance cfg={mine}, this run uses cfg={other}: "
                f"run with cfg={mine}, or calibrate with cfg={other}"
            )

    @property
    def attention_density(self) -> np.ndarray:
        """float64 [L, N, K]: attention that a token of each source scale receives from all queries
        of the last scale, T_last * beta[last, k] / T_k (AMS-KV, Section 3)."""
        tokens = np.array(self.schedule.tokens, np.float64)
        return tokens[-1] * self.beta[..., -1, :] / tokens


def order_of(geometry: Geometry) -> Schedule | str:
    """The order of drawing that a calibration belongs to. Token by token it is a text, without the
    condition: its length does not matter."""
    order = geometry.schedule
    if geometry.kind == TOKENS:
        return f"{order.image_tokens} tokens in lines of {order.line}"
    return order


def read_orders(content: object, geometry: Geometry) -> np.ndarray:
    """int32 [lists, T, 2] from nested lists of [head, layer], in each every head of the model
    exactly once; one flat list of pairs counts as one list."""
    if not isinstance(content, list) or not content:
        raise UserError("it holds no removal orders: one list of [head, layer] per source scale")
    first, layers, heads = content[0], geometry.num_layers, geometry.num_heads
    if isinstance(first, list) and first and not isinstance(first[0], list):
        content = [content]
    for number, entries in enumerate(content):
        name = f"order list {number}"
        if not isinstance(entries, list) or len(entries) != layers * heads:
            given = f"{len(entries)} entries" if isinstance(entries, list) else show(entries)
            raise UserError(
                f"{name} holds {given}; this model needs {layers * heads}, one [head, layer] for "
                f"each of {heads} heads in {layers} layers"
            )
        seen: set[tuple[int, int]] = set()
        for i, entry in enumerate(entries):
            if not (isinstance(entry, list) and [type(x) for x in entry] == [int, int]):
                raise UserError(f"{name}, entry {i} is {show(entry)}: write [head, layer]")
            head, layer = entry
            again = (head, layer) in seen
            if again or not (0 <= head < heads and 0 <= layer < layers):
                raise UserError(
                    f"{name}, entry {i} is [{head}, {layer}]{' again' * again}: heads go from 0 to "
                    f"{heads - 1}, layers from 0 to {layers - 1}, and every head appears once"
                )
            seen.add((head, layer))
    return np.array(content, np.int32)


# --- scores from the attention mass beta, and the removal orders that they give (HeatKV) ----------


def scas(beta: np.ndarray, sinks: int) -> np.ndarray:
    """S-CAS [L, N, K]: mean attention mass that later scales, the last included, give to a source
    scale (HeatKV, Eq. 4); NaN for sinks and the last scale."""
    num_scales = beta.shape[-1]
    scores = np.full(beta.shape[:-1], np.nan)
    for k in range(sinks, num_scales - 1):
        scores[..., k] = beta[..., k + 1 :, k].mean(-1)
    return scores


def cas(beta: np.ndarray, sinks: int) -> np.ndarray:
    """CAS [L, N]: attention mass of the last scale on the scales between the sinks and itself, over
    K - sinks (HeatKV, Eq. 3)."""
    num_scales = beta.shape[-1]
    return beta[..., -1, sinks : num_scales - 1].sum(-1) / (num_scales - sinks)


def order_heads(scores: np.ndarray) -> np.ndarray:
    """int32 [T, 2] of (head, layer) by ascending score [L, N]; ties by head, then layer."""
    layer, head = np.indices(scores.shape).reshape(2, -1)
    order = np.lexsort((layer, head, scores.ravel()))
    return np.stack([head, layer], -1)[order].astype(np.int32)


def orders_from_scores(scores: np.ndarray, sinks: int) -> np.ndarray:
    """int32 [S, T, 2]: an order for each source scale from the first after the sinks to K - 2."""
    layers, heads, num_scales = scores.shape
    lists = [order_heads(scores[..., k]) for k in range(sinks, num_scales - 1)]
    return np.array(lists, np.int32).reshape(-1, layers * heads, 2)
