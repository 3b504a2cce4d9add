"""Intervals of the means of a sweep under other images, estimated by bootstrap.

Every metric compares an image with the same image of the full cache, and all cells draw the same
images. So cells are compared image by image: the interval of a difference belongs to the mean of
the differences, and is narrower than two separate intervals suggest.

Letters: C rows of numbers, N images.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from experiments.evaluation import metrics
from experiments.evaluation.metrics import METRICS, Metric

PER_IMAGE = "per_image/"  # prefix of a metric's array in a cell's file: numbers of all images
RESAMPLES, SEED = 10_000, 0
LEVEL = 0.95
AT_ONCE = 2**22  # counts that are in memory at a time
DEFINITION = (
    f"{LEVEL:.0%} interval of the mean over images: percentiles of the means of {RESAMPLES:,} "
    "resamples of the images, the same for all cells; too narrow below some 20 images"
)
UNKNOWN = "not known: it takes the numbers of at least two images"
DIFFERENCE = (
    "mean over images of a cell's number minus that of the cell with the best mean at the same "
    "budget (by this metric), image by image, and its interval likewise; that the best one was "
    "chosen on these images is not taken into account"
)


def bootstrap(values: Float[np.ndarray, "C N"]) -> Float[np.ndarray, "C 2"]:
    """Return the interval of each row's mean, of finite numbers; all rows share the resamples. It
    is NaN for fewer than two images, whose spread is not known."""
    rows, count = values.shape
    if count < 2:
        return np.full((rows, 2), np.nan)
    middle = values.mean(1, keepdims=True)
    random, step, means = np.random.default_rng(SEED), max(1, AT_ONCE // count), []
    for start in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - start)
        drawn = random.integers(0, count, (size, count)) + count * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count)
        # around the mean: exactly 0 for a constant row
        means.append(counts.astype(np.float64) @ (values - middle).T / count)
    tail = (1 - LEVEL) / 2
    return middle + np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0).T


def add(cells: Sequence[dict], per_image: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write the known intervals into `fidelity` of the cells of sweep.json.

    Every cell gets `METRIC_low` and `METRIC_high`. A cell that is not the best of its budget also
    gets `METRIC_difference` with its own `_low` and `_high`, and `best`: {metric: label of the best
    cell}.

    per_image: {cell's `samples`: {metric: float [N]}}; cells may be missing.
    """
    wanted: list[tuple[dict, str, np.ndarray]] = []  # cell, name of the interval, numbers
    for key, metric in METRICS.items():
        found = [(c, per_image.get(c.get("samples"), {}).get(key)) for c in cells]
        known = [(c, metrics.capped({key: v})[key]) for c, v in found if v is not None]
        finite = [(c, v.astype(np.float64)) for c, v in known if np.isfinite(v).all()]
        wanted += [(cell, key, values) for cell, values in finite]
        wanted += _differences(finite, metric)
    if not wanted:
        return
    ends = bootstrap(np.stack([values for *_, values in wanted]))
    for (cell, name, _), (low, high) in zip(wanted, ends.tolist(), strict=True):
        if math.isfinite(low):
            cell["fidelity"] |= {f"{name}_low": low, f"{name}_high": high}


def _differences(
    cells: Sequence[tuple[dict, np.ndarray]], metric: Metric
) -> Iterator[tuple[dict, str, np.ndarray]]:
    """Yield (cell, name, differences image by image) for all cells except each budget's best."""
    sign, name = 1 if metric.better == "higher" else -1, f"{metric.key}_difference"
    for budget in {cell["budget"]: None for cell, _ in cells}:
        rivals = [(cell, values) for cell, values in cells if cell["budget"] == budget]
        best, most = max(rivals, key=lambda rival: sign * rival[1].mean())
        for cell, values in rivals:
            if cell is not best:
                cell["fidelity"][name] = float((values - most).mean())
                cell.setdefault("best", {})[metric.key] = best["label"]
                yield cell, name, values - most
