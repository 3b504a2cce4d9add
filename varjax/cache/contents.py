"""Which tokens every head holds, of one image: the same answer for contents that are known
beforehand and for those that a policy decides on the device.

Letters: L layers, N heads, F image tokens that are ever stored (all scales but the last, or all
image tokens but the last).
"""

import numpy as np
from jaxtyping import Bool, PyTree

from varjax.cache.plan import CachePlan
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.stages import TokenPlan


def at_the_end(plan: CachePlan, found: PyTree, row: int = 0) -> Bool[np.ndarray, "L N F"]:
    """The tokens that each head holds when the last scale, or the last token, is drawn.

    found: scale by scale the "contents" that a generator with `keep_contents` returns; token by
      token the final cache. Where contents are known beforehand it is not looked at.
    row: of the cache; row i of a batch is its image i with its condition.
    """
    of_kind = _of_tokens if isinstance(plan, TokenPlan) else _of_scales
    return of_kind(plan, found, row)


def _of_scales(plan: ScalePlan, found: PyTree, row: int) -> np.ndarray:
    g, last = plan.geometry, plan.geometry.schedule.num_scales - 1
    if plan.static_content:
        return plan.allocation.visible(g, last)[..., : g.schedule.persistent_tokens]
    kept = np.zeros((g.num_layers, g.num_heads, g.schedule.persistent_tokens), bool)
    if last == 0:
        return kept
    # after the scale before the last one: the last one reads that cache and stores nothing
    position = np.asarray(found["position"])[last - 1, row]
    regions = np.broadcast_to(np.arange(g.num_heads), kept.shape[:2])
    if found["regions"] is not None:
        regions = np.asarray(found["regions"])[last - 1, :, row]
    # slots of every region, [L, N, table entries x slots of a block], and which of them it uses
    inside = np.arange(plan.block_size)
    slots = plan.ids[last][..., None] * plan.block_size + inside
    used = (inside >= plan.start[last][..., None]) & (inside < plan.stop[last][..., None])
    slots, used = (a.reshape(*kept.shape[:2], -1) for a in (slots, used))
    layer, head, place = np.nonzero(np.take_along_axis(used, regions[..., None], axis=1))
    token = position[slots[layer, regions[layer, head], place]]
    there = token >= 0  # rows may hold fewer tokens than their regions have room for
    kept[layer[there], head[there], token[there]] = True
    return kept


def _of_tokens(plan: TokenPlan, found: PyTree, row: int) -> np.ndarray:
    g, allocation, condition = plan.geometry, plan.allocation, plan.sequence.condition
    # the last token is drawn and never stored
    steps = plan.sequence.steps
    kept = np.zeros((g.num_layers, g.num_heads, steps), bool)
    for layer in range(g.num_layers):
        if plan.static_content:  # a ring of the newest tokens behind those that stay
            ring = int(allocation.slots[layer]) - allocation.protected
            token = np.arange(steps)
            kept[layer] = (token < allocation.protected) | (token >= steps - ring)
            continue
        # slots of the condition and empty ones get numbers outside of the image's tokens
        position = np.asarray(found[layer].position)[row] - condition
        head, slot = np.nonzero((position >= 0) & (position < steps))
        kept[layer, head, position[head, slot]] = True
    return kept
