"""Which layers AMS-KV takes for demanding: named, spread, measured, or by a threshold.

A policy is an `AMSKV` whose arguments were checked.
"""

import dataclasses

import numpy as np

from varjax.cache.geometry import Geometry
from varjax.calibration.data import Calibration
from varjax.policies import amskv_arguments as arguments
from varjax.policies.amskv_arguments import BY_SIMILARITY, UNIFORM
from varjax.policies.base import NotGiven

UNIT_KEYS_THRESHOLD = NotGiven(-1.0)  # keys of norm 1 that stand at 60 degrees


def decide(policy, geometry: Geometry, calibration: Calibration | None, guess: bool):
    """The policy with its demanding layers named, or in online mode with its threshold.

    guess: without a calibration take the first layers. If nothing else says which layers, the
    policy comes back as it is: `below` then complains (as `select` of `compose` nobody asks).
    """
    online = policy.mode == "online"
    if policy.remove or (policy.layers and not online):
        return policy
    automatic = max(1, round(geometry.num_layers / 4))
    number = policy.demanding if policy.demanding >= 0 else automatic
    if online:
        return _with_threshold(policy, geometry, calibration, number)
    if policy.theta:
        return policy
    if policy.placement == UNIFORM:
        turn = (np.arange(number) + 0.5) / max(1, number)
        chosen = np.floor(turn * geometry.num_layers).astype(int)
    elif number in (0, geometry.num_layers) or (guess and calibration is None):
        chosen = np.arange(number)
    elif _is_measured(calibration):
        chosen = np.argsort(-_mean(geometry, calibration), kind="stable")[:number]
    else:
        return policy
    names = ";".join(map(str, sorted(chosen.tolist()))) or "none"
    return dataclasses.replace(policy, layers=names, demanding=number, placement=BY_SIMILARITY)


def below(policy, geometry: Geometry, calibration: Calibration | None) -> np.ndarray:
    """bool [L, K]: where the similarity test of Algorithm 1 finds a demanding layer.

    Raises:
      UserError: that takes a calibration.
    """
    shape = (geometry.num_layers, geometry.schedule.num_scales)
    if policy.theta:
        found = -_measured(geometry, calibration) < policy.theta
        found[:, 0] = False
        return found
    policy = policy if policy.layers else decide(policy, geometry, calibration, guess=False)
    if not policy.layers:
        _measured(geometry, calibration)
    named = arguments.named_layers(policy.layers, geometry.num_layers)
    return np.broadcast_to(np.isin(np.arange(geometry.num_layers), named)[:, None], shape)


def _with_threshold(policy, geometry: Geometry, calibration, number: int):
    """In online mode theta is the one argument that a calibration can decide."""
    measured = _is_measured(calibration)
    if policy.demanding >= 0 and (policy.theta or not measured):
        arguments.refuse(
            f"mode=online: demanding={policy.demanding} can only choose theta, and needs a "
            f"calibration with key_discrepancy and no theta for that; leave it out"
        )
    theta = policy.theta or UNIT_KEYS_THRESHOLD
    if measured and not policy.theta:
        mean = np.sort(_mean(geometry, calibration))
        mean = np.concatenate([[0.0], mean, [2 * mean[-1] + 1]])
        place = geometry.num_layers - number
        theta = -float(mean[place : place + 2].mean())
    return dataclasses.replace(policy, theta=theta, demanding=-1)


def _is_measured(calibration: Calibration | None) -> bool:
    return calibration is not None and calibration.key_discrepancy is not None


def _mean(geometry: Geometry, calibration: Calibration) -> np.ndarray:
    """float64 [L]: discrepancy of a layer over the scales that have one before them."""
    return _measured(geometry, calibration)[:, 1:].sum(1) / max(1, geometry.schedule.num_scales - 1)


def _measured(geometry: Geometry, calibration: Calibration | None) -> np.ndarray:
    """key_discrepancy float64 [L, K] of the calibration."""
    found = None if calibration is None else calibration.key_discrepancy
    if found is None:
        arguments.refuse(
            "which layers are demanding is measured on the model: give --calibration=FILE with "
            "key_discrepancy (python -m experiments.calibrate writes it), or name them "
            "(layers=0;3;5), or spread them (placement=uniform), or choose mode=online"
        )
    wanted = (geometry.num_layers, geometry.schedule.num_scales)
    if np.shape(found) != wanted:
        arguments.refuse(
            f"the calibration's key_discrepancy has shape {np.shape(found)}, this model needs "
            f"{wanted} (layers, scales); calibrate this model"
        )
    return np.asarray(found)
