"""What an evaluation leaves, metrics.json and per_image.npz, which appear together, and the table
that it prints."""

from collections.abc import Mapping

import jax
import numpy as np
import scipy

import varjax
from experiments.output import BatchStore
from varjax.io.json_text import json_text
from varjax.storage.atomic import new_folder, write_text

METRICS, PER_IMAGE = "metrics.json", "per_image.npz"
# {key of metrics.json: (what the table calls it, format)}
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


def versions() -> dict[str, str]:
    """Of what computed."""
    packages = {"jax": jax, "numpy": np, "scipy": scipy, "varjax": varjax}
    return {name: package.__version__ for name, package in packages.items()}


def device() -> str:
    found = jax.devices()[0]
    return f"{found.platform}: {found.device_kind}"


def write(store: BatchStore, content: Mapping, per_image: Mapping[str, np.ndarray] | None) -> None:
    """Write the results into the store's folder, and remove what was kept for them."""
    with new_folder(store.out, replaces=store.replaces) as out:
        if per_image is not None:
            np.savez(out / PER_IMAGE, **per_image)
        files = sorted([METRICS, *([PER_IMAGE] if per_image is not None else [])])
        write_text(out / METRICS, json_text({**content, "files": files}))
    store.close()


def table(content: Mapping, out) -> str:
    """Values by name."""
    rows = [
        (words, shown.format(content[k])) for k, (words, shown) in SHOWN.items() if k in content
    ]
    recipe = content["recipe"]
    rows.append(("protocol", recipe["protocol"]["name"]))
    rows.append(("written to", str(out)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {text}" for name, text in rows]
    return "\n".join([*lines, *(f"note: {remark}" for remark in content["remarks"])])
