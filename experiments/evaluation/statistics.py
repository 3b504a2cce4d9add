"""Statistics of features: Frechet distance, Inception score, improved precision and recall.

Everything is summed in float64 on the host, a block of features at a time. Letters: N pictures, D
features, V classes, S splits.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Integer
from scipy.linalg.lapack import dpstrf
from scipy.special import log_softmax

from varjax.core.errors import UserError

NEIGHBOURS = 3  # k of precision and recall
ROWS, COLUMNS = 1024, 4096  # of a block of distances
# Squared distances below this part of the squared norms are computed again, by differences: what
# is left of them after cancellation is rounding.
CANCELLED = 1e-9
PAIRS = 2**14  # computed again at a time
# Part of the traces that a distance may be below 0: files with float32 lose a tenth of it.
FEW_DIGITS = 1e-6

Features = Float[np.ndarray, "n D"]


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance (N - 1) of features, all that the Frechet distance sees of them.

    count: pictures that they were computed from. None: they were read from a file, which may hold
      fewer digits.
    """

    mean: Float[np.ndarray, " D"]
    covariance: Float[np.ndarray, "D D"]
    count: int | None = None

    @cached_property
    def factor(self) -> Float[np.ndarray, "D r"]:
        """A matrix whose product with its transpose is the covariance; r is its numerical rank."""
        if self.count is not None:  # positive up to rounding: a tenth of the time
            triangle, pivots, rank, _ = dpstrf(self.covariance, lower=1)
            found = np.empty((len(triangle), rank))
            found[pivots - 1] = np.tril(triangle)[:, :rank]
            return found
        values, vectors = np.linalg.eigh(self.covariance)
        kept = values > len(values) * np.finfo(np.float64).eps * max(values[-1], 0)
        return vectors[:, kept] * np.sqrt(values[kept])


class Moments:
    """Mean and covariance of features that come block by block.

    Blocks are joined by the pairwise rule (Chan et al. 1979): sums of squares around the running
    mean, so that an offset of the features costs no digits.
    """

    def __init__(self, dimension: int):
        self.count, self.mean = 0, np.zeros(dimension)
        self.scatter = np.zeros((dimension, dimension))

    def add(self, block: Features) -> None:
        block = np.asarray(block, np.float64)
        mean = block.mean(0)
        centred, shift = block - mean, mean - self.mean
        total = self.count + len(block)
        self.scatter += centred.T @ centred
        self.scatter += np.outer(shift, shift * (self.count * len(block) / total))
        self.mean = self.mean + shift * (len(block) / total)
        self.count = total

    def gaussian(self) -> Gaussian:
        """Mean and covariance of the pictures so far, which are at least two."""
        return Gaussian(self.mean, self.scatter / (self.count - 1), self.count)


def frechet(first: Gaussian, second: Gaussian) -> float:
    """Squared Frechet distance of two normal distributions (Dowson and Landau 1982; FID: Heusel et
    al. 2017): |m1 - m2|^2 + tr S1 + tr S2 - 2 tr sqrt(S1 S2). `UserError` if the distance is
    negative by more than rounding, or the features are different ones.

    With S = F F^T the last trace is the sum of the singular values of F1^T F2. The square root of a
    product of matrices would lose half of the digits where covariances are singular, which they are
    for fewer pictures than features. Nothing is added to their diagonals.

    What rounding leaves of equal distributions is 0.
    """
    if first.mean.shape != second.mean.shape:
        raise UserError(
            f"means of {len(first.mean)} and of {len(second.mean)} features: they were made with"
            " different extractors"
        )
    shift = first.mean - second.mean
    product = first.factor.T @ second.factor
    root = np.linalg.svd(product, compute_uv=False).sum() if product.size else 0.0
    total = shift @ shift + np.trace(first.covariance) + np.trace(second.covariance)
    value = float(total - 2 * root)
    if value < -FEW_DIGITS * total:
        raise UserError(
            f"the Frechet distance is {value:g}, and none is negative: a covariance that was given"
            " has negative eigenvalues, so it is no covariance; make its file again"
        )
    return 0.0 if value < len(shift) * np.finfo(np.float64).eps * total else value


def inception_scores(
    logits: Iterable[Float[np.ndarray, "n V"]], split_of: Integer[np.ndarray, " N"]
) -> Float[np.ndarray, " S"]:
    """exp of the mean KL(p(y|x) || p(y)) of every split (Salimans et al. 2016). logits: block by
    block in the order of the pictures. split_of: the split of every picture."""
    counts, done = np.bincount(split_of)[:, None], 0
    negative_entropy, probability = np.zeros(len(counts)), None
    for block in logits:
        splits = split_of[done : done + len(block)]
        logs = log_softmax(np.asarray(block, np.float64), axis=1)  # finite where softmax is 0
        p = np.exp(logs)
        np.add.at(negative_entropy, splits, (p * logs).sum(1))
        if probability is None:
            probability = np.zeros((len(counts), block.shape[1]))
        np.add.at(probability, splits, p)
        done += len(block)
    mean = probability / counts
    logs = np.log(np.maximum(mean, np.finfo(np.float64).tiny))
    return np.exp(negative_entropy / counts[:, 0] - (mean * logs).sum(1))


def _blocks(
    features: Features, centre: Float[np.ndarray, " D"], rows: int
) -> Iterator[tuple[slice, Float[np.ndarray, "n D"]]]:
    """Features in float64, so many rows at a time. `centre` is subtracted from all of them, which
    changes no distance and saves digits."""
    for start in range(0, len(features), rows):
        part = slice(start, min(start + rows, len(features)))
        yield part, np.asarray(features[part], np.float64) - centre


def squared_distances(a: Features, b: Float[np.ndarray, "m D"]) -> Float[np.ndarray, "n m"]:
    """Squared distances between all rows of a and of b, in float64; exactly 0 for equal rows."""
    norms = (a * a).sum(1)[:, None] + (b * b).sum(1)
    found = norms - 2 * (a @ b.T)
    rows, columns = np.nonzero(found < CANCELLED * norms)
    for start in range(0, len(rows), PAIRS):
        i, j = rows[start : start + PAIRS], columns[start : start + PAIRS]
        found[i, j] = ((a[i] - b[j]) ** 2).sum(1)
    found[norms == 0] = 0
    return found


def squared_radii(
    features: Features,
    centre: Float[np.ndarray, " D"],
    k: int = NEIGHBOURS,
    report: Callable[[int], None] = lambda rows: None,
) -> np.ndarray:
    """float64 [N]: squared distance of every point to its k-th neighbour. The point itself is not
    counted; there are at least k others."""
    radii = np.empty(len(features))
    for part, rows in _blocks(features, centre, ROWS):
        nearest = np.empty((len(rows), 0))
        for _, columns in _blocks(features, centre, COLUMNS):
            found = np.concatenate([nearest, squared_distances(rows, columns)], axis=1)
            nearest = np.partition(found, k, axis=1)[:, : k + 1] if found.shape[1] > k else found
        radii[part] = nearest.max(1)  # the point itself is one of these, at distance 0
        report(len(rows))
    return radii


def covered(
    features: Features,
    balls: Float[np.ndarray, "m D"],
    radii: np.ndarray,
    centre: Float[np.ndarray, " D"],
    report: Callable[[int], None],
) -> Bool[np.ndarray, " N"]:
    """Whether every point lies in some ball. radii: squared, float64 [m]."""
    found = np.zeros(len(features), bool)
    for part, rows in _blocks(features, centre, ROWS):
        for columns, block in _blocks(balls, centre, COLUMNS):
            found[part] |= (squared_distances(rows, block) <= radii[columns]).any(1)
        report(len(rows))
    return found


def precision_recall(
    reference: Features,
    samples: Float[np.ndarray, "m D"],
    k: int = NEIGHBOURS,
    report: Callable[[int], None] = lambda rows: None,
) -> tuple[float, float]:
    """Improved precision (part of the samples that lie among the reference) and recall (part of the
    reference that lies among the samples; Kynkaanniemi et al. 2019), in float64 and block by block:
    the whole matrix of distances never exists.

    report: called with a number of rows that have been compared, each row in two passes.
    """
    centre = np.asarray(reference[: min(len(reference), ROWS)], np.float64).mean(0)
    their_radii = squared_radii(reference, centre, k, report)
    our_radii = squared_radii(samples, centre, k, report)
    precision = covered(samples, reference, their_radii, centre, report)
    recall = covered(reference, samples, our_radii, centre, report)
    return float(precision.mean()), float(recall.mean())
