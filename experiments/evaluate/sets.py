"""Metrics of a set of samples against a reference set: FID, sFID, Inception score, precision and
recall."""

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.evaluate import features
from experiments.evaluate.inputs import PictureSet
from experiments.output import BatchStore
from varjax.errors import UserError, about
from varjax.evaluation import references
from varjax.evaluation.extractors import WHERE_INCEPTION, Network
from varjax.evaluation.statistics import (
    Gaussian,
    InceptionScore,
    frechet,
    precision_recall,
)
from varjax.progress import Progress

KEYS = {"is": "inception_score"}  # {metric: its key in metrics.json, where that differs}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Samples, a reference set, and what is computed of both.

    sides: the sets "samples" and "reference". network: extractor; None if only files of statistics
    are compared. wanted: {side: features to extract}. notes: how the features are made, as
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
    """Find out what has to be computed.

    asked: the user named the metrics. If not, metrics that cannot be computed are left out, with a
    remark.

    Raises:
      UserError: a metric that was asked for cannot be computed, or statistics are of another
        extractor.
    """
    notes = {"extractor": network.identity["sha256"], "protocol": protocol} if network else {}
    needed: dict[str, dict[str, str | None]] = {}  # {metric: {side: feature}}
    left: dict[str, list[str]] = {}  # {why: metrics}
    for metric in metrics:
        try:
            found = {n: features.needed(metric, n == "samples", s) for n, s in sides.items()}
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
    wanted = {
        name: tuple(sorted({found[name] for found in needed.values()} - {None})) for name in sides
    }
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
            if features.AGREEMENT in kept and side.labels is not None:
                known, found = network.widths["logits"], (side.labels.min(), side.labels.max())
                if found[0] < 0 or found[1] >= known:
                    raise UserError(
                        f"labels {found[0]} to {found[1]}: the classifier knows 0 to {known - 1}"
                    )
    if side.statistics is not None:
        side.statistics.check(side.where, network.widths if network else {}, notes)
        return remarks + side.statistics.remarks(side.where)
    pooled = [metric for metric in kept if features.DISTANCES.get(metric) == "pool"]
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


def measure(job: Comparison, store: BatchStore) -> dict:
    """Return the values by the keys of metrics.json. The store has the features."""
    found: dict = {}
    for metric, feature in features.DISTANCES.items():
        if metric in job.metrics:
            found[metric] = frechet(*(_gaussian(job, store, name, feature) for name in job.sides))
    if "is" in job.metrics:
        # ADM's splits: consecutive blocks, the last one shorter
        score = InceptionScore(np.arange(job.sides["samples"].pictures.count) // job.split_size)
        for _, arrays in store.batches("samples"):
            score.add(arrays["logits"])
        scores = score.scores()
        found[KEYS["is"]] = float(scores.mean())
        found[f"{KEYS['is']}_std"] = float(scores.std())
    for name, side in job.sides.items() if features.AGREEMENT in job.metrics else ():
        if side.labels is not None:  # part of the pictures taken for the class asked for
            key = features.AGREEMENT + ("" if name == "samples" else f"_{name}")
            right = features.whole(store, name, "logits").argmax(1) == side.labels
            found[key] = int(right.sum()) / len(right)
    if asked := [metric for metric in features.NEIGHBOURHOODS if metric in job.metrics]:
        ours, theirs = (features.whole(store, name, "pool") for name in job.sides)
        progress = Progress("precision and recall: row", 2 * (len(ours) + len(theirs)), every=5.0)
        report = lambda rows: progress.update(progress.last[1] + rows)  # noqa: E731
        result = precision_recall(theirs, ours, report=report)
        found |= {metric: getattr(result, metric) for metric in asked}
    return found


def _gaussian(job: Comparison, store: BatchStore, name: str, feature: str) -> Gaussian:
    side = job.sides[name]
    if side.statistics is not None:
        return side.statistics.gaussians[feature]
    return features.gaussian(store, name, feature)


def save_statistics(path: pathlib.Path, job: Comparison, store: BatchStore) -> None:
    """Write means and covariances of the samples to a file, which can be a reference later."""
    names = [f for m, f in features.DISTANCES.items() if m in job.metrics]
    found = {feature: _gaussian(job, store, "samples", feature) for feature in names}
    references.write(path, found, job.notes)
