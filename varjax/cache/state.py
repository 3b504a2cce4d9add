"""KVState: the cache that generation carries through its scans."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from varjax.cache.allocation import RegionAllocation
from varjax.cache.plan import CachePlan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVState:
    """One flat pool for all layers and heads, and what is needed to know its contents.

    kv_pool: [R, blocks, block_size, 2 H], K in the first half of the last axis, V in the second.
    position: int32 [R, slots], the token in every slot (-1: empty); None where contents are static.
    regions: int32 [L, R, N], the region that each head uses; None where heads keep their own.
    """

    kv_pool: Float[Array, "R blocks block_size KV"]
    position: Int[Array, "R slots"] | None = None
    regions: Int[Array, "L R N"] | None = None

    @classmethod
    def empty(cls, plan: CachePlan, batch_size: int, dtype) -> "KVState":
        """Zeroed state for a batch of images."""
        g, rows = plan.geometry, batch_size * plan.geometry.rows_per_image
        pool = jnp.zeros((rows, plan.pool_blocks, plan.block_size, 2 * g.head_dim), dtype)
        if plan.static_content:
            return cls(pool)
        position = jnp.full((rows, plan.pool_tokens), -1, jnp.int32)
        assert isinstance(plan.allocation, RegionAllocation)
        if plan.allocation.regroup_scale is None:
            return cls(pool, position)
        regions = jnp.broadcast_to(
            jnp.arange(g.num_heads, dtype=jnp.int32), (g.num_layers, rows, g.num_heads)
        )
        return cls(pool, position, regions)

    @property
    def block_size(self) -> int:
        return self.kv_pool.shape[2]

    @property
    def num_slots(self) -> int:
        return self.kv_pool.shape[1] * self.kv_pool.shape[2]
