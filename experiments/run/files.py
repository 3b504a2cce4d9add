"""Files of a finished run, written from its batches: pictures, arrays and report.json appear all at
once. What they hold besides the batches is a `Shown`, which parts of a run carry
(`experiments.parts`), so that joining them needs neither model nor flags.

Batches are read one after the other, so that large sets of pictures need little memory.
"""

import contextlib
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from experiments import images
from experiments.batch_files import PIXELS
from experiments.evaluation import metrics
from experiments.json_text import json_text
from experiments.output import BatchStore
from experiments.prompts.layouts import write_images
from experiments.prompts.sets import Prompt, PromptFormat, PromptSet
from varjax.generation import kept
from varjax.storage.atomic import new_folder, write_text
from varjax.storage.pictures import save_png, to_uint8
from varjax.storage.values import MissingExtra, require

SHUFFLED_FROM, SHUFFLE_SEED = 1000, 2020  # sets of so many pictures are shuffled in samples.npz
GRID_PIXELS = 2**26  # pixels of all images in grid.png, which leaves out the rest
MOST_PAIRS, PAIRED_PIXELS = 64, 2**23  # with --compare: so many pairs, and pixels of one cache


@dataclass(frozen=True, eq=False, kw_only=True)
class Shown:
    """Contents of a run's files besides its batches.

    numbers: int32 [N], labels or numbers of prompts. captions: of images in grid.png.
    prompts: that the images are of, `each` images of each; None: they are of classes.
    arrays: names of those in arrays.npz; None: the file is not wanted.
    kept: layout of what heads kept (`varjax.generation.kept`); None: it is not wanted.
    """

    numbers: np.ndarray
    captions: Sequence[str] | None
    prompts: PromptSet | None
    each: int
    seed: int
    arrays: Sequence[str] | None
    kept: dict | None = None

    @classmethod
    def from_json(cls, content: dict) -> "Shown":
        """Read what a part says: the fields, `numbers` as a list."""
        found = {**content, "numbers": np.array(content["numbers"], np.int32)}
        if prompts := content["prompts"]:
            texts = tuple(Prompt(**prompt) for prompt in prompts["prompts"])
            kind = PromptFormat(prompts["kind"])
            found["prompts"] = PromptSet(texts, kind, prompts["images_per_prompt"])
        return cls(**found)


def write_run(store: BatchStore, shown: Shown, report: dict) -> None:
    """Write all results into the final folder, and name them in the report."""
    with _pixels(store) as pixels, new_folder(store.out, replaces=store.replaces) as out:
        write_pictures(out, shown, pixels)
        if "full" in store.series:
            write_compared(out, shown, pixels, store, report)
        names = [*(shown.arrays or ()), *["keep"] * (shown.kept is not None)]
        if names:
            parts = ({name: found[name] for name in names} for _, found in store.batches("main"))
            held = metrics.joined(parts)
        if shown.kept is not None:
            write_kept(out, held["keep"], shown.kept, np.asarray(pixels[0]))
        if shown.arrays is not None:
            for name in ("code_map", "images"):  # as documented, channels first
                held[name] = np.moveaxis(held[name], -1, 1)
            np.savez(out / "arrays.npz", **{name: held[name] for name in shown.arrays})
        made = {path.name for path in out.iterdir() if path.is_file()}  # images: in the manifest
        report["files"] = sorted({*made, "report.json"})
        write_text(out / "report.json", json_text(report))
    store.close()


def write_kept(out: pathlib.Path, keep: np.ndarray, layout: dict, image: np.ndarray) -> None:
    """Write kept.npz, and kept.png of the first image. keep: bool [N, K, layers, heads, L]."""
    np.savez_compressed(out / "kept.npz", keep=keep, drawn=np.array(layout["drawn"]))
    with contextlib.suppress(MissingExtra):
        save_png(out / "kept.png", kept.picture(keep[0], image, **layout))


@contextlib.contextmanager
def _pixels(store: BatchStore) -> Iterator[np.ndarray]:
    """Give all images as uint8 [N, H, W, 3] that stays on disk, since large sets do not fit into
    memory. They are written in order: with a memory map, a full disk would kill the process."""
    path, count = store.work.path / PIXELS, store.series["main"].count
    try:
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:  # follows no link
            for index, results in store.batches("main"):
                some = results["images"]
                some = some if some.dtype == np.uint8 else to_uint8(some)
                if not index[0]:
                    shape = (count, *some.shape[1:])
                    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                file.write(np.ascontiguousarray(some).data)
        yield np.load(path, mmap_mode="r")
    finally:
        path.unlink(missing_ok=True)


def write_pictures(out: pathlib.Path, shown: Shown, pixels: np.ndarray) -> None:
    """Write samples.npz, grid.png and, of prompts, images/. pixels: uint8 [N, H, W, 3]."""
    order, count = None, len(pixels)
    if shown.prompts is None and count >= SHUFFLED_FROM:
        # ADM's Inception score takes consecutive blocks, and is too low if a block has few classes
        order = np.random.RandomState(SHUFFLE_SEED).permutation(count)
    images.save_samples_npz(out / "samples.npz", pixels, shown.numbers, order)
    some = max(1, GRID_PIXELS // pixels[0, :, :, 0].size)
    try:
        images.save_grid(out / "grid.png", pixels[:some], labels=shown.captions)
        if shown.prompts is not None:
            write_images(out, shown.prompts, pixels, shown.each, seed=shown.seed)
    except MissingExtra as error:
        print(f"no picture files are written: {error}", file=sys.stderr, flush=True)


def write_compared(
    out: pathlib.Path, shown: Shown, pixels: np.ndarray, store: BatchStore, report: dict
) -> None:
    """Write the first pictures beside those of the full cache. pixels: uint8 [N, H, W, 3]."""
    count = max(1, min(MOST_PAIRS, PAIRED_PIXELS // pixels[0, :, :, 0].size))
    first = itertools.takewhile(lambda batch: batch[0][0] < count, store.batches("full"))
    full = np.concatenate([to_uint8(arrays["images"]) for _, arrays in first])[:count]
    captions = shown.captions or [f"class {number}" for number in shown.numbers]
    try:
        for package in ("PIL.Image", "jinja2"):
            require(package, extra="eval", purpose="compare.png and compare.html")
        from experiments.report import compare  # which imports them

        compare.write(out, full, pixels[:count], captions, report)
    except MissingExtra as error:
        print(f"no pairs are written: {error}", file=sys.stderr, flush=True)
