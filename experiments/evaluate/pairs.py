"""Metrics of pictures one by one: PSNR, SSIM, LPIPS and equal tokens of samples against those of
the full cache. PSNR and SSIM are those of torchmetrics, of bytes, in float64."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8
from scipy import ndimage

from experiments.evaluate import sets
from experiments.evaluate.inputs import TOKENS, PictureSet
from experiments.evaluate.sets import ProgramOf
from experiments.evaluation import metrics
from experiments.evaluation.extractors import Network
from experiments.evaluation.pictures import paired
from experiments.output import BatchStore
from experiments.processes import Stop
from varjax.calibration.files import model_digest
from varjax.core.errors import UserError, about
from varjax.storage import npz

# If these entries of two reports and the models are equal, pictures of one number differ by the
# cache alone. Models are compared by content, since their folders and files may have any names.
DRAWN = ("schedule", "sampling", "seed", "given", "resize", "text")
DRAWN += ("dtype", "matmul_precision", "decode_dtype")
SIGMA, RADIUS = 1.5, 5  # of the Gaussian window of SSIM (Wang et al. 2004): 11 pixels
K1, K2 = 0.01, 0.03

Picture = UInt8[np.ndarray, "H W 3"]


def psnr(a: Picture, b: Picture) -> float:
    """Peak signal-to-noise ratio in dB for a peak of 255; infinite if the pictures are equal."""
    error = np.square(a.astype(np.float64) - b).mean() / 255**2
    return 10 * math.log10(1 / error) if error else math.inf


def ssim(a: Picture, b: Picture) -> float:
    """Structural similarity for values 0..1: Gaussian window, edges mirrored, mean over channels
    and all positions. No side is shorter than the window."""
    window = np.exp(-np.square(np.arange(-RADIUS, RADIUS + 1) / SIGMA) / 2)
    window /= window.sum()

    def mean(values: Float[np.ndarray, "H W 3"]) -> Float[np.ndarray, "H W 3"]:
        for axis in (0, 1):
            values = ndimage.correlate1d(values, window, axis=axis, mode="mirror")
        return values

    x, y = a / 255.0, b / 255.0
    mx, my = mean(x), mean(y)
    vx, vy = mean(x * x) - mx * mx, mean(y * y) - my * my
    vxy = mean(x * y) - mx * my
    c1, c2 = K1**2, K2**2
    luminance = (2 * mx * my + c1) / (mx * mx + my * my + c1)
    return float((luminance * (2 * vxy + c2) / (vx + vy + c2)).mean())


MEASURES = {"psnr": psnr, "ssim": ssim}  # of a picture and the full cache's


@dataclass(frozen=True, eq=False)
class Pairs:
    """Two sets of the same pictures, and what is computed for each pair.

    places: where the pictures of the full cache lie, in the order of the samples. network: LPIPS,
    if it is wanted. tokens: name of the arrays of tokens, if both runs kept them.
    """

    samples: PictureSet
    full: PictureSet
    places: list[int]
    metrics: tuple[str, ...]
    network: Network | None
    tokens: str | None

    @property
    def remarks(self) -> list[str]:
        """Remarks on the steps done to pictures and on differences of the two runs besides the
        cache, as far as their reports say."""
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
            if count := int((labels[0] != labels[1][self.places]).sum()):
                found.append(f"{count} of {len(labels[0])} pairs are of two different classes")
        return found


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
    with about(samples.where):
        height, width = samples.pictures.size
        if "ssim" in wanted and min(height, width) <= 2 * RADIUS:
            raise UserError(
                f"pictures of {height}x{width} pixels: SSIM needs more than {2 * RADIUS} on each"
                " side"
            )
        if network is not None:
            network.check_size(height, width)
    tokens = None
    if samples.tokens is not None and full.tokens is not None:
        held = [npz.names(side.tokens) for side in (samples, full)]
        tokens = next((name for name in TOKENS if all(name in names for names in held)), None)
    return Pairs(samples, full, places, wanted, network, tokens)


def compute(
    job: Pairs, store: BatchStore, program_of: ProgramOf, batch_size: int, stop: Stop
) -> None:
    """Compute the per-image numbers that are missing, as `sets.fill` does. batch_size: pairs that
    are read at a time without LPIPS."""
    program = program_of(job.network, job.samples.pictures.size) if job.network else None
    measures = {name: measure for name, measure in MEASURES.items() if name in job.metrics}

    def numbers(spans: list[tuple[int, int]]) -> Iterator[dict[str, np.ndarray]]:
        for span in spans:
            ours = job.samples.pictures.read(*span)
            places = job.places[slice(*span)]
            spans_of_full = [(place, place + 1) for place in places]
            if places == list(range(places[0], places[0] + len(places))):
                spans_of_full = [(places[0], places[-1] + 1)]
            theirs = np.concatenate([job.full.pictures.read(*part) for part in spans_of_full])
            pairs = list(zip(theirs, ours, strict=True))
            found = {n: np.array([measure(*p) for p in pairs]) for n, measure in measures.items()}
            if program is not None:
                (layers,) = program.over(iter([(theirs, ours)]))
                found["lpips_layers"] = layers["layers"]
            yield found | {"identical": (ours == theirs).all((1, 2, 3))}

    sets.fill(store, "pairs", program.batch_size if program else batch_size, numbers, stop)


def measure(job: Pairs, store: BatchStore) -> tuple[dict, Mapping[str, np.ndarray]]:
    """Return (values by the keys of metrics.json, arrays of per_image.npz)."""
    arrays = metrics.joined(found for _, found in store.batches("pairs"))
    identical = arrays["identical"]
    found: dict = {"pairs": len(identical), "identical_images": int(identical.sum())}
    if "psnr" in arrays:
        rest = arrays["psnr"][~identical]  # one identical pair would make the mean infinite
        found["psnr"] = float(rest.mean()) if len(rest) else math.inf
    if "lpips_layers" in arrays:
        layers = arrays["lpips_layers"].astype(np.float64)
        arrays["lpips"], found["lpips_layers"] = layers.sum(1), layers.mean(0)
    if job.tokens is not None:
        ours, theirs = (npz.Rows(side.tokens, job.tokens) for side in (job.samples, job.full))
        for side, rows in ((job.samples, ours), (job.full, theirs)):
            if rows.shape != ours.shape or rows.shape[0] != side.pictures.count:
                raise UserError(
                    f"{side.tokens}: `{job.tokens}` is {list(rows.shape)}, which does not"
                    f" fit {side.pictures.count} pictures of two runs of one model"
                )
        # rows are in the order of the pictures' numbers
        spans = [(n, n + 1) for n in job.samples.pictures.keys]
        each = [metrics.token_agreement(ours.read(*s), theirs.read(*s)) for s in spans]
        arrays["token_agreement"] = np.concatenate(each)
    means = ("ssim", "lpips", "token_agreement")
    found |= {name: float(arrays[name].mean()) for name in means if name in arrays}
    return found, {"key": np.array(list(job.samples.pictures.keys)), **arrays}
