"""Features of sets of pictures: what each metric needs of each set, and their extraction, whose
finished parts are kept."""

import math
import sys
from collections.abc import Iterator, Mapping

import numpy as np

from experiments.batch_files import Series
from experiments.evaluate.inputs import Set
from experiments.output import BatchStore
from varjax.errors import UserError
from varjax.evaluation.extractors import Network, Program
from varjax.evaluation.pictures import Pictures
from varjax.evaluation.references import KEYS
from varjax.evaluation.statistics import NEIGHBOURS, Gaussian, Moments
from varjax.parallel.split import MeshSpec
from varjax.progress import Progress

LEAST_CHUNK = 256  # pictures of a file of finished features
DISTANCES = {"fid": "pool", "sfid": "spatial"}  # by the features that they compare
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
    network: Network,
    wanted: tuple[str, ...],
    batch_size: int,
    mesh: MeshSpec,
) -> None:
    """Compute what is missing of a set's features and keep every part as it is finished."""
    missing, made = store.missing(name), store.series[name]
    progress = Progress(f"{name}: picture", made.count, first=store.finished(name), every=2.0)
    if not missing:
        return
    if store.finished(name):
        progress.note(f"{name}: {store.finished(name)} of {made.count} pictures are done already")
    program = Program(network, pictures.size, wanted, batch_size, mesh)
    print(f"{name}: batches of {program.batch_size}, compiling", file=sys.stderr, flush=True)
    spans = [
        (start, first, min(first + program.batch_size, last + 1))
        for start in missing
        for last in (int(made.index(start)[-1]),)
        for first in range(start, last + 1, program.batch_size)
    ]
    parts: list[dict] = []
    found = program.over((pictures.read(first, end),) for _, first, end in spans)
    for (start, _, end), arrays in zip(spans, found, strict=True):
        _check(pictures, arrays)
        parts.append(arrays)
        if end == made.index(start)[-1] + 1:
            store.add(name, made.index(start), joined(parts))
            parts = []
        progress.update(store.finished(name) + sum(len(next(iter(p.values()))) for p in parts))


def joined(parts: list[dict]) -> dict[str, np.ndarray]:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _check(pictures: Pictures, arrays: Mapping[str, np.ndarray]) -> None:
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise UserError(
            f"features of {pictures.where} are not finite: the network's weights are"
            " damaged, or not those of this network"
        )


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
