"""What looking at attention costs: FLOPs of the second pass beside those of the attention."""

from varjax.cache.plan import CachePlan
from varjax.cache.tables import CacheSegment
from varjax.engine.segments import Segment


def attention_flops(
    plan: CachePlan, segments: tuple[Segment, ...], cache: tuple[CacheSegment, ...]
) -> dict[str, float]:
    """FLOPs per image, padding included: products of queries with keys and of weights with values,
    and the products that the policy's observations repeat (`Needs`).

    Returns {"attention": ..., "observation": ..., "share": observation / attention}.
    """
    g, attention, observation = plan.geometry, 0.0, 0.0
    for segment, here in zip(segments, cache, strict=True):
        for scale in segment.scales:
            keys = plan.entries(scale) * plan.block_size + segment.length
            product = 2.0 * g.rows_per_image * g.num_layers * g.num_heads * g.head_dim * keys
            attention += 2 * product * segment.length
            observation += product * _queries(here, segment.length)
    share = observation / attention if attention else 0.0
    return {"attention": attention, "observation": observation, "share": share}


def _queries(segment: CacheSegment, length: int) -> int:
    """Queries whose scores are computed once more in each of the segment's scales."""
    needs = segment.needs
    if segment.static_content or not (segment.stores or segment.remembers):
        return 0
    queries = length if segment.sums_attention else 0
    if segment.decides:
        looks = (needs.window_mass or needs.window_attention) + needs.window_logits
        queries += needs.window * looks
    return queries
