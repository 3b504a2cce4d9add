"""The cache of one layer of a model that draws token by token, and what is written into it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import token_attention
from pallas_kernels.token_attention import HeadSlots
from varjax.core.plan import CachePlan

EVERYTHING = 2**30  # the reach of heads that see all: more positions than there are


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache(HeadSlots):
    """The slots of one layer, and what its policy observes of queries.

    A head's slots are those of the condition, then those of image tokens, and last the buffer.
    Every layer has arrays of its own: cut out of one pool they would be copied before every
    product. Fields are None unless the policy asks for them, pool and position apart.

    position: as in `HeadSlots`; in the buffer, of the tokens that the stage will write there. The
      tokens of the condition count. Where contents are known it is int32 [R, 1, M], of the
      condition's slots only: the rest follows from the number of tokens drawn.
    mass: with groups, the sum over all G query heads of a group.
    reach: `EVERYTHING` for heads that see all.
    used: None between tokens; a step of known contents says it to the kernel.
    scores: while tokens are drawn, of the window's mean query, as the stage's last token left them;
      None where a decision computes them itself (`token_attention.scores_on_the_way`).
    query_sum: float32, sum of the queries of the window in this stage; with groups, of the means
      over each group.
    queries: the newest W queries of every query head.
    skipped: slots of the ring that the newest query left out (`OffsetStep`). `mass` is then what
      the image tokens' offsets got, as slots lie now.
    """

    position: Int[Array, "R _ _"] | None = None
    query_sum: Float[Array, "R N H"] | None = None
    queries: Float[Array, "R GN W H"] | None = None
    skipped: Bool[Array, "R N _"] | None = None

    def by_head(
        self, numbers: Float[Array, "R GN *rest"], join: Callable[..., Array]
    ) -> Float[Array, "R N *rest"]:
        """Numbers of query heads, joined to one for each head of keys and values: `join` (`jnp.max`
        for example) goes along the axis of a group. As they are where heads have one query head."""
        group = self.group_size(numbers)
        if group == 1:
            return numbers
        return join(numbers.reshape(len(numbers), -1, group, *numbers.shape[2:]), axis=2)

    def with_condition(
        self, k: Float[Array, "R N M H"], v: Float[Array, "R N M H"], visible: Bool[Array, "R M"]
    ) -> "LayerCache":
        """The cache with the condition in its first slots; a token of it that is not visible leaves
        its slot empty."""
        # tokens that are not visible are stored as well: nobody reads a slot without a position
        stored = token_attention.store(self, k, v, 0)
        position = jnp.where(visible, jnp.arange(visible.shape[1], dtype=jnp.int32), -1)[:, None]
        # as many heads as the positions have: one where contents are known
        rows, heads, _ = self.position.shape
        position = jnp.broadcast_to(position, (rows, heads, visible.shape[1]))
        position = jax.lax.dynamic_update_slice(self.position, position, (0, 0, 0))
        return replace(stored, position=position)


def empty(
    plan: CachePlan, batch_size: int, dtype, compute_dtype="float32"
) -> tuple[LayerCache, ...]:
    """Zeroed caches of all layers for a batch of images (`CachePlan`)."""
    rows = batch_size * plan.geometry.rows_per_image  # two with guidance
    return tuple(_layer(plan, rows, slots, dtype, compute_dtype) for slots in plan.layer_slots)


def _layer(plan: CachePlan, rows: int, slots: int, dtype, compute_dtype) -> LayerCache:
    """The cache of a layer with what the policy of the plan asks for."""
    g, needs, size = plan.geometry, plan.rule.needs, plan.geometry.head_dim
    heads = rows, g.num_heads
    # key and value of a slot side by side, as kernels read them: half as many copies
    pool, found = jnp.zeros((*heads, slots, 2 * size), dtype), {}
    if pool.dtype == jnp.int8:
        found["scale"] = jnp.zeros((rows, 2, g.num_heads, slots), jnp.float32)
    if plan.static_content:
        # filled by `LayerCache.with_condition`; image tokens follow from their number
        position = jnp.full((rows, 1, plan.sequence.condition), -1, jnp.int32)
        if plan.allocation.reads is not None:
            # the condition and protected tokens are always read, so they have no offsets to skip
            ring = slots - plan.sequence.condition - plan.allocation.protected
            found["skipped"] = jnp.zeros((*heads, ring), bool)
            found["mass"] = jnp.zeros((*heads, slots), jnp.float32)
        return LayerCache(pool, position, **found)
    # one array for all kinds of sums: they differ in weights and in when they begin anew
    if needs.total_mass or needs.scale_mass or needs.window_mass:
        found["mass"] = jnp.zeros((*heads, slots), jnp.float32)
    # scores are linear in the query, so the sum of the window's queries is enough
    if needs.window_logits:
        found["query_sum"] = jnp.zeros((*heads, size), jnp.float32)
    # heads are grouped by the attention of the newest query
    groups = plan.allocation.group_stage is not None
    kept = needs.window if needs.window_scores else int(groups and needs.newest_mass)
    if kept:
        found["queries"] = jnp.zeros((rows, g.query_heads, kept, size), compute_dtype)
    if groups:  # all heads are global until the stage that groups them
        found["reach"] = jnp.full(heads, EVERYTHING, jnp.int32)
    return LayerCache(pool, jnp.full((*heads, slots), -1, jnp.int32), **found)
