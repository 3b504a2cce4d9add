"""Metrics of a set of samples against a reference set: FID, sFID, Inception score, precision and
recall."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from experiments.evaluate import features
from experiments.evaluate.inputs import Set
from experiments.output import BatchStore
from varjax.errors import UserError
from varjax.evaluation import references
from varjax.evaluation.extractors import WHERE_INCEPTION, Network
from varjax.evaluation.statistics import (
    Gaussian,
    InceptionScore,
    blocks_of,
    frechet,
    precision_recall,
)
from varjax.progress import Progress

KEYS = {"is": "inception_score"}  # of metrics.json, where they are not the metric's name


@dataclass(frozen=True, eq=False)
class Comparison:
    """wanted: {"samples" or "reference": features to extract of it}. network: None where files of
    statistics are compared, which takes none. notes: what such files say of their making."""

    samples: Set
    reference: Set
    network: Network | None
    metrics: tuple[str, ...]
    wanted: Mapping[str, tuple[str, ...]]
    split_size: int
    notes: Mapping[str, str]
    remarks: tuple[str, ...]

    @property
    def sides(self) -> dict[str, Set]:
        return {"samples": self.samples, "reference": self.reference}


def compare(
    samples: Set,
    reference: Set,
    network: Network | None,
    metrics: tuple[str, ...],
    *,
    asked: bool,
    split_size: int,
    protocol: str,
) -> Comparison:
    """Find out what has to be computed. asked: whether the user named the metrics; otherwise those
    that cannot be computed are left out, with a remark.

    Raises:
      UserError: a metric that was asked for cannot be computed, or statistics are of another
        extractor.
    """
    sides = {"samples": samples, "reference": reference}
    notes = {"extractor": network.identity["sha256"], "protocol": protocol} if network else {}
    kept, wanted = [], {name: set() for name in sides}
    left: dict[str, list[str]] = {}  # {why: metrics}
    for metric in metrics:
        try:
            found = {n: features.needed(metric, n == "samples", s) for n, s in sides.items()}
            if any(found.values()) and network is None:
                raise UserError(f"--inception=DIR is needed: {WHERE_INCEPTION}")
        except UserError as error:
            if asked:
                raise UserError(f"{metric}: {error}") from error
            left.setdefault(str(error), []).append(metric)
            continue
        kept.append(metric)
        for name, feature in found.items():
            wanted[name] |= {feature} - {None}
    remarks = [f"{', '.join(names)} left out: {why}" for why, names in left.items()]
    if not kept:
        raise UserError("; ".join(f"{', '.join(names)}: {why}" for why, names in left.items()))
    for name, side in sides.items():
        remarks += _side_remarks(name, side, network, notes, kept)
    _check_dimensions(samples, reference)
    if "is" in kept:
        remarks += order_remarks(samples, split_size)
    ordered = {name: tuple(sorted(found)) for name, found in wanted.items()}
    return Comparison(
        samples, reference, network, tuple(kept), ordered, split_size, notes, tuple(remarks)
    )


def _side_remarks(name: str, side: Set, network: Network | None, notes, kept) -> list[str]:
    """What a reader has to know of a set. `UserError`: statistics of another extractor."""
    if side.statistics is not None:
        side.statistics.check(side.where, network.widths if network else {}, notes)
        return side.statistics.remarks(side.where)
    if "fid" in kept and side.pictures.count <= network.widths["pool"]:
        return [
            f"{name}: {side.pictures.count} pictures are not more than the"
            f" {network.widths['pool']} features: the covariance is singular and FID has a"
            " large bias; never compare FID at different counts"
        ]
    return []


def _check_dimensions(samples: Set, reference: Set) -> None:
    """`UserError` if two files of statistics are of different features."""
    if samples.statistics is None or reference.statistics is None:
        return
    theirs = reference.statistics.gaussians
    for name, gaussian in samples.statistics.gaussians.items():
        if name in theirs and len(theirs[name].mean) != len(gaussian.mean):
            raise UserError(
                f"{samples.where} has means of {len(gaussian.mean)} features, {reference.where} of"
                f" {len(theirs[name].mean)}: they were made with different extractors"
            )


def order_remarks(samples: Set, split_size: int) -> list[str]:
    """What to know of the order of samples, on which the Inception score of blocks depends."""
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
    """Values by the keys of metrics.json. Features are in the store."""
    found: dict = {}
    for metric in job.metrics:
        if metric in features.DISTANCES:
            feature = features.DISTANCES[metric]
            found[metric] = frechet(*(_gaussian(job, store, n, feature) for n in job.sides))
    if "is" in job.metrics:
        score = InceptionScore(blocks_of(job.samples.pictures.count, job.split_size))
        for _, arrays in store.batches("samples"):
            score.add(arrays["logits"])
        scores = score.scores()
        found[KEYS["is"]] = float(scores.mean())
        found[f"{KEYS['is']}_std"] = float(scores.std())
    asked = [metric for metric in features.NEIGHBOURHOODS if metric in job.metrics]
    if asked:
        ours, theirs = (features.whole(store, name, "pool") for name in job.sides)
        progress = Progress("precision and recall: row", 2 * (len(ours) + len(theirs)), every=5.0)
        result = precision_recall(theirs, ours, report=progress.update)
        found |= {metric: getattr(result, metric) for metric in asked}
    return found


def _gaussian(job: Comparison, store: BatchStore, name: str, feature: str) -> Gaussian:
    side = job.sides[name]
    if side.statistics is not None:
        return side.statistics.gaussians[feature]
    return features.gaussian(store, name, feature)


def save_statistics(path, job: Comparison, store: BatchStore) -> None:
    """Write mean and covariances of the samples, as a reference for later."""
    names = [f for m, f in features.DISTANCES.items() if m in job.metrics]
    found = {feature: _gaussian(job, store, "samples", feature) for feature in names}
    references.write(path, found, job.notes)
