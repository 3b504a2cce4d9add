"""What an evaluation leaves: metrics.json and per_image.npz, which appear together, and the summary
that it prints."""

import pathlib
from collections.abc import Mapping

import numpy as np

from experiments.output import BatchStore
from experiments.summary import aligned
from varjax.io.json_text import json_text
from varjax.storage.atomic import new_folder, write_text

METRICS, PER_IMAGE = "metrics.json", "per_image.npz"
# {key of metrics.json: (name in the summary, format)}
SHOWN = {
    "fid": ("FID", "{:.4f}"),
    "sfid": ("sFID", "{:.4f}"),
    "inception_score": ("Inception score", "{:.4f}"),
    "precision": ("precision", "{:.4f}"),
    "recall": ("recall", "{:.4f}"),
    "demo_frechet": ("Frechet distance of the demo classifier's features", "{:.4f}"),
    "class_agreement": ("class agreement", "{:.1%}"),
    "class_agreement_reference": ("class agreement of the reference", "{:.1%}"),
    "psnr": ("PSNR, identical pictures apart", "{:.2f} dB"),
    "ssim": ("SSIM", "{:.4f}"),
    "lpips": ("LPIPS", "{:.4f}"),
    "token_agreement": ("equal tokens", "{:.1%}"),
    "identical_images": ("identical pictures", "{:d}"),
}


def write(store: BatchStore, content: Mapping, per_image: Mapping[str, np.ndarray] | None) -> None:
    """Write the results into the store's folder and remove the finished batches.

    content: of metrics.json. per_image: arrays of per_image.npz, if pictures were paired."""
    with new_folder(store.out, replaces=store.replaces) as out:
        if per_image is not None:
            np.savez(out / PER_IMAGE, **per_image)
        files = sorted([METRICS, *([PER_IMAGE] if per_image is not None else [])])
        write_text(out / METRICS, json_text({**content, "files": files}))
    store.close()


def summary(content: Mapping, out: pathlib.Path) -> str:
    """Return a line for each value, then the remarks."""
    rows = [
        (words, shown.format(content[k])) for k, (words, shown) in SHOWN.items() if k in content
    ]
    recipe = content["recipe"]
    rows.append(("protocol", recipe["protocol"]["name"]))
    rows.append(("written to", str(out)))
    remarks = [f"note: {remark}" for remark in content["remarks"]]
    return "\n".join([aligned(rows), *remarks])
