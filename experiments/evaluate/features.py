"""Features of sets of pictures: what each metric needs of each set, and their extraction, whose
finished parts are kept."""

import math
from collections.abc import Callable, Iterator

import numpy as np

from experiments.batch_files import Series
from experiments.evaluate.inputs import Set
from experiments.output import BatchStore
from varjax.errors import UserError
from varjax.evaluation.extractors import Network, Program
from varjax.evaluation.pictures import Pictures
from varjax.evaluation.references import KEYS
from varjax.evaluation.statistics import NEIGHBOURS, Gaussian, Moments
from varjax.progress import Progress

LEAST_CHUNK = 256  # pictures of a file of finished features
# of distances, the features that they compare
DISTANCES = {"fid": "pool", "sfid": "spatial", "demo_frechet": "pool"}
AGREEMENT = "class_agreement"
NEIGHBOURHOODS = ("precision", "recall")
BLOCK = 2048  # rows that moments take at a time


def needed(metric: str, is_sample: bool, of: Set) -> str | None:
    """The feature that has to be extracted of a set for a metric; None: nothing.

    Raises:
      UserError: it cannot be had of this set.
    """
    if metric in DISTANCES and of.statistics is not None:
        if DISTANCES[metric] not in of.statistics.gaussians:
            key = KEYS[DISTANCES[metric]][0]
            raise UserError(f"`{key}` is needed, which {of.where} does not hold")
        return None
    feature = DISTANCES.get(metric)
    if metric in NEIGHBOURHOODS:
        feature = "pool"
    if metric == "is":
        feature = "logits" if is_sample else None
    if metric == AGREEMENT:
        if is_sample and of.labels is None:
            raise UserError(f"the classes asked for (`arr_1`) are needed, {of.where} has none")
        return "logits" if of.labels is not None else None  # of a reference: for comparison
    if feature and of.pictures is None:
        raise UserError(f"pictures are needed, and {of.where} holds statistics alone")
    least = NEIGHBOURS + 1 if metric in NEIGHBOURHOODS else 2
    if feature and metric != "is" and of.pictures.count < least:
        raise UserError(f"at least {least} pictures are needed, {of.where} has {of.pictures.count}")
    return feature


def chunk(batch_size: int) -> int:
    """Pictures of a file of finished features: whole batches."""
    return batch_size * math.ceil(LEAST_CHUNK / batch_size)


def series(pictures: Pictures, network: Network, wanted: tuple[str, ...], size: int) -> Series:
    """The files of a set's features."""
    floats = np.dtype(np.float32)
    return Series(pictures.count, size, {n: (floats, (network.widths[n],)) for n in wanted})


def extract(
    store: BatchStore,
    name: str,
    pictures: Pictures,
    wanted: tuple[str, ...],
    program: Callable[[tuple[int, int]], Program],
) -> None:
    """Compute what is missing of a set's features and keep every part as it is finished. program:
    of pictures of a size."""
    missing, made, done = store.missing(name), store.series[name], store.finished(name)
    if not missing:
        return
    progress = Progress(f"{name}: picture", made.count, first=done, every=2.0)
    if done:
        progress.note(f"{name}: {done} of {made.count} pictures are done already")
    runs = program(pictures.size)
    progress.note(f"{name}: batches of {runs.batch_size}")
    ends = {start: int(made.index(start)[-1]) + 1 for start in missing}
    spans = [
        (start, first, min(first + runs.batch_size, end))
        for start, end in ends.items()
        for first in range(start, end, runs.batch_size)
    ]
    parts: list[dict] = []
    found = runs.over((pictures.read(first, last),) for _, first, last in spans)
    for (start, _, last), arrays in zip(spans, found, strict=True):
        parts.append(_checked(pictures, {key: arrays[key] for key in wanted}))
        done += len(parts[-1][wanted[0]])
        if last == ends[start]:
            store.add(name, made.index(start), joined(parts))
            parts = []
        progress.update(done)


def joined(parts: list[dict]) -> dict[str, np.ndarray]:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _checked(pictures: Pictures, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise UserError(
            f"features of {pictures.where} are not finite: the network's weights are"
            " damaged, or not those of this network"
        )
    return arrays


def gaussian(store: BatchStore, name: str, feature: str) -> Gaussian:
    """Mean and covariance of a stored feature."""
    found: Moments | None = None
    for block in _blocks(store, name, feature):
        found = found or Moments(block.shape[1])
        found.add(block)
    return found.gaussian()


def _blocks(store: BatchStore, name: str, feature: str) -> Iterator[np.ndarray]:
    """Rows of a stored feature, `BLOCK` or a little more at a time."""
    rows: list[np.ndarray] = []
    for _, arrays in store.batches(name):
        rows.append(arrays[feature])
        if sum(map(len, rows)) >= BLOCK:
            yield np.concatenate(rows)
            rows = []
    if rows:
        yield np.concatenate(rows)


def whole(store: BatchStore, name: str, feature: str) -> np.ndarray:
    """All rows of a stored feature; its file's arrays are never there twice."""
    made = store.series[name]
    dtype, shape = made.arrays[feature]
    found = np.empty((made.count, *shape), dtype)
    for index, arrays in store.batches(name):
        found[index] = arrays[feature]
    return found
