"""How close images drawn with a policy are to those of the full cache on the same seeds."""

from collections.abc import Iterable, Mapping

import numpy as np

from varjax.metrics.registry import METRICS


def per_image(
    full: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """{metric: float [N]} of every metric whose arrays both results hold (`Metric.needs`)."""
    return {
        key: np.asarray(metric.compare(full[metric.needs], other[metric.needs]))
        for key, metric in METRICS.items()
        if metric.per_image and metric.needs in full and metric.needs in other
    }


def joined(batches: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Per-image numbers of all batches."""
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def capped(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Per-image numbers, none above what its metric counts as the largest."""
    return {key: np.minimum(values, METRICS[key].largest) for key, values in arrays.items()}


def summarize(arrays: Mapping[str, np.ndarray]) -> dict:
    """Means over images, standard deviations as `*_std`, and how many images are identical."""
    identical = int(np.isinf(arrays["psnr"]).sum())
    arrays = capped(arrays)
    found: dict = {key: float(values.mean()) for key, values in arrays.items()}
    found |= {f"{key}_std": float(values.std()) for key, values in arrays.items()}
    return found | {"identical_images": identical}
