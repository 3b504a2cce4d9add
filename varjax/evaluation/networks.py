"""The networks that judge pictures, as parts of checkpoints: each has a folder of its own."""

from varjax.evaluation.classifier import Classifier, ClassifierConfig
from varjax.evaluation.inception import Inception, InceptionConfig
from varjax.evaluation.lpips import LPIPS, LPIPSConfig
from varjax.nn.families import Catalogue, Part

CATALOGUE = Catalogue(
    parts={
        "inception": Part("Inception", InceptionConfig, Inception, own_folder=True),
        "lpips": Part("LPIPS", LPIPSConfig, LPIPS, own_folder=True),
        "classifier": Part("Classifier", ClassifierConfig, Classifier, own_folder=True),
    }
)
