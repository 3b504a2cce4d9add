"""Metrics of pictures one by one: PSNR, SSIM, LPIPS and equal tokens of samples against those of
the full cache."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from experiments.batch_files import Series
from experiments.evaluate import features
from experiments.evaluate.inputs import TOKENS, PictureSet
from experiments.output import BatchStore
from varjax import metrics
from varjax.calibration.files import model_digest
from varjax.errors import UserError, about
from varjax.evaluation import pixels
from varjax.evaluation.extractors import Network, Program
from varjax.evaluation.pictures import paired
from varjax.parallel.processes import Stop
from varjax.storage import npz

SSIM_KEYS = {  # {key in files: definition}; the usual `ssim` is torchmetrics'
    "ssim": "torchmetrics",
    "ssim_skimage_gauss": "skimage_gauss",
    "ssim_skimage_7x7": "skimage_7x7",
}
# If these entries of two reports and the models are equal, pictures of one number differ by the
# cache alone. Models are compared by content, since their folders and files may have any names.
DRAWN = ("schedule", "sampling", "seed", "given", "resize", "text")
DRAWN += ("dtype", "matmul_precision", "decode_dtype")


@dataclass(frozen=True, eq=False)
class Pairs:
    """Two sets of the same pictures, and what is computed for each pair.

    places: where the pictures of each pair lie in the two sets. network: LPIPS, if it is wanted.
    tokens: name of the arrays of tokens, if both runs kept them.
    """

    samples: PictureSet
    full: PictureSet
    places: tuple[list[int], list[int]]
    metrics: tuple[str, ...]
    network: Network | None
    tokens: str | None

    @property
    def remarks(self) -> list[str]:
        """What was done to pictures; what the two runs differ in besides the cache, as far as their
        reports say."""
        reports = (self.samples.report, self.full.report)
        labels = (self.samples.labels, self.full.labels)
        found = [*self.samples.pictures.remarks, *self.full.pictures.remarks]
        if all(report is not None for report in reports):
            ours, theirs = reports
            origins = [{f: r.get(f"model_{f}") for f in ("sources", "files")} for r in reports]
            models = {
                model_digest({**origin, "name": report.get("model")})
                for origin, report in zip(origins, reports, strict=True)
            }
            differ = ["model"] * (len(models) > 1)
            differ += [name for name in DRAWN if ours.get(name) != theirs.get(name)]
            if differ:
                found.append(
                    f"--full was drawn with another {', '.join(differ)} than the samples:"
                    " the pictures differ by more than the cache"
                )
        if all(known is not None for known in labels):
            ours, theirs = (of[places] for of, places in zip(labels, self.places, strict=True))
            if count := int((ours != theirs).sum()):
                found.append(f"{count} of {len(ours)} pairs are of two different classes")
        return found

    def series(self, size: int) -> Series:
        """Return the files of per-image numbers. size: pairs of each file."""
        floats = np.dtype(np.float64)
        arrays = {"psnr": (floats, ())} if "psnr" in self.metrics else {}
        if "ssim" in self.metrics:
            arrays |= {key: (floats, ()) for key in SSIM_KEYS}
        if self.network is not None:
            arrays["lpips_layers"] = np.dtype(np.float32), (self.network.widths["layers"],)
        return Series(len(self.places[0]), size, {**arrays, "identical": (np.dtype(bool), ())})


def pair(
    samples: PictureSet, full: PictureSet, wanted: tuple[str, ...], network: Network | None
) -> Pairs:
    """Pair the pictures of two runs; `UserError` unless they are the same ones."""
    for side in (samples, full):
        if side.pictures is None:
            raise UserError(
                f"{side.where} holds statistics alone: pictures are compared one by one"
            )
    places = paired(samples.pictures, full.pictures)
    if min(samples.pictures.size) <= 2 * pixels.RADIUS and "ssim" in wanted:
        raise UserError(
            f"{samples.where}: pictures of {samples.pictures.size} pixels are smaller"
            " than the window of SSIM: choose other --metrics"
        )
    if network is not None:
        height, width = samples.pictures.size
        with about(samples.where):
            network.check_size(height, width)
    tokens = None
    if samples.tokens is not None and full.tokens is not None:
        held = [npz.names(side.tokens) for side in (samples, full)]
        tokens = next((name for name in TOKENS if all(name in names for names in held)), None)
    return Pairs(samples, full, places, wanted, network, tokens)


def compute(
    job: Pairs,
    store: BatchStore,
    program_of: Callable[[tuple[int, int]], Program],
    batch_size: int,
    stop: Stop,
) -> None:
    """Compute the per-image numbers that are missing, as `features.fill` does.

    program_of: gives LPIPS for pictures of a size (height, width). batch_size: pairs that are read
    at a time without LPIPS."""
    if not store.missing("pairs"):
        return
    program = program_of(job.samples.pictures.size) if job.network else None

    def numbers(spans: list[tuple[int, int]]) -> Iterator[dict[str, np.ndarray]]:
        for span in spans:
            yield _numbers(job, _read(job, 0, range(*span)), _read(job, 1, range(*span)), program)

    features.fill(store, "pairs", program.batch_size if program else batch_size, numbers, stop)


def _read(job: Pairs, side: int, numbers: range) -> np.ndarray:
    """Return pictures of set 0 (samples) or 1 (full), in the order of the pairs."""
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
    """Return (values by the keys of metrics.json, arrays of per_image.npz)."""
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
    """Return the part of equal tokens of every pair, float64 [N]. Rows of the arrays of tokens are
    in the order of the pictures' numbers."""
    ours, theirs = (npz.Rows(side.tokens, job.tokens) for side in (job.samples, job.full))
    for side, found in ((job.samples, ours), (job.full, theirs)):
        if found.shape != ours.shape or found.shape[0] != side.pictures.count:
            raise UserError(
                f"{side.tokens}: `{job.tokens}` is {list(found.shape)}, which does not"
                f" fit {side.pictures.count} pictures of two runs of one model"
            )
    each = (
        metrics.token_agreement(ours.read(n, n + 1), theirs.read(n, n + 1))
        for n in job.samples.pictures.keys
    )
    return np.concatenate(list(each))
