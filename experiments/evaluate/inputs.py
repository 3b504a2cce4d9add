"""Inputs that --samples, --reference and --full name: a run's folder, a folder of pictures, or an
npz file."""

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from experiments.evaluation import references
from experiments.evaluation.pictures import (
    ARRAY,
    PACKED,
    Fit,
    PackedPictures,
    PictureArray,
    PictureFolder,
    Pictures,
    file_digest,
)
from experiments.evaluation.references import Statistics
from varjax.core.errors import UserError, some
from varjax.storage import npz
from varjax.storage.manifest import read_json

SAMPLES, REPORT, ARRAYS = "samples.npz", "report.json", "arrays.npz"
TOKENS = ("tokens", "bits")  # what a model calls its tokens in ARRAYS
# Entries of a run's report that say how its pictures were made; lists with an entry for each
# picture are left out.
RECIPE = """
model model_sources schedule policy policy_args budget plan calibration sampling seed batch_size
dtype kv_dtype matmul_precision segments layers attention mesh given recipe num_images device
versions
""".split()


@dataclass(frozen=True, eq=False)
class PictureSet:
    """Pictures, statistics of pictures, or both, from one file or folder.

    where: the file or folder. kind: what it is, in words. report: content of the run's report.json.
    tokens: the file with the run's tokens.
    """

    where: str
    kind: str
    pictures: Pictures | None
    statistics: Statistics | None = None
    report: Mapping | None = None
    tokens: pathlib.Path | None = None

    @property
    def labels(self) -> np.ndarray | None:
        """The class of every picture, in their order; None for pictures of texts."""
        if self.report is not None and "text" in self.report:
            return None
        return getattr(self.pictures, "labels", None)

    def describe(self) -> dict:
        """Return the entry of metrics.json that says what was compared."""
        sha256 = self.pictures.sha256 if self.pictures else file_digest(pathlib.Path(self.where))
        found: dict = {"given": self.where, "kind": self.kind, "sha256": sha256}
        if self.pictures is not None:
            height, width = self.pictures.size
            found |= {"count": self.pictures.count, "height": height, "width": width}
        if self.labels is not None:
            _, counts = np.unique(self.labels, return_counts=True)
            each = {"fewest": counts.min(), "most": counts.max()}
            found["labels"] = {"classes": len(counts), "pictures_of_a_class": each}
        if self.statistics is not None:
            found["statistics"] = {
                name: len(g.mean) for name, g in self.statistics.gaussians.items()
            }
        if self.report is not None:
            found["recipe"] = {k: self.report[k] for k in RECIPE if k in self.report}
        return found


def open_set(flag: str, given: str, fit: Fit | None = None) -> PictureSet:
    """Open and check the file or folder that a flag names. fit: what pictures of several sizes
    become arrays of one size by; None: they are refused. `UserError` if it holds nothing that can
    be compared; the message names the file at fault."""
    path = pathlib.Path(given)
    if not path.exists():
        raise UserError(f"{flag}: there is no file or folder {given}")
    folder = path if path.is_dir() else path.parent if path.name == SAMPLES else None
    if folder and (folder / SAMPLES).is_file() and (path.is_dir() or (folder / REPORT).is_file()):
        report = read_json(folder / REPORT) if (folder / REPORT).is_file() else None
        if report is not None and not isinstance(report, dict):
            raise UserError(f"{folder / REPORT} is no report of a run: move it away")
        pictures = PictureArray(folder / SAMPLES)
        tokens = folder / ARRAYS if (folder / ARRAYS).is_file() else None
        kind = "folder of experiments.run"
        return PictureSet(str(folder), kind, pictures, None, report, tokens)
    if path.is_file():
        return _of_file(flag, path, fit)
    if (path / REPORT).is_file():
        raise UserError(
            f"{flag}: {path} is the folder of a run, but {SAMPLES} is missing: name the folder of"
            " its pictures, or run it again"
        )
    return PictureSet(str(path), "folder of pictures", PictureFolder(path, fit))


def _of_file(flag: str, path: pathlib.Path, fit: Fit | None) -> PictureSet:
    held = npz.names(path)
    if set(PACKED) <= set(held):
        packed = PackedPictures(path, fit)
        return PictureSet(str(path), "npz file of packed pictures", packed)
    statistics = references.read_statistics(path)
    pictures = PictureArray(path) if ARRAY in held else None
    if pictures is None and statistics is None:
        raise UserError(
            f"{flag}: {path} holds {some(held, 8) or 'nothing'}: pictures (`{ARRAY}`, uint8"
            " [N, H, W, 3]) or statistics (`mu`, `sigma`, for sFID also `mu_s`, `sigma_s`) are"
            " needed"
        )
    words = [pictures and "pictures", statistics and "statistics"]
    kind = f"npz file of {' and '.join(filter(None, words))}"
    return PictureSet(str(path), kind, pictures, statistics)
