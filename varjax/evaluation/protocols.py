"""The published protocols by name: what the numbers of a paper were computed with."""

from collections.abc import Mapping
from dataclasses import dataclass

from varjax.evaluation.resizing import PATHS

SPLIT_SIZE = 5000  # of ADM's Inception score
METRICS = (
    *("fid", "sfid", "is", "precision", "recall", "psnr", "ssim", "lpips"),
    *("demo_frechet", "class_agreement"),
)
BY_FEATURES = {"inception": METRICS[:5], "demo": METRICS[8:]}  # those of sets
DEMO = {  # in place of a protocol
    "name": "demo",
    "source": "a classifier of the demo's classes: no FID, and comparable with nothing else",
    "resize": "none",
    "demo_frechet": "Frechet distance of the features before the classifier's last layer",
    "class_agreement": "part of the pictures that it takes for the class they were asked for",
}


@dataclass(frozen=True)
class Protocol:
    """path: of `resizing.PATHS`. metrics: what its program computes; the others are defined here
    as ADM's, on this path's features. source: the program."""

    path: str
    metrics: tuple[str, ...]
    source: str

    def describe(self, split_size: int) -> Mapping:
        """For reports."""
        return {
            "source": self.source,
            "path": self.path,
            "resize": PATHS[self.path].definition,
            "inception_score": {
                "logits": "without bias",
                "splits": f"consecutive blocks of {split_size} in the order of the file",
                "split_size": split_size,
            },
            "precision_recall": {"neighbours": 3, "distances": "float64", "features": "pool"},
            "covariance": "N - 1, float64; nothing is added to singular ones",
        }


PROTOCOLS = {
    "adm": Protocol("tf1", METRICS[:5], "evaluator of openai/guided-diffusion (ADM)"),
    "pytorch-fid": Protocol("pfid", ("fid",), "pytorch-fid 0.3.0"),
    "clean-fid": Protocol("clean", ("fid",), "clean-fid 0.1.35, mode clean"),
}
