"""Statistics of features in files, as the published evaluators keep them.

| key | shape | |
| --- | --- | --- |
| `mu`, `sigma` | [D], [D, D] | of FID |
| `mu_s`, `sigma_s` | [2023], [2023, 2023] | of sFID (ADM's files) |
| `extractor`, `protocol` | texts | in files that varjax wrote: what they were computed with |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.evaluation.statistics import Gaussian
from varjax.core.errors import UserError, some
from varjax.storage import npz
from varjax.storage.atomic import new_file

KEYS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}
NOTES = ("extractor", "protocol")
LARGEST = 2**28  # bytes of an array: 5,792 features


@dataclass(frozen=True)
class Statistics:
    """The content of such a file.

    gaussians: by the name of the features that they summarise, a key of `KEYS`.
    notes: what the file says about how it was made.
    """

    gaussians: Mapping[str, Gaussian]
    notes: Mapping[str, str]

    def check(self, where, dimensions: Mapping[str, int], notes: Mapping[str, str]) -> None:
        """`UserError` unless the statistics fit the features of an extractor.

        where: the file, for messages. dimensions: how many numbers each feature has. notes: the
          extractor and protocol in use now.
        """
        for name, gaussian in self.gaussians.items():
            found, needed = len(gaussian.mean), dimensions.get(name)
            if needed is not None and found != needed:
                raise UserError(
                    f"{where}: `{KEYS[name][0]}` has {found} numbers, the extractor gives {needed}"
                    " features: it was made with another extractor"
                )
        for note, ours in notes.items():
            if self.notes.get(note, ours) != ours:
                raise UserError(
                    f"{where} was made with another {note} ({self.notes[note]:.40}, now"
                    f" {ours:.40}): features of both cannot be compared; make it again"
                )

    def remarks(self, where) -> list[str]:
        """Sentences that a reader of results has to know. where: the file."""
        found = []
        if unknown := [note for note in NOTES if note not in self.notes]:
            found.append(
                f"{where} does not say which {' and '.join(unknown)} made it: distances to it mean"
                " something only if it was made as this evaluation is"
            )
        for name, gaussian in self.gaussians.items():
            rank, size = gaussian.factor.shape[1], len(gaussian.mean)
            if rank < size:
                found.append(
                    f"{where}: `{KEYS[name][1]}` has rank {rank} of {size}: it was made of fewer"
                    " pictures than features, or some features never vary; distances to it are"
                    " biased"
                )
        return found


def read_statistics(path: Path) -> Statistics | None:
    """Read the statistics of a file; None if it holds none. `UserError` if an array is missing, has
    another shape or holds values that are NaN or infinite, or a covariance is none."""
    wanted = [key for pair in KEYS.values() for key in pair]
    found = npz.load(path, (*wanted, *NOTES), largest=LARGEST)
    gaussians = {}
    for name, (mean, covariance) in KEYS.items():
        if there := [key for key in (mean, covariance) if key in found]:
            if len(there) == 1:
                raise UserError(
                    f"{path} has `{there[0]}` alone: `{mean}` and `{covariance}` belong"
                    f" together; it holds {some(npz.names(path), 8)}"
                )
            gaussians[name] = _gaussian(path, mean, found[mean], covariance, found[covariance])
    notes = {key: str(found[key]) for key in NOTES if key in found and found[key].dtype.kind == "U"}
    return Statistics(gaussians, notes) if gaussians else None


def _gaussian(path: Path, name: str, mean, other: str, covariance) -> Gaussian:
    for key, array in ((name, mean), (other, covariance)):
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise UserError(
                f"{path}: `{key}` holds values that are NaN or infinite, or {array.dtype}: floating"
                " numbers are needed, make it again"
            )
    if mean.ndim != 1 or not mean.size or covariance.shape != (len(mean), len(mean)):
        raise UserError(
            f"{path}: `{name}` is {list(mean.shape)} and `{other}` {list(covariance.shape)}: a mean"
            " [D] and a covariance [D, D] are needed"
        )
    mean, covariance = mean.astype(np.float64), covariance.astype(np.float64)
    largest = np.abs(covariance).max()
    if np.abs(covariance - covariance.T).max() > 1e-4 * largest or covariance.diagonal().min() < 0:
        raise UserError(
            f"{path}: `{other}` is no covariance: it must be symmetric, and not negative"
            " on its diagonal"
        )
    return Gaussian(mean, (covariance + covariance.T) / 2)


def write_statistics(
    path: Path, gaussians: Mapping[str, Gaussian], notes: Mapping[str, str]
) -> None:
    """Write a file that this module and the published evaluators read."""
    arrays: dict[str, np.ndarray] = {}
    for name, gaussian in gaussians.items():
        mean, covariance = KEYS[name]
        arrays |= {mean: gaussian.mean, covariance: gaussian.covariance}
    arrays |= {key: np.array(text) for key, text in notes.items()}
    with new_file(path) as file:
        np.savez(file, **arrays)
