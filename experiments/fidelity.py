"""How close images drawn with a policy are to those of the full cache on the same seeds."""

from collections.abc import Iterable

import numpy as np

from varjax.metrics import pixel

HIGHEST_PSNR = 100.0  # dB: identical images have an infinite PSNR, which means and JSON cannot hold


def per_image(mine: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{metric: float [N]} of two results: `images` float [N, H, W, 3] and `tokens` [N, ...]."""
    equal = mine["tokens"] == other["tokens"]
    return {
        "psnr": pixel.psnr(mine["images"], other["images"]),
        "ssim": pixel.ssim(mine["images"], other["images"]),
        "token_agreement": equal.reshape(len(equal), -1).mean(1),
    }


def joined(batches: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Per-image numbers of all batches."""
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def summarize(arrays: dict[str, np.ndarray]) -> dict:
    """Means over images, standard deviations as `*_std`; PSNR at most `HIGHEST_PSNR` each, which
    identical images have; those are also counted."""
    identical = int(np.isinf(arrays["psnr"]).sum())
    arrays = arrays | {"psnr": np.minimum(arrays["psnr"], HIGHEST_PSNR)}
    found: dict = {name: float(values.mean()) for name, values in arrays.items()}
    found |= {f"{name}_std": float(values.std()) for name, values in arrays.items()}
    return found | {"identical_images": identical}
