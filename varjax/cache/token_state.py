"""The cache of one layer of a model that draws token by token, and what is written into it."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import token_attention
from varjax.cache.plan import CachePlan

EVERYTHING = 2**30  # the reach of heads that see all: more positions than there are


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's slots: those of the condition, of image tokens, and last the buffer.

    Layers have arrays of their own: cut out of one pool they would be copied before every product.

    pool: [R, N, C, 2 H], K in the first half of the last axis, V in the second.
    scale: float32 [R, 2, N, C], what keys of an int8 pool are multiplied by, then values; else
      None.
    position: int32 [R, N, C], the token in every slot (-1: empty; the condition counts); of the
      buffer, the tokens that the stage will write there. Of known contents [R, 1, M], the
      condition's only: the rest follows from what has been drawn.
    mass: float32 [R, N, C], sums of attention. query_sum: float32 [R, N, H]. queries: [R, N, W, H],
      the newest W. reach: int32 [R, N], how many of the newest positions a head sees
      (`EVERYTHING`: all). None unless the policy asks for them.
    """

    pool: Num[Array, "R N C KV"]
    position: Int[Array, "R _ _"]
    scale: Float[Array, "R 2 N C"] | None = None
    mass: Float[Array, "R N C"] | None = None
    query_sum: Float[Array, "R N H"] | None = None
    queries: Float[Array, "R N W H"] | None = None
    reach: Int[Array, "R N"] | None = None

    def with_condition(
        self, k: Float[Array, "R N M H"], v: Float[Array, "R N M H"], visible: Bool[Array, "R M"]
    ) -> "LayerCache":
        """The condition in the first slots; what is not visible of it is nobody's token."""
        stored = self.write(k, v, 0)
        position = jnp.where(visible, jnp.arange(visible.shape[1], dtype=jnp.int32), -1)[:, None]
        rows, heads, _ = self.position.shape
        position = jnp.broadcast_to(position, (rows, heads, visible.shape[1]))
        position = jax.lax.dynamic_update_slice(self.position, position, (0, 0, 0))
        return replace(stored, position=position)

    def write(
        self,
        k: Float[Array, "R N T H"],
        v: Float[Array, "R N T H"],
        slot: Int[Array, ""] | int,
    ) -> "LayerCache":
        """T tokens from slot `slot` on, the same in all rows and heads."""
        pool, scale = token_attention.store(k, v, slot, self.pool, self.scale)
        return replace(self, pool=pool, scale=scale)


def empty(
    plan: CachePlan, batch_size: int, dtype, compute_dtype="float32"
) -> tuple[LayerCache, ...]:
    """Zeroed caches of all layers for a batch of images. dtype: of the pool; int8 comes with
    scales. compute_dtype: of the queries."""
    rows = batch_size * plan.geometry.rows_per_image
    return tuple(_layer(plan, rows, slots, dtype, compute_dtype) for slots in plan.layer_slots)


def _layer(plan: CachePlan, rows: int, slots: int, dtype, compute_dtype) -> LayerCache:
    g, allocation = plan.geometry, plan.allocation
    heads = (rows, g.num_heads)
    pool = jnp.zeros((*heads, slots, 2 * g.head_dim), dtype)
    found = {}
    if pool.dtype == jnp.int8:
        found["scale"] = jnp.zeros((rows, 2, g.num_heads, slots), jnp.float32)
    if plan.static_content:
        condition = jnp.full((rows, 1, plan.sequence.condition), -1, jnp.int32)
        return LayerCache(pool, condition, **found)
    needs = plan.rule.needs
    if needs.total_mass or needs.scale_mass or needs.window_mass:
        found["mass"] = jnp.zeros((*heads, slots), jnp.float32)
    if needs.window_logits:
        found["query_sum"] = jnp.zeros((*heads, g.head_dim), jnp.float32)
    groups = allocation.group_stage is not None
    kept = needs.window if needs.window_scores else int(groups and needs.newest_mass)
    if kept:
        found["queries"] = jnp.zeros((*heads, kept, g.head_dim), compute_dtype)
    if groups:
        found["reach"] = jnp.full(heads, EVERYTHING, jnp.int32)
    return LayerCache(pool, jnp.full((*heads, slots), -1, jnp.int32), **found)
