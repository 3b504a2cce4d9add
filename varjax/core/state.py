"""KVState, the cache that generation carries through its scans, and how tokens are stored in it:
which candidate goes where, and what is written. All writes are in place."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, PyTree

from pallas_kernels import cache_write
from pallas_kernels.cache_write import BlockWrites, reference
from pallas_kernels.projection import Projection
from varjax.core.allocation import RegionAllocation
from varjax.core.plan import CachePlan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVState:
    """One flat pool for all layers and heads, and what is needed to know its contents.

    kv_pool: [R, blocks, block_size, 2 H], K in the first half of the last axis, V in the second.
    kv_scale: float32 [R, blocks, 2 block_size], the factors of the numbers in an int8 pool: one for
      the key of every slot of a block, then one for every value; None for other types.
    position: int32 [R, slots], the token in every slot (-1: empty); None where contents are static.
    regions: int32 [L, R, N], the region that each head uses; None where heads keep their own.
    total_mass: float32 [R, slots], attention that the token in a slot has received so far.
    previous_keys: [L, R, N, T, H], every layer's keys of the scale before.
    policy_state: what the policy carries from scale to scale, leading axis L.
    The last three are None unless the policy asks for them.
    """

    kv_pool: Num[Array, "R blocks block_size KV"]
    kv_scale: Float[Array, "R blocks two_block_size"] | None = None
    position: Int[Array, "R slots"] | None = None
    regions: Int[Array, "L R N"] | None = None
    total_mass: Float[Array, "R slots"] | None = None
    previous_keys: Float[Array, "L R N T H"] | None = None
    policy_state: PyTree[Array] = None

    @classmethod
    def empty(cls, plan: CachePlan, batch_size: int, dtype, compute_dtype="float32") -> "KVState":
        """A zeroed cache for a batch of images.

        dtype: type of the pool; an int8 pool comes with scales.
        compute_dtype: type of the keys that attention sees.
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
        # Heads start in their own regions. The map exists only where a policy will change it: a
        # table by rows takes a gather in every layer.
        regions = mass = keys = None
        if plan.allocation.regroup_scale is not None:
            heads = jnp.arange(g.num_heads, dtype=jnp.int32)
            regions = jnp.broadcast_to(heads, (g.num_layers, rows, g.num_heads))
        if plan.rule.needs.total_mass:
            mass = jnp.zeros((rows, plan.pool_tokens), jnp.float32)
        if plan.rule.needs.key_similarity:
            # only one scale is remembered, so the largest that another one follows sets the size
            tokens = max(g.schedule.tokens[:-1], default=1)
            shape = (g.num_layers, rows, g.num_heads, tokens, g.head_dim)
            keys = jnp.zeros(shape, compute_dtype)
        return cls(
            pool,
            scale,
            position=jnp.full((rows, plan.pool_tokens), -1, jnp.int32),
            regions=regions,
            total_mass=mass,
            previous_keys=keys,
            policy_state=jax.tree.map(
                lambda a: jnp.broadcast_to(jnp.asarray(a), (g.num_layers, *jnp.shape(a))),
                plan.rule.init_state(g, rows),
            ),
        )

    @property
    def block_size(self) -> int:
        return self.kv_pool.shape[2]


# --- storing ---


def read_encoded(state: KVState, slots: Int[Array, "R N P"]) -> tuple[Array, Array | None]:
    """Reads slots without decoding them, so that moving a token never rounds it again: key and
    value of every token [R, N, P, 2 H] in the pool's type, and [R, N, P, 2] the factors of both in
    an int8 pool, else None (`cache_write.reference.encode`)."""
    # explicit row numbers: slices or vmap over rows relay the whole pool out on TPU
    rows = jnp.arange(slots.shape[0])[:, None, None]
    width = state.kv_pool.shape[-1]
    values = state.kv_pool.reshape(len(rows), -1, width)[rows, slots]
    if state.kv_scale is None:
        return values, None
    flat = state.kv_scale.reshape(len(rows), -1)
    return values, flat[rows[..., None], reference.scale_slots(slots, state.block_size)]


def store(
    state: KVState,
    projection: Projection,
    writes: BlockWrites,
    implementation: str | None = None,
    after: Array | None = None,
) -> KVState:
    """Writes tokens of the scale into their slots.

    after: a result computed from the old contents of these slots. The write waits for it.
    """
    pool, scale = cache_write.write(
        state.kv_pool,
        projection,
        writes,
        kv_scale=state.kv_scale,
        after=after,
        implementation=implementation,
    )
    return replace(state, kv_pool=pool, kv_scale=scale)


def store_encoded(
    state: KVState, slots: Int[Array, "R N P"], tokens: tuple[Array, Array | None]
) -> KVState:
    """Writes encoded tokens into slots as they are. Slots outside the pool are skipped: the caller
    names one for every token that stays where it is."""
    flat = jax.tree.map(lambda a: a.reshape(len(slots), -1, a.shape[-1]), tokens)
    place = slots.reshape(len(slots), -1)
    pool, scale = reference.scatter(state.kv_pool, state.kv_scale, place, *flat)
    return replace(state, kv_pool=pool, kv_scale=scale)


def arrange(
    keep: Bool[Array, "R N K"],
    stored: int,
    stays: Bool[Array, "R N"],
    places: Bool[Array, "#R N P"],
) -> tuple[Int[Array, "R N P"], Bool[Array, "R N P"]]:
    """The candidate in each place of a head's region (-1: none), and whether it has to be written
    there. Kept candidates fill the first places, and as few as possible move.

    keep: candidates to keep. The first `stored` are in the pool already: candidate c is in place c
      of the region that the head had. The rest are new.
    stays: whether the head keeps its region.
    places: which of a table's slots belong to the region.
    """
    # Kept tokens that sit within the first `count` places stay where they are; those beyond move
    # into the holes before them, new tokens take what is left. Order within a region does not
    # matter to attention, so the fewest writes win.
    count, place = keep.sum(-1, keepdims=True), jnp.arange(places.shape[-1])
    filled = places & (jnp.cumsum(places, axis=-1) <= count)
    common = min(stored, places.shape[-1])
    # In another region slot c holds some other head's token, so nothing is in place there.
    in_place = keep[..., :common] & filled[..., :common] & stays[..., None]
    taken = jnp.pad(in_place, ((0, 0), (0, 0), (0, places.shape[-1] - common)))
    in_place = jnp.pad(in_place, ((0, 0), (0, 0), (0, keep.shape[-1] - common)))
    fresh = filled & ~taken
    # Candidates wait in their own order. The sort is stable, so results do not depend on how a
    # compiler breaks ties between equal keys.
    waiting = jnp.argsort(~(keep & ~in_place), axis=-1, stable=True)
    # the n-th place to be written takes the n-th candidate that waits
    turn = jnp.clip(jnp.cumsum(fresh, axis=-1) - 1, 0, keep.shape[-1] - 1)
    incoming = jnp.take_along_axis(waiting, turn, axis=-1).astype(jnp.int32)
    return jnp.where(fresh, incoming, jnp.where(taken, place, -1)), fresh
