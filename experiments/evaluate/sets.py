"""Metrics of a set of samples against a reference set: FID, sFID, Inception score, precision and
recall; the features that each needs, and their extraction, which keeps finished parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.evaluate.inputs import PictureSet
from experiments.evaluation import metrics, references
from experiments.evaluation.extractors import WHERE_INCEPTION, CompiledNetwork, Network
from experiments.evaluation.statistics import (
    NEIGHBOURS,
    Gaussian,
    Moments,
    frechet,
    inception_scores,
    precision_recall,
)
from experiments.output import BatchStore
from experiments.processes import Stop, Stopped
from varjax.core.errors import UserError, about
from varjax.generation.progress import Progress

LEAST_CHUNK = 256  # pictures whose features are in one file
# {distance between sets: the feature that it compares}
DISTANCES = {"fid": "pool", "sfid": "spatial", "demo_frechet": "pool"}
AGREEMENT = "class_agreement"
NEIGHBOURHOODS = ("precision", "recall")
NEEDED = DISTANCES | dict.fromkeys(NEIGHBOURHOODS, "pool") | {"is": "logits", AGREEMENT: "logits"}
BLOCK = 2048  # rows that are added to the moments at a time
ProgramOf = Callable[[Network, tuple[int, int]], CompiledNetwork]  # of a size (height, width)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Samples, a reference set, and what is computed of both.

    sides: the sets "samples" and "reference". network: extractor; None if only files of statistics
    are compared. wanted: {side: features to extract, if any}. notes: how the features are made, as
    files of statistics say it.
    """

    sides: Mapping[str, PictureSet]
    network: Network | None
    metrics: tuple[str, ...]
    wanted: Mapping[str, tuple[str, ...]]
    split_size: int
    notes: Mapping[str, str]
    remarks: tuple[str, ...]


def compare(
    sides: Mapping[str, PictureSet],
    network: Network | None,
    metrics: tuple[str, ...],
    *,
    asked: bool,
    split_size: int,
    protocol: str,
) -> Comparison:
    """Find out what has to be computed. `UserError` if a metric that was asked for cannot be
    computed, or statistics are of another extractor.

    asked: the user named the metrics. If not, metrics that cannot be computed are left out, with a
    remark.
    """
    notes = {"extractor": network.identity["sha256"], "protocol": protocol} if network else {}
    needed: dict[str, dict[str, str | None]] = {}  # {metric: {side: feature}}
    left: dict[str, list[str]] = {}  # {why: metrics}
    for metric in metrics:
        try:
            found = {n: _feature(metric, n == "samples", s) for n, s in sides.items()}
            if any(found.values()) and network is None:
                raise UserError(f"--inception=DIR is needed: {WHERE_INCEPTION}")
            needed[metric] = found
        except UserError as error:
            if asked:
                raise UserError(f"{metric}: {error}") from error
            left.setdefault(str(error), []).append(metric)
    remarks = [f"{', '.join(names)} left out: {why}" for why, names in left.items()]
    if not needed:
        raise UserError("; ".join(f"{', '.join(names)}: {why}" for why, names in left.items()))
    kept = tuple(needed)
    for name, side in sides.items():
        remarks += _check_side(name, side, network, notes, kept)
    if "is" in kept:
        remarks += order_remarks(sides["samples"], split_size)
    each = {name: sorted({found[name] for found in needed.values()} - {None}) for name in sides}
    wanted = {name: tuple(found) for name, found in each.items() if found}
    return Comparison(sides, network, kept, wanted, split_size, notes, tuple(remarks))


def _check_side(
    name: str,
    side: PictureSet,
    network: Network | None,
    notes: Mapping[str, str],
    kept: Sequence[str],
) -> list[str]:
    """Return what a reader must know about a set. `UserError` for statistics of another network,
    pictures that the network does not take, or classes that it does not know."""
    remarks = list(side.pictures.remarks) if side.pictures else []
    if side.pictures and network:
        with about(side.where):
            network.check_size(*side.pictures.size)
            if AGREEMENT in kept and side.labels is not None:
                known, found = network.widths["logits"], (side.labels.min(), side.labels.max())
                if found[0] < 0 or found[1] >= known:
                    raise UserError(
                        f"labels {found[0]} to {found[1]}: the classifier knows 0 to {known - 1}"
                    )
    if side.statistics is not None:
        side.statistics.check(side.where, network.widths if network else {}, notes)
        return remarks + side.statistics.remarks(side.where)
    pooled = [metric for metric in kept if DISTANCES.get(metric) == "pool"]
    if pooled and side.pictures.count <= network.widths["pool"]:
        distance = {"fid": "FID"}.get(pooled[0], "the distance")
        remarks.append(
            f"{name}: {side.pictures.count} pictures are not more than the"
            f" {network.widths['pool']} features: the covariance is singular and {distance} has a"
            f" large bias; never compare {distance} at different counts"
        )
    return remarks


def order_remarks(samples: PictureSet, split_size: int) -> list[str]:
    """Return a remark if the order of the samples spoils the Inception score of blocks."""
    labels, count = samples.labels, samples.pictures.count
    if labels is None or split_size >= count or len(np.unique(labels)) < 2:
        return []
    if (np.diff(labels) < 0).mean() > 0.01:
        return []
    return [
        f"samples lie in the order of their classes, and every block of {split_size} has few of"
        " them: the Inception score is far too low (62 instead of 298 for VAR); shuffle the file,"
        f" or take one block with a split size of {count}"
    ]


def measure(job: Comparison, store: BatchStore) -> tuple[dict, dict[str, Gaussian]]:
    """Return the values by the keys of metrics.json, and what the samples' features are summarised
    by. The store has the features."""
    found: dict = {}
    summaries: dict[str, Gaussian] = {}
    for metric, feature in DISTANCES.items():
        if metric in job.metrics:
            summaries[feature], theirs = (gaussian(job, store, n, feature) for n in job.sides)
            found[metric] = frechet(summaries[feature], theirs)
    if "is" in job.metrics:
        # ADM's splits: consecutive blocks, the last one shorter
        split_of = np.arange(job.sides["samples"].pictures.count) // job.split_size
        logits = (arrays["logits"] for _, arrays in store.batches("samples"))
        scores = inception_scores(logits, split_of)
        found["inception_score"] = float(scores.mean())
        found["inception_score_std"] = float(scores.std())
    for name, side in job.sides.items() if AGREEMENT in job.metrics else ():
        if side.labels is not None:  # part of the pictures taken for the class asked for
            key = AGREEMENT + ("" if name == "samples" else f"_{name}")
            right = whole(job, store, name, "logits").argmax(1) == side.labels
            found[key] = int(right.sum()) / len(right)
    if asked := [metric for metric in NEIGHBOURHOODS if metric in job.metrics]:
        ours, theirs = (whole(job, store, name, "pool") for name in job.sides)
        progress = Progress("precision and recall: row", 2 * (len(ours) + len(theirs)), every=5.0)
        report = lambda rows: progress.update(progress.last[1] + rows)  # noqa: E731
        both = zip(NEIGHBOURHOODS, precision_recall(theirs, ours, report=report), strict=True)
        found |= {metric: value for metric, value in both if metric in asked}
    return found, summaries


# --- features ---


def _feature(metric: str, is_sample: bool, side: PictureSet) -> str | None:
    """Return the feature of a set that a metric needs; None if there is nothing to extract.
    `UserError` if this set cannot give it."""
    if metric in DISTANCES and side.statistics is not None:
        if DISTANCES[metric] not in side.statistics.gaussians:
            key = references.KEYS[DISTANCES[metric]][0]
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


def extract(job: Comparison, name: str, store: BatchStore, program: ProgramOf, stop: Stop) -> None:
    """Compute the features of a set that are missing, as `fill` does."""
    pictures, wanted = job.sides[name].pictures, job.wanted[name]
    runs = program(job.network, pictures.size)

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


def gaussian(job: Comparison, store: BatchStore, name: str, feature: str) -> Gaussian:
    """Return the mean and covariance of a feature: those of a file, or of what is stored. Rows are
    added `BLOCK` at a time and the rest at the end: so sums do not depend on how many rows a file
    has, which differs with the number of processes."""
    if (known := job.sides[name].statistics) is not None:
        return known.gaussians[feature]
    width = job.network.widths[feature]
    found, rows = Moments(width), np.empty((0, width), np.float32)
    for _, arrays in store.batches(name):
        rows = np.concatenate([rows, arrays[feature]])
        while len(rows) >= BLOCK:
            found.add(rows[:BLOCK])
            rows = rows[BLOCK:]
    if len(rows):
        found.add(rows)
    return found.gaussian()


def whole(job: Comparison, store: BatchStore, name: str, feature: str) -> np.ndarray:
    """Return all rows of a stored feature. At most one file's arrays are in memory beside them."""
    found = np.empty((store.series[name].count, job.network.widths[feature]), np.float32)
    for index, arrays in store.batches(name):
        found[index] = arrays[feature]
    return found
