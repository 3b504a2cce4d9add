"""Measurements of a model that policies decide from: `find` the one that a run uses, `load` and
`save` files; the scores they lead to. `varjax.calibration.measure` makes them."""

from varjax.calibration.data import Calibration, show_guidance
from varjax.calibration.files import beside, find, load, model_digest, read_orders, save
from varjax.calibration.scores import (
    attention_mass,
    cas,
    order_heads,
    orders_from_scores,
    scas,
)

__all__ = [
    "Calibration",
    "attention_mass",
    "beside",
    "cas",
    "find",
    "load",
    "model_digest",
    "order_heads",
    "orders_from_scores",
    "read_orders",
    "save",
    "scas",
    "show_guidance",
]
