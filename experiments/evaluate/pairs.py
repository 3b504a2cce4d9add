"""Metrics of pictures one by one: PSNR, SSIM, LPIPS and equal tokens of samples against those of
the full cache."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from experiments.batch_files import Series
from experiments.evaluate import features
from experiments.evaluate.inputs import TOKENS, Set
from experiments.output import BatchStore
from varjax import metrics
from varjax.calibration.files import model_digest
from varjax.errors import UserError, about
from varjax.evaluation import pixels
from varjax.evaluation.extractors import Network, Program
from varjax.evaluation.pictures import paired
from varjax.progress import Progress
from varjax.storage import npz

SSIM_KEYS = {  # of files: that of metrics.json is torchmetrics's
    "ssim": "torchmetrics",
    "ssim_skimage_gauss": "skimage_gauss",
    "ssim_skimage_7x7": "skimage_7x7",
}
# Entries of two reports that say whether pictures of one number differ by the cache alone, besides
# the model, whose folders and files may have any names.
DRAWN = ("schedule", "sampling", "seed", "given", "resize", "text")
DRAWN += ("dtype", "matmul_precision", "decode_dtype")


@dataclass(frozen=True, eq=False)
class Pairs:
    """places: of the same pictures in both sets. network: of LPIPS, if it is wanted. tokens: the
    name of the arrays of tokens, if both runs kept them."""

    samples: Set
    full: Set
    places: tuple[list[int], list[int]]
    metrics: tuple[str, ...]
    network: Network | None
    tokens: str | None

    @property
    def remarks(self) -> list[str]:
        """What two runs differ by besides the cache, so far as they say how they were made."""
        reports, labels = zip(
            *((of.report, of.labels) for of in (self.samples, self.full)), strict=True
        )
        found = []
        if all(report is not None for report in reports):
            ours, theirs = map(_drawn, reports)
            differ = [name for name in ours if ours[name] != theirs[name]]
            if differ:
                found.append(
                    f"--full was drawn with another {', '.join(differ)} than the samples:"
                    " the pictures differ by more than the cache"
                )
        if all(of is not None for of in labels):
            ours, theirs = (of[places] for of, places in zip(labels, self.places, strict=True))
            if count := int((ours != theirs).sum()):
                found.append(f"{count} of {len(ours)} pairs are of two different classes")
        return found

    def series(self, size: int) -> Series:
        """The files of per-image numbers."""
        floats = np.dtype(np.float64)
        arrays = {"psnr": (floats, ())} if "psnr" in self.metrics else {}
        if "ssim" in self.metrics:
            arrays |= {key: (floats, ()) for key in SSIM_KEYS}
        if self.network is not None:
            arrays["lpips_layers"] = np.dtype(np.float32), (self.network.widths["layers"],)
        return Series(len(self.places[0]), size, {**arrays, "identical": (np.dtype(bool), ())})


def _drawn(report: Mapping) -> dict:
    """What a report says of its pictures but for the cache."""
    origin = {name: report.get(f"model_{name}") for name in ("sources", "files")}
    model = model_digest({**origin, "name": report.get("model")})
    return {"model": model} | {name: report.get(name) for name in DRAWN}


def pair(samples: Set, full: Set, wanted: tuple[str, ...], network: Network | None) -> Pairs:
    """`UserError` unless these are the same pictures of two runs."""
    for of in (samples, full):
        if of.pictures is None:
            raise UserError(f"{of.where} holds statistics alone: pictures are compared one by one")
    places = paired(samples.pictures, full.pictures)
    if min(samples.pictures.size) <= 2 * pixels.RADIUS and "ssim" in wanted:
        raise UserError(
            f"{samples.where}: pictures of {samples.pictures.size} pixels are smaller"
            " than the window of SSIM: choose other --metrics"
        )
    if network is not None:
        with about(samples.where):
            network.check_size(*samples.pictures.size)
    return Pairs(samples, full, places, wanted, network, _tokens(samples, full))


def _tokens(samples: Set, full: Set) -> str | None:
    if samples.tokens is None or full.tokens is None:
        return None
    held = [set(npz.names(of.tokens)) for of in (samples, full)]
    return next((name for name in TOKENS if all(name in names for names in held)), None)


def compute(job: Pairs, store: BatchStore, program_of: Callable, batch_size: int) -> None:
    """Compute what is missing of the per-image numbers and keep every part. program_of: LPIPS for
    pictures of a size."""
    made, missing = store.series["pairs"], store.missing("pairs")
    progress = Progress("pairs: picture", made.count, first=store.finished("pairs"), every=2.0)
    program = None
    if job.network is not None and missing:
        program = program_of(job.samples.pictures.size)
    for start in missing:
        index = made.index(start)
        step = program.batch_size if program else batch_size
        parts = []
        for first in range(start, int(index[-1]) + 1, step):
            numbers = range(first, min(first + step, int(index[-1]) + 1))
            parts.append(_numbers(job, *(_read(job, side, numbers) for side in (0, 1)), program))
            progress.update(int(numbers[-1]) + 1)
        store.add("pairs", index, features.joined(parts))


def _read(job: Pairs, side: int, numbers: range) -> np.ndarray:
    """Pictures of one of the sets, in the order of the pairs."""
    pictures, places = (job.samples, job.full)[side].pictures, job.places[side]
    wanted = [places[i] for i in numbers]
    if wanted == list(range(wanted[0], wanted[0] + len(wanted))):
        return pictures.read(wanted[0], wanted[-1] + 1)
    return np.concatenate([pictures.read(i, i + 1) for i in wanted])


def _numbers(job: Pairs, ours: np.ndarray, theirs: np.ndarray, program: Program | None) -> dict:
    found: dict[str, np.ndarray] = {"identical": (ours == theirs).all((1, 2, 3))}
    pairs = list(zip(theirs, ours, strict=True))
    if "psnr" in job.metrics:
        found["psnr"] = np.array([pixels.psnr(a, b) for a, b in pairs])
    if "ssim" in job.metrics:
        each = [pixels.ssim(a, b) for a, b in pairs]
        found |= {k: np.array([getattr(s, n) for s in each]) for k, n in SSIM_KEYS.items()}
    if program is not None:
        (layers,) = program.over(iter([(theirs, ours)]))
        found["lpips_layers"] = layers["layers"]
    return found


def measure(job: Pairs, store: BatchStore) -> tuple[dict, Mapping[str, np.ndarray]]:
    """(values by the keys of metrics.json, arrays of per_image.npz, first picture first)."""
    arrays = store.collect("pairs")
    identical = arrays["identical"]
    found: dict = {"pairs": len(identical), "identical_images": int(identical.sum())}
    if "psnr" in arrays:
        rest = arrays["psnr"][~identical]  # one identical pair would make the mean infinite
        found["psnr"] = float(rest.mean()) if len(rest) else math.inf
    found |= {key: float(arrays[key].mean()) for key in SSIM_KEYS if key in arrays}
    if "lpips_layers" in arrays:
        arrays["lpips"] = arrays["lpips_layers"].astype(np.float64).sum(1)
        found["lpips"] = float(arrays["lpips"].mean())
        found["lpips_layers"] = arrays["lpips_layers"].astype(np.float64).mean(0)
    if job.tokens is not None:
        arrays["token_agreement"] = token_agreement(job)
        found["token_agreement"] = float(arrays["token_agreement"].mean())
    keys = list(job.samples.pictures.keys)
    return found, {"key": np.array(keys), **arrays}


def token_agreement(job: Pairs) -> np.ndarray:
    """float64 [N]: the part of equal tokens of every pair. Tokens lie by number of the picture."""
    rows = [npz.Rows(of.tokens, job.tokens) for of in (job.samples, job.full)]
    for of, found in zip((job.samples, job.full), rows, strict=True):
        if found.shape != rows[0].shape or found.shape[0] != of.pictures.count:
            raise UserError(
                f"{of.tokens}: `{job.tokens}` is {list(found.shape)}, which does not"
                f" fit {of.pictures.count} pictures of two runs of one model"
            )
    values = []
    for number in job.samples.pictures.keys:
        values.append(metrics.token_agreement(*(r.read(number, number + 1) for r in rows)))
    return np.concatenate(values)
