"""Measurements of a model that policies decide from: `find` the one that a run uses, `load` and
`save` files. `varjax.generation.measure_calibration` makes them, `varjax.calibration.data` scores
them."""

from varjax.calibration.data import Calibration
from varjax.calibration.files import beside, find, load, model_digest, save

__all__ = ["Calibration", "beside", "find", "load", "model_digest", "save"]
