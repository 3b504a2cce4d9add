"""The published protocols by name: what the numbers of a paper were computed with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.evaluation.resizing import PREPARATIONS, resized

SPLIT_SIZE = 5000  # of ADM's Inception score
BY_FEATURES = {  # metrics of sets of pictures, by the extractor whose features they need
    "inception": ("fid", "sfid", "is", "precision", "recall"),
    "demo": ("demo_frechet", "class_agreement"),
}
METRICS = (*BY_FEATURES["inception"], "psnr", "ssim", "lpips", *BY_FEATURES["demo"])
DEMO = {  # in place of a protocol
    "name": "demo",
    "source": "a classifier of the demo's classes: no FID, and comparable with nothing else",
    "resize": "none",
    "demo_frechet": "Frechet distance of the features before the classifier's last layer",
    "class_agreement": "part of the pictures that it takes for the class they were asked for",
}


@dataclass(frozen=True)
class Protocol:
    """Preparation and metrics that the numbers of a published program are computed with.

    preparation: how pictures become what the network takes, one of `resizing.PREPARATIONS`.
    metrics: what the program computes. The other metrics are ADM's, on features of pictures that
      are prepared in this way.
    source: the program.
    mixes_sizes: it takes sets of pictures of several sizes, and resizes each on its own.
    """

    preparation: str
    metrics: tuple[str, ...]
    source: str
    mixes_sizes: bool = False

    @property
    def fit(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Function that brings a picture of any size to a size that the network takes; None:
        pictures of a set need one size."""
        return partial(resized, preparation=self.preparation) if self.mixes_sizes else None

    def describe(self, split_size: int) -> Mapping:
        """Description of the protocol for a report. split_size: pictures per split of the score."""
        return {
            "source": self.source,
            "path": self.preparation,
            "resize": PREPARATIONS[self.preparation].definition,
            "inception_score": {
                "logits": "without bias",
                "splits": f"consecutive blocks of {split_size} in the order of the file",
                "split_size": split_size,
            },
            "precision_recall": {"neighbours": 3, "distances": "float64", "features": "pool"},
            "covariance": "N - 1, float64; nothing is added to singular ones",
        }


PROTOCOLS = {
    "adm": Protocol("tf1", BY_FEATURES["inception"], "evaluator of openai/guided-diffusion (ADM)"),
    "pytorch-fid": Protocol("pfid", ("fid",), "pytorch-fid 0.3.0"),
    "clean-fid": Protocol("clean", ("fid",), "clean-fid 0.1.35, mode clean", True),
}
