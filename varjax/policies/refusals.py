"""What several policies refuse in the same words: contents that a budget does not pay for, and
measurements that are not there."""

import numpy as np

from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.policy import Policy

CONTENTS_FOLLOW = "its contents are not chosen by a score, they follow from its own"
CALIBRATE = "a calibration (`python -m experiments.calibrate` writes one)"


class NotGiven(float):
    """A default that can be told from the same number given by the user."""


def refuse_more(policy: Policy, geometry: Geometry, budget: float, held: float, what: str) -> None:
    """Refuses contents that hold more tokens, in all layers and heads, than the budget."""
    share = held / max(1, geometry.dense_tokens)
    if share > budget + 1e-9:
        policy.refuse(
            f"{what} keeps up to {share:.4f} of the full cache, more than budget={budget:g}: "
            f"keep less, leave the budget out, or give budget={np.ceil(share * 1e4) / 1e4:g}"
        )


def measured(
    policy: Policy,
    calibration: Calibration | None,
    name: str,
    geometry: Geometry,
    *,
    what: str,
    give: str = CALIBRATE,
) -> np.ndarray:
    """float64: measurement `name` of this model, which the policy cannot do without.

    Raises:
      UserError: `what` the policy has to know is not there, with what to `give` for it.
    """
    if getattr(calibration, name, None) is None:
        lacks = "" if calibration is None else f", and the calibration holds no {name}"
        raise UserError(f"policy {policy.name!r} needs to know {what}{lacks}: give {give}")
    calibration.check(geometry)
    return np.asarray(getattr(calibration, name), np.float64)
