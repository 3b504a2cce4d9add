"""The files of a finished run: pictures, arrays, report.json. They appear all at once.

Batches are read one after the other, so that large sets of pictures need little memory.
"""

import pathlib
import sys

import numpy as np

from experiments.prompts.condition import Text
from experiments.prompts.layouts import write_images
from experiments.run import report as run_report
from experiments.run.batch_store import BatchStore
from experiments.run.run import Run
from varjax import metrics
from varjax.errors import MissingExtra
from varjax.generator import Generator
from varjax.io import images
from varjax.io.json_text import json_text
from varjax.storage.atomic import new_folder

PIXELS = "pixels.npy"  # in the work folder, while results are written
GRID_PIXELS = 2**26  # of the images in grid.png, which shows no more of them


def kept(run: Run, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is stored of a batch: images as bytes unless exact ones are asked for."""
    if run.save_arrays:
        names = ("images", "tokens", "code_map", "logits")
        return {name: results[name] for name in names if name in results}
    exact = results["images"] if run.compare else images.to_uint8(results["images"])
    return {"images": exact, "tokens": results["tokens"]}


def finish(run: Run, store: BatchStore, generator: Generator) -> dict:
    """Write all results into the final folder and return the report."""
    close = _fidelity(store) if run.compare else None
    report = run_report.build(run, generator, close, resumed=store.resumed)
    with new_folder(store.out, overwrite=store.overwrite) as out:
        _write_pictures(out, run, _pixels(store))
        if run.save_arrays:
            _write_arrays(out, run, store.collect("main"))
        (out / "report.json").write_text(json_text(report), encoding="utf-8")
    store.close()
    return report


def _fidelity(store: BatchStore) -> dict:
    pairs = zip(store.batches("main"), store.batches("full"), strict=True)
    found = metrics.joined(metrics.per_image(full, mine) for (_, mine), (_, full) in pairs)
    return run_report.closeness(found)


def _pixels(store: BatchStore) -> np.ndarray:
    """uint8 [N, H, W, 3]: all images, on disk: large sets do not fit into memory."""
    pixels, total = None, store.finished("main")
    for index, results in store.batches("main"):
        some = results["images"]
        some = some if some.dtype == np.uint8 else images.to_uint8(some)
        if pixels is None:
            file, shape = store.work / PIXELS, (total, *some.shape[1:])
            pixels = np.lib.format.open_memmap(file, "w+", np.uint8, shape)
        pixels[index] = some
    return pixels


def _write_pictures(out: pathlib.Path, run: Run, pixels: np.ndarray) -> None:
    condition = run.condition
    images.save_samples_npz(out / "samples.npz", pixels, condition.numbers)
    shown = max(1, GRID_PIXELS // (pixels.shape[1] * pixels.shape[2]))
    captions = condition.captions and condition.captions[:shown]
    try:
        images.save_grid(out / "grid.png", pixels[:shown], labels=captions)
        if isinstance(condition, Text):
            write_images(out, condition.prompts, pixels, condition.each, seed=run.seed)
    except MissingExtra as error:
        print(f"no picture files are written: {error}", file=sys.stderr, flush=True)


def _write_arrays(out: pathlib.Path, run: Run, arrays: dict[str, np.ndarray]) -> None:
    transformer = run.model.transformer
    np.savez(
        out / "arrays.npz",
        **{transformer.token_name: transformer.tokens_to_file(arrays["tokens"])},
        code_map=np.moveaxis(arrays["code_map"], -1, 1),
        images=np.moveaxis(arrays["images"], -1, 1),
        logits=arrays["logits"],
    )
