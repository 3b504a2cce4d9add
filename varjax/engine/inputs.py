"""The inputs that the scale loop scans over: for every scale its `StepInputs`, padded to the
longest of its segment, and for every layer what its cache reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from varjax.cache.layer_inputs import LayerInputs, join_heads, layer_inputs
from varjax.cache.scale_plan import ScalePlan
from varjax.codecs.maps import bilinear_neighbours
from varjax.engine.segments import Segment
from varjax.models.step_inputs import Resampling, StepInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SegmentInputs:
    """Inputs of the scan over a segment's scales.

    step: what a scale reads; leading axis [scales].
    layers: what the caches of its layers read; leading axes [scales, layers].
    """

    step: StepInputs
    layers: LayerInputs


def shared_inputs(
    groups: Sequence[ScalePlan], segments: tuple[Segment, ...], resampling: Resampling
) -> tuple[SegmentInputs, ...]:
    """The host arrays of all segments that are the same for every batch: all but what a policy
    wants to know about the images.

    groups: the plan of each group of heads (`CachePlan.divide`); their tables lie side by side.
    """
    # Kept apart because they are slow: for VAR-d30 they take 0.3 s on a CPU of 2026, longer than
    # drawing an image on a GPU should.
    schedule, plan = groups[0].geometry.schedule, groups[0]
    return tuple(
        SegmentInputs(
            StepInputs.of(schedule, s.scales, s.length, resampling, **observed_inputs(plan, s)),
            join_heads([layer_inputs(group, s.scales, s.length) for group in groups]),
        )
        for s in segments
    )


def for_images(
    shared: tuple[SegmentInputs, ...],
    plan: ScalePlan,
    segments: tuple[Segment, ...],
    image_index: np.ndarray,
) -> tuple[SegmentInputs, ...]:
    """`shared_inputs` with what the policy wants to know about these images."""
    # static contents do not depend on images: nothing has to be copied
    if plan.static_content:
        return shared
    inputs = plan.policy_inputs(image_index)

    # `replace` keeps the shared arrays, which may be on the device already
    def filled(given: SegmentInputs, segment: Segment) -> SegmentInputs:
        mine = jax.tree.map(lambda a: np.asarray(a)[np.asarray(segment.scales)], inputs)
        return replace(given, layers=replace(given.layers, policy=mine))

    return tuple(map(filled, shared, segments))


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
