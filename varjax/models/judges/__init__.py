"""Networks that judge pictures, as parts of checkpoints: each has a folder of its own."""

from varjax.models.judges.classifier import Classifier, ClassifierConfig
from varjax.models.judges.inception import Inception, InceptionConfig
from varjax.models.judges.lpips import LPIPS, LPIPSConfig
from varjax.storage.families import Catalogue, Part

JUDGES = Catalogue(
    parts={
        "inception": Part("Inception", InceptionConfig, Inception, own_folder=True),
        "lpips": Part("LPIPS", LPIPSConfig, LPIPS, own_folder=True),
        "classifier": Part("Classifier", ClassifierConfig, Classifier, own_folder=True),
    }
)
