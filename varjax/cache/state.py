"""KVState: the cache that generation carries through its scans."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from varjax.cache.allocation import RegionAllocation
from varjax.cache.plan import CachePlan
from varjax.policies.base import Needs, Policy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVState:
    """One flat pool for all layers and heads, and what is needed to know its contents.

    kv_pool: [R, blocks, block_size, 2 H], K in the first half of the last axis, V in the second.
    kv_scale: float32 [R, blocks, 2 block_size], what the numbers of an int8 pool are multiplied by:
      scales of the keys of a block's slots, then of the values; None for other types.
    position: int32 [R, slots], the token in every slot (-1: empty); None where contents are static.
    regions: int32 [L, R, N], the region that each head uses; None where heads keep their own.
    total_mass: float32 [R, slots], attention that the token in a slot has received so far.
    previous_keys: [L, R, N, T, H], keys of the scale before, of all layers.
    policy_state: what the policy carries from scale to scale, leading axis L.
    The last three are None unless the policy asks for them.
    """

    kv_pool: Num[Array, "R blocks block_size KV"]
    kv_scale: Float[Array, "R blocks two_block_size"] | None = None
    position: Int[Array, "R slots"] | None = None
    regions: Int[Array, "L R N"] | None = None
    total_mass: Float[Array, "R slots"] | None = None
    previous_keys: Float[Array, "L R N T H"] | None = None
    policy_state: Any = None

    @classmethod
    def empty(cls, plan: CachePlan, batch_size: int, dtype, compute_dtype="float32") -> "KVState":
        """Zeroed state for a batch of images.

        dtype: of the pool; int8 comes with scales. compute_dtype: of the keys that attention sees.
        """
        policy = plan.policy or Policy()
        g, rows = plan.geometry, batch_size * plan.geometry.rows_per_image
        # K and V of a token side by side: on TPU the last axis is padded to 128 lanes, and heads of
        # 64 in pools of their own would take twice the bytes that were planned.
        pool = jnp.zeros((rows, plan.pool_blocks, plan.block_size, 2 * g.head_dim), dtype)
        scale = None
        if pool.dtype == jnp.int8:
            scale = jnp.zeros((rows, plan.pool_blocks, 2 * plan.block_size), jnp.float32)
        if plan.static_content:
            return cls(pool, scale)
        assert isinstance(plan.allocation, RegionAllocation)
        regions = None
        if plan.allocation.regroup_scale is not None:
            heads = jnp.arange(g.num_heads, dtype=jnp.int32)
            regions = jnp.broadcast_to(heads, (g.num_layers, rows, g.num_heads))
        return cls(
            pool,
            scale,
            position=jnp.full((rows, plan.pool_tokens), -1, jnp.int32),
            regions=regions,
            **_observed(plan, policy.needs, rows, compute_dtype),
            policy_state=_policy_state(plan, policy, rows),
        )

    @property
    def block_size(self) -> int:
        return self.kv_pool.shape[2]

    @property
    def num_slots(self) -> int:
        return self.kv_pool.shape[1] * self.kv_pool.shape[2]


def _observed(plan: CachePlan, needs: Needs, rows: int, dtype) -> dict[str, Array]:
    """Arrays that observations are carried in."""
    g, found = plan.geometry, {}
    if needs.total_mass:
        found["total_mass"] = jnp.zeros((rows, plan.pool_tokens), jnp.float32)
    if needs.key_similarity:
        # of the scale before only: one scale's keys of all layers, the largest that is followed
        tokens = max(g.schedule.tokens[:-1], default=1)
        shape = (g.num_layers, rows, g.num_heads, tokens, g.head_dim)
        found["previous_keys"] = jnp.zeros(shape, dtype)
    return found


def _policy_state(plan: CachePlan, policy: Policy, rows: int) -> Any:
    layers = plan.geometry.num_layers
    return jax.tree.map(
        lambda a: jnp.broadcast_to(jnp.asarray(a), (layers, *jnp.shape(a))),
        policy.init_state(plan.geometry, rows),
    )
