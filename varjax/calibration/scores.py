"""Scores of heads and scales from the attention mass beta, and the removal orders that they give
(HeatKV). Letters: K scales, L layers, N heads, T = L * N, S source scales after the sinks."""

from collections.abc import Sequence

import numpy as np

from varjax.schedule import Schedule


def attention_mass(probabilities: Sequence[np.ndarray], schedule: Schedule) -> np.ndarray:
    """beta [..., K, K] of one sample from attention [..., t_k, c_k] of every scale k over 0..k:
    mean over queries, sum over the columns of each source scale (HeatKV, Eq. 2). For attention
    that is at hand; `Probe` sums up the same while generating."""
    num_scales = schedule.num_scales
    beta = np.zeros((*probabilities[0].shape[:-2], num_scales, num_scales))
    for k, attention in enumerate(probabilities):
        columns = attention.mean(-2, dtype=np.float64)
        beta[..., k, : k + 1] = np.add.reduceat(columns, schedule.starts[: k + 1], axis=-1)
    return beta


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
