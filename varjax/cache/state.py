"""KVState, the cache that generation carries through its scans, and storing tokens in it in place:
which candidate goes where, and what is written."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import cache_write
from pallas_kernels.cache_write import BlockWrites, reference
from pallas_kernels.projection import Projection
from varjax.cache.allocation import RegionAllocation
from varjax.cache.observation import Needs
from varjax.cache.plan import CachePlan


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
            **_observed(plan, plan.rule.needs, rows, compute_dtype),
            policy_state=jax.tree.map(
                lambda a: jnp.broadcast_to(jnp.asarray(a), (g.num_layers, *jnp.shape(a))),
                plan.rule.init_state(g, rows),
            ),
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


# --- storing ---


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Entries:
    """Tokens as the pool holds them: values [R, N, E, 2 H] and, in an int8 pool, the scales of keys
    and values, float32 [R, N, E, 2]."""

    values: Array
    scales: Float[Array, "R N E 2"] | None = None

    @classmethod
    def encode(cls, k: Float[Array, "R N E H"], v: Float[Array, "R N E H"], dtype) -> "Entries":
        """Tokens in the type of the pool. int8: each token's key and value are divided by their
        largest magnitude / 127 and rounded."""
        return cls(*reference.encode(k, v, dtype))

    @classmethod
    def read(cls, state: KVState, slots: Int[Array, "R N P"]) -> "Entries":
        """What is stored in some slots, as it is stored."""
        # explicit row numbers: slices or vmap over rows relay the whole pool out on TPU
        rows = jnp.arange(slots.shape[0])[:, None, None]
        width = state.kv_pool.shape[-1]
        values = state.kv_pool.reshape(len(rows), -1, width)[rows, slots]
        if state.kv_scale is None:
            return cls(values)
        flat = state.kv_scale.reshape(len(rows), -1)
        return cls(values, flat[rows[..., None], reference.scale_slots(slots, state.block_size)])

    def before(self, later: "Entries") -> "Entries":
        """These entries followed by others."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), self, later)

    def take(self, index: Int[Array, "R N P"]) -> "Entries":
        """Entries by their number in each head; negative numbers take any."""
        index = jnp.maximum(index, 0)[..., None]
        return jax.tree.map(lambda a: jnp.take_along_axis(a, index, axis=2), self)


def store(
    state: KVState,
    projection: Projection,
    writes: BlockWrites,
    implementation: str | None = None,
    after: Array | None = None,
) -> KVState:
    """Write tokens of the scale into their slots. after: what has been read from them before."""
    options = {"kv_scale": state.kv_scale, "after": after, "implementation": implementation}
    pool, scale = cache_write.write(state.kv_pool, projection, writes, **options)
    return replace(state, kv_pool=pool, kv_scale=scale)


def store_entries(state: KVState, slots: Int[Array, "R N P"], entries: Entries) -> KVState:
    """Write entries as they are into slots; slots outside the pool are skipped."""
    flat = jax.tree.map(lambda a: a.reshape(len(slots), -1, a.shape[-1]), entries)
    pool, scale = reference.scatter(
        state.kv_pool, state.kv_scale, slots.reshape(len(slots), -1), flat.values, flat.scales
    )
    return replace(state, kv_pool=pool, kv_scale=scale)


def arrange(
    keep: Bool[Array, "R N K"],
    stored: int,
    stays: Bool[Array, "R N"],
    places: Bool[Array, "#R N P"],
) -> tuple[Int[Array, "R N P"], Bool[Array, "R N P"]]:
    """Which candidate sits in each place of a head's region, so that the kept ones are the first
    and the fewest are moved.

    Args:
      keep: candidates to keep; the first `stored` of them are in the pool already, candidate c in
        place c of the region that the head had; the rest are new.
      stays: whether the head keeps its region.
      places: which of a table's slots are the region's.

    Returns:
      The candidate in every place (-1: none), and whether it has to be written there.
    """
    # Kept tokens that sit within the first `count` places stay where they are; those beyond move
    # into the holes before them, new tokens take what is left. Order within a region does not
    # matter to attention, so the fewest writes win.
    count, place = keep.sum(-1, keepdims=True), jnp.arange(places.shape[-1])
    filled = places & (jnp.cumsum(places, axis=-1) <= count)
    common = min(stored, places.shape[-1])
    in_place = keep[..., :common] & filled[..., :common] & stays[..., None]
    taken = jnp.pad(in_place, ((0, 0), (0, 0), (0, places.shape[-1] - common)))
    in_place = jnp.pad(in_place, ((0, 0), (0, 0), (0, keep.shape[-1] - common)))
    fresh = filled & ~taken
    # in the order of candidates (stable): results do not depend on how the sort breaks ties
    waiting = jnp.argsort(~(keep & ~in_place), axis=-1, stable=True)
    turn = jnp.clip(jnp.cumsum(fresh, axis=-1) - 1, 0, keep.shape[-1] - 1)
    incoming = jnp.take_along_axis(waiting, turn, axis=-1).astype(jnp.int32)
    return jnp.where(fresh, incoming, jnp.where(taken, place, -1)), fresh
