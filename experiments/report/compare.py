"""A run beside the full cache on the same seeds: a picture of pairs, and a page with a slider."""

import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.evaluation.metrics import METRICS
from experiments.images import save_grid
from experiments.report.template import SMALL_PICTURE, data_uri, template
from varjax.generation.memory import show_bytes
from varjax.storage.atomic import write_text

LEAST_WIDTH, GAP = 128, 32  # pixels of a pair; what part of its width the white beside it is


def write(
    folder: pathlib.Path, full: np.ndarray, ours: np.ndarray, captions: Sequence[str], report: dict
) -> None:
    """Write compare.png and compare.html. full, ours: the first pictures, uint8 [n, H, W, 3].
    captions: of at least these. report: of the run, with its fidelity."""
    close, kv = report["fidelity"], report["kv"]
    policy, most = f"{report['policy']}, {100 * report['budget']:.3g} %", METRICS["psnr"].largest
    psnr = [f"{v:.1f} dB" if v < most else "identical" for v in close["psnr_per_image"]]
    names = [f"{words}: {v}" for words, v, _ in zip(captions, psnr, ours, strict=False)]
    edges = ((0, 0), *[(0, -(-full.shape[2] // GAP))] * 2, (0, 0))
    white = [np.pad(images, edges, constant_values=255) for images in (full, ours)]
    pairs = np.concatenate(white, axis=1)
    pairs = pairs.repeat(factor := -(-LEAST_WIDTH // pairs.shape[2]), 1).repeat(factor, 2)
    save_grid(folder / "compare.png", pairs, names, f"full cache above, {policy} below")
    facts = [
        ("pictures", f"{report['num_images']}, seed {report['seed']}, {report['device']}"),
        ("cache", f"{show_bytes(kv['allocated_bytes'])} of {show_bytes(kv['dense_bytes'])}"),
        *((m.label, m.show(close[key])) for key, m in METRICS.items() if key in close),
    ]
    page = template("compare.html").render(
        title=f"{report['model']}: {policy} against the full cache",
        policy=policy,
        facts=facts,
        full=map(data_uri, full),
        pairs=zip(names, map(data_uri, ours), strict=True),
        small=full.shape[2] < SMALL_PICTURE,
        left_out=report["num_images"] - len(ours),
    )
    write_text(folder / "compare.html", page)
