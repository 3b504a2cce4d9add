"""Features of sets of pictures: which ones each metric needs, and their extraction, which keeps
finished parts."""

from collections.abc import Callable, Iterator

import numpy as np

from experiments.evaluate.inputs import PictureSet
from experiments.output import BatchStore
from experiments.stopping import Stopped
from varjax import metrics
from varjax.errors import UserError
from varjax.evaluation.extractors import Program
from varjax.evaluation.pictures import Pictures
from varjax.evaluation.references import KEYS
from varjax.evaluation.statistics import NEIGHBOURS, Gaussian, Moments
from varjax.parallel.processes import Stop
from varjax.progress import Progress

LEAST_CHUNK = 256  # pictures whose features are in one file
# {distance between sets: the feature that it compares}
DISTANCES = {"fid": "pool", "sfid": "spatial", "demo_frechet": "pool"}
AGREEMENT = "class_agreement"
NEIGHBOURHOODS = ("precision", "recall")
NEEDED = DISTANCES | dict.fromkeys(NEIGHBOURHOODS, "pool") | {"is": "logits", AGREEMENT: "logits"}
BLOCK = 2048  # rows that are added to the moments at a time


def needed(metric: str, is_sample: bool, side: PictureSet) -> str | None:
    """Return the feature of a set that a metric needs; None if there is nothing to extract.

    Raises:
      UserError: this set cannot give the feature.
    """
    if metric in DISTANCES and side.statistics is not None:
        if DISTANCES[metric] not in side.statistics.gaussians:
            key = KEYS[DISTANCES[metric]][0]
            raise UserError(f"`{key}` is needed, which {side.where} does not hold")
        return None
    if metric == AGREEMENT and is_sample and side.labels is None:
        raise UserError(f"the classes asked for (`arr_1`) are needed, {side.where} has none")
    if not is_sample and (metric == "is" or metric == AGREEMENT and side.labels is None):
        return None  # the reference's agreement is for comparison
    if side.pictures is None:
        raise UserError(f"pictures are needed, and {side.where} holds statistics alone")
    least = {"is": 1, AGREEMENT: 1, "precision": NEIGHBOURS + 1, "recall": NEIGHBOURS + 1}
    if side.pictures.count < least.get(metric, 2):
        raise UserError(
            f"at least {least.get(metric, 2)} pictures are needed, {side.where} has"
            f" {side.pictures.count}"
        )
    return NEEDED[metric]


def extract(
    store: BatchStore,
    name: str,
    pictures: Pictures,
    wanted: tuple[str, ...],
    program: Callable[[tuple[int, int]], Program],
    stop: Stop,
) -> None:
    """Compute the features of a set that are missing, as `fill` does. program: gives the extractor
    for pictures of a size (height, width)."""
    if not store.missing(name):
        return
    runs = program(pictures.size)

    def features(spans: list[tuple[int, int]]) -> Iterator[dict[str, np.ndarray]]:
        for found in runs.over((pictures.read(*span),) for span in spans):
            kept = {key: found[key] for key in wanted}
            if not all(np.isfinite(array).all() for array in kept.values()):
                raise UserError(
                    f"features of {pictures.where} are not finite: the network's weights are"
                    " damaged, or not those of this network"
                )
            yield kept

    fill(store, name, runs.batch_size, features, stop)


def fill(
    store: BatchStore,
    name: str,
    step: int,
    compute: Callable[[list[tuple[int, int]]], Iterator[dict[str, np.ndarray]]],
    stop: Stop,
) -> None:
    """Compute the pictures of a series that are missing, and keep every part when it is finished.
    `Stopped` if `stop` was asked after a part that is not the last.

    step: pictures at a time. compute: (spans from a picture to before another) -> arrays of each.
    """
    made, done, missing = store.series[name], store.finished(name), store.missing(name)
    progress = Progress(f"{name}: picture", made.count, first=done, every=2.0)
    progress.note(f"{name}: {done} of {made.count} pictures are done, batches of {step}")
    spans = [
        (index, int(first), min(int(first) + step, int(index[-1]) + 1))
        for index in missing
        for first in index[::step]
    ]
    parts: list[dict] = []
    found = compute([(first, last) for _, first, last in spans])
    for (index, first, last), arrays in zip(spans, found, strict=True):
        parts.append(arrays)
        done += last - first
        if last > index[-1]:
            store.add(name, index, metrics.joined(parts))
            parts = []
            if stop.after_step() and index is not missing[-1]:
                stored = sum(store.finished(each) for each in store.series)
                total = sum(made.count for made in store.series.values())
                raise Stopped(stored, total, "pictures")
        progress.update(done)


def gaussian(store: BatchStore, name: str, feature: str) -> Gaussian:
    """Return the mean and covariance of a stored feature. Rows are added `BLOCK` at a time and the
    rest at the end: so sums do not depend on how many rows a file has, which differs with the
    number of processes."""
    dtype, shape = store.series[name].arrays[feature]
    found, rows = Moments(*shape), np.empty((0, *shape), dtype)
    for _, arrays in store.batches(name):
        rows = np.concatenate([rows, arrays[feature]])
        while len(rows) >= BLOCK:
            found.add(rows[:BLOCK])
            rows = rows[BLOCK:]
    if len(rows):
        found.add(rows)
    return found.gaussian()


def whole(store: BatchStore, name: str, feature: str) -> np.ndarray:
    """Return all rows of a stored feature. At most one file's arrays are in memory beside them."""
    made = store.series[name]
    dtype, shape = made.arrays[feature]
    found = np.empty((made.count, *shape), dtype)
    for index, arrays in store.batches(name):
        found[index] = arrays[feature]
    return found
