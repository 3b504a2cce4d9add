"""The inputs that the scale loop scans over: for every scale its `StepInputs`, padded to the
longest of its segment, and for every layer what its cache reads."""

from dataclasses import dataclass

import jax
import numpy as np

from varjax.cache.layer_inputs import LayerInputs
from varjax.cache.scale_plan import ScalePlan
from varjax.codecs.maps import bilinear_neighbours
from varjax.engine.segments import Segment
from varjax.models.step_inputs import StepInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SegmentInputs:
    """Inputs of the scan over a segment's scales.

    step: what a scale reads; leading axis [scales].
    layers: what the caches of its layers read; leading axes [scales, layers].
    """

    step: StepInputs
    layers: LayerInputs


def observed_inputs(plan: ScalePlan, segment: Segment) -> dict[str, np.ndarray]:
    """The fields of `StepInputs` that the plan's policy asks for (`Needs`)."""
    rule, maps = plan.rule, plan.geometry.schedule.maps
    found = {}
    if rule.needs.window and not plan.static_content:
        # every scale has a window of the same length, so that one program serves a segment
        windows = [rule.window_tokens(*maps[s]) for s in segment.scales]
        found["window"] = np.stack([np.asarray(w, np.int32) for w in windows])
    if rule.needs.key_similarity:
        # The first scale has none before it: its own map stands in, and the result is not used.
        # All scales of a segment are padded to one length; padding gets token 0 with weight 0.
        pairs = [bilinear_neighbours(maps[max(s - 1, 0)], maps[s]) for s in segment.scales]
        names = ("neighbours", "neighbour_weights")
        for name, arrays in zip(names, zip(*pairs, strict=True), strict=True):
            padding = [((0, 0), (0, segment.length - a.shape[1])) for a in arrays]
            found[name] = np.stack([np.pad(a, p) for a, p in zip(arrays, padding, strict=True)])
    return found
