"""Runs without a model: a `BatchStore` whose batches are drawn by arithmetic."""

import pathlib

import numpy as np

from experiments.batch_files import Series
from experiments.evaluation.metrics import joined
from experiments.output import BatchStore
from varjax.storage.atomic import new_folder

SETTINGS = {"seed": 0}
COUNT, BATCH = 5, 2
TOKENS = np.dtype(np.int32), (3,)
ARRAYS = {
    "main": {"images": (np.dtype(np.uint8), (2, 2, 3)), "tokens": TOKENS},
    "full": {"images": (np.dtype(np.float32), (2, 2, 3)), "tokens": TOKENS},
}
SERIES = dict.fromkeys(ARRAYS, Series(COUNT, BATCH))


STARTS = range(0, COUNT, BATCH)  # first images of all batches


def index(start: int) -> np.ndarray:
    """Numbers of the images in the batch that begins with image `start`."""
    return np.arange(start, min(start + BATCH, COUNT))


def store(out: pathlib.Path, settings=None, **options) -> BatchStore:
    settings = SETTINGS if settings is None else settings
    return BatchStore(out, settings, series=SERIES, **{"overwrite": False, **options})


def batch(series: str, index: np.ndarray) -> dict[str, np.ndarray]:
    """What is drawn for these images: decided by their numbers."""
    kinds = ARRAYS[series]
    values = {name: np.arange(index[0], index[0] + len(index)) * 7 + 1 for name in kinds}
    return {
        name: np.broadcast_to(
            values[name].reshape(-1, *(1,) * len(shape)), (len(index), *shape)
        ).astype(dtype)
        for name, (dtype, shape) in kinds.items()
    }


def draw(of: BatchStore, most: int | None = None) -> list[tuple[str, int]]:
    """Draw what is missing, at most so many batches; which they were."""
    missing = [(name, index) for name in SERIES for index in of.missing(name)][:most]
    for name, index in missing:
        of.add(name, index, batch(name, index))
    return [(name, int(index[0])) for name, index in missing]


def interrupted(out: pathlib.Path, batches: int | None = None, settings=None) -> pathlib.Path:
    """The work folder of a run that stopped after so many batches (None: after the last)."""
    unfinished = store(out, settings)
    with unfinished.working():
        draw(unfinished, batches)
    return unfinished.work.path


def finish(of: BatchStore) -> tuple[list, dict[str, dict[str, np.ndarray]]]:
    """(what was drawn, all arrays by series); the folder then is there."""
    with of.working():
        drawn = draw(of)
        found = {name: joined(arrays for _, arrays in of.batches(name)) for name in SERIES}
        with new_folder(of.out, replaces=of.replaces) as folder:
            (folder / "report.json").write_text('{"policy": "x", "kv": {}, "versions": {}}')
        of.close()
    return drawn, found


def expected() -> dict[str, dict[str, np.ndarray]]:
    """What `finish` gives of an undisturbed run."""
    return {
        name: {key: np.concatenate([batch(name, index(x))[key] for x in STARTS]) for key in kinds}
        for name, kinds in ARRAYS.items()
    }


def tree(folder: pathlib.Path) -> dict[str, bytes | str]:
    """All that is below a folder: bytes of files, targets of links."""
    return {
        str(path.relative_to(folder)): "-> " + str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }
