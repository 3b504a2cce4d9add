"""Networks that judge the pictures of `run --compare` and of a sweep, one by one: LPIPS, and a
classifier that knows the model's classes."""

from dataclasses import dataclass, field

import numpy as np
from absl.flags import FlagHolder
from jaxtyping import Float, Integer, UInt8

from experiments.cli.flags import about
from experiments.evaluation import extractors, metrics
from experiments.evaluation.extractors import CompiledNetwork, Network
from varjax.models.model import Model

Pictures = UInt8[np.ndarray, "N H W 3"]
LPIPS_HELP = "Folder of a converted LPIPS network, to compare with the full cache by, too."
LPIPS, AGREEMENT, DISTANCE = "lpips", "class_agreement", "feature_distance"  # in `metrics.METRICS`


@dataclass(frozen=True, eq=False)
class Judges:
    """Networks that compare pictures with the full cache's; either may be missing.

    lpips: distance of a picture to the full cache's. classifier: knows the model's classes.
    batch_size: pictures at a time.
    """

    lpips: Network | None = None
    classifier: Network | None = None
    batch_size: int = extractors.CPU_BATCH
    _programs: dict[tuple[Network, tuple[int, int]], CompiledNetwork] = field(default_factory=dict)

    def describe(self) -> dict:
        """Return which networks they are, for reports."""
        known = {"lpips_network": self.lpips, "classifier": self.classifier}
        return {name: dict(network.identity) for name, network in known.items() if network}

    def numbers(
        self, full: Pictures, mine: Pictures, labels: Integer[np.ndarray, " N"]
    ) -> dict[str, np.ndarray]:
        """Return {metric: float64 [N]}: pictures compared with the full cache's, and classes with
        those asked for."""
        found: dict[str, np.ndarray] = {}
        if self.lpips:
            layers = self._run(self.lpips, full, mine)["layers"]
            found[LPIPS] = layers.astype(np.float64).sum(1)
        if self.classifier:
            ours, theirs = self._run(self.classifier, mine), self._run(self.classifier, full)
            found[AGREEMENT] = (ours["logits"].argmax(1) == labels).astype(np.float64)
            found[DISTANCE] = feature_distance(ours["pool"], theirs["pool"])
        return found

    def agreement(self, pictures: Pictures, labels: np.ndarray) -> np.ndarray | None:
        """Return float64 [N]: 1 where the classifier takes a picture for its class, else 0. None
        without a classifier."""
        if self.classifier is None:
            return None
        logits = self._run(self.classifier, pictures)["logits"]
        return (logits.argmax(1) == labels).astype(np.float64)

    def _run(self, network: Network, *pictures: Pictures) -> dict[str, np.ndarray]:
        key = network, pictures[0].shape[1:3]
        if key not in self._programs:
            self._programs[key] = CompiledNetwork(*key, self.batch_size)
        program = self._programs[key]
        starts = range(0, len(pictures[0]), program.batch_size)
        batches = (tuple(x[i : i + program.batch_size] for x in pictures) for i in starts)
        return metrics.joined(program.over(batches))


def of_model(
    model: Model, lpips: FlagHolder[str], batch_size: int, side: int | None = None
) -> Judges:
    """Return the networks that judge a model's pictures. `UserError` if there is no such network,
    or it does not take the model's pictures.

    lpips: the flag --lpips. side: of pictures that are resized, which the classifier does not know.
    """
    network = None
    if lpips.value:
        with about(lpips):
            network = extractors.open_lpips(lpips.value)
            height, width = (side, side) if side else model.pixels
            network.check_size(height, width)
    known = None if side else extractors.classifier_of(model)
    return Judges(network, known, batch_size)


def feature_distance(
    a: Float[np.ndarray, "N D"], b: Float[np.ndarray, "N D"]
) -> Float[np.ndarray, " N"]:
    """1 - cosine of the features of each pair, in float64: 0 for equal pictures, at most 1."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosine = (a * b).sum(1) / np.maximum(lengths, 1e-12)
    return np.where((a == b).all(1), 0.0, np.clip(1 - cosine, 0, 1))
