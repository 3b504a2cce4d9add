"""One layer's cache step: attend, observe, decide what survives, store.

`attend_and_store` is the traced step that the engine calls between a layer's projections and its
feed-forward.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cache_write import BlockWrites
from pallas_kernels.ragged_attention import BlockTable, attend
from varjax.cache.observe import AttentionView, observe
from varjax.cache.state import KVState
from varjax.cache.tables import CacheSegment, LayerTables, ScaleTables
from varjax.cache.write import Entries, arrange, order_after, store, store_entries
from varjax.policies.base import Observation


def attend_and_store(
    q: Float[Array, "R N T H"],
    k: Float[Array, "R N T H"],
    v: Float[Array, "R N T H"],
    *,
    raw_queries: Float[Array, "R N T H"] | None = None,
    now: ScaleTables,
    layer: Int[Array, ""],
    state: KVState,
    tables: LayerTables,
    segment: CacheSegment,
) -> tuple[Float[Array, "R N T H"], KVState]:
    """Attention output of one layer and the cache with this scale's survivors stored."""

    def attention(table: BlockTable):
        found = attend(
            *(q, k, v, now.length, state.kv_pool, table),
            kv_scale=state.kv_scale,
            return_lse=segment.sums_attention,
            implementation=segment.attention,
        )
        return found if segment.sums_attention else (found, None)

    if segment.static_content:
        out, _ = attention(tables.read)
        if segment.stores:
            writes = replace(tables.write, ids=order_after(tables.write.ids, out))
            state = store(state, k, v, writes, segment.attention)
        return out, state
    held = StoredTokens.read(state, tables.read, layer, segment)
    out, lse = attention(held.table)
    if segment.stores or segment.remembers:
        look = AttentionView(q, k, raw_queries, lse, state, held.table, now, segment.attention)
        obs = _candidates(held, look, layer, tables)
        obs = observe(obs, look, held.mass, layer, segment)
        obs = replace(obs, state=segment.policy.update_state(obs))
        keep, obs = _decide(obs, tables, segment)
        if segment.stores:
            state = _store_dynamic(state, keep, held, obs, (k, v, out), layer, tables, segment)
        state = _carry(state, obs, k, layer)
    return out, state


@dataclass(frozen=True)
class StoredTokens:
    """What a layer's heads hold when the scale starts, per row."""

    table: BlockTable
    slots: Int[Array, "R N P"]
    live: Any
    position: Int[Array, "R N P"]
    regions: Int[Array, "R N"]
    mass: Float[Array, "R N P"] | None

    @classmethod
    def read(
        cls, state: KVState, table: BlockTable, layer, segment: CacheSegment
    ) -> "StoredTokens":
        rows, heads = state.kv_pool.shape[0], table.ids.shape[0]
        if state.regions is None:
            regions = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32), (rows, heads))
            table = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), table)
        else:
            regions = state.regions[layer]
            table = table.for_rows(regions)
        slots = table.slots(state.block_size)
        row = jnp.arange(rows)[:, None, None]
        position = state.position[row, slots]
        live = table.slot_mask(state.block_size) & (position >= 0)
        mass = None if state.total_mass is None else state.total_mass[row, slots]
        if segment.ragged:
            table = table.filled_to(live.sum(-1), state.block_size)
        return cls(table, slots, live, position, regions, mass)


def _candidates(held: StoredTokens, look: AttentionView, layer, tables: LayerTables) -> Observation:
    """The plain observation: what is stored, then the scale's own tokens."""
    tokens = look.k.shape[2]
    shape = (*held.live.shape[:2], tokens)
    own = jnp.broadcast_to(jnp.arange(tokens) < look.now.length, shape)
    live = jnp.concatenate([held.live, own], axis=-1)
    position = jnp.broadcast_to(look.now.token_index, shape)
    position = jnp.concatenate([held.position, position], axis=-1)
    memory = jax.tree.map(lambda a: a[layer], look.state.policy_state)
    return Observation(
        scale=look.now.scale,
        live=live,
        own=jnp.arange(live.shape[-1]) >= held.live.shape[-1],
        position=jnp.where(live, position, 0),
        capacity=tables.capacity[held.regions],
        regions=held.regions,
        inputs=tables.policy_inputs,
        state=memory,
    )


def _decide(obs: Observation, tables: LayerTables, segment: CacheSegment):
    """Keep mask, and the observation with the regions that heads use from now on."""
    if segment.regroup_scale is not None:
        regroup = obs.scale == segment.regroup_scale
        regions = jnp.where(regroup, segment.policy.regroup(obs), obs.regions)
        obs = replace(obs, regions=regions, capacity=tables.capacity[regions])
    keep = obs.live
    if segment.selects:
        keep = keep & segment.policy.select(obs)
    return keep & (obs.scale < segment.last_scale), obs


def _store_dynamic(
    state, keep, held: StoredTokens, obs: Observation, layer_arrays, layer, tables, segment
) -> KVState:
    """Put kept tokens into the slots of their (new) regions and keep the book of positions.

    layer_arrays: own keys and values, and the attention output, which has to be there first.
    """
    k, v, out = layer_arrays
    stored, following = held.slots.shape[-1], tables.following.for_rows(obs.regions)
    slots = following.slots(state.block_size)
    stays = obs.regions == held.regions
    contents, fresh = arrange(keep, stored, stays, slots.shape[-1])
    contents = order_after(contents, out)
    state = _update_positions(state, held, obs, slots, contents)
    if segment.moves:
        # the barrier keeps XLA from reading the pool inside the write, for which it would copy it
        new = Entries.encode(k, v, state.kv_pool.dtype)
        entries = Entries.read(state, held.slots).before(new).take(contents)
        entries = jax.lax.optimization_barrier(entries)
        state = store_entries(state, jnp.where(fresh, slots, segment.num_slots), entries)
    else:
        source = jnp.where(fresh, contents - stored, -1)
        writes = BlockWrites(following.ids, source.reshape(*following.ids.shape, -1))
        state = store(state, k, v, writes, segment.attention)
    if state.regions is not None and segment.regroup_scale is not None:
        state = replace(state, regions=state.regions.at[layer].set(obs.regions))
    return state


def _update_positions(
    state: KVState, held: StoredTokens, obs: Observation, slots, contents
) -> KVState:
    """Positions and accumulated attention of what the slots hold from now on."""
    rows, none = jnp.arange(len(slots))[:, None, None], state.num_slots
    here = jnp.where(contents >= 0, slots, none)
    chosen = jnp.maximum(contents, 0)
    vacated = jnp.where(held.live, held.slots, none)
    position = state.position.at[rows, vacated].set(-1, mode="drop")
    position = position.at[rows, here].set(
        jnp.take_along_axis(obs.position, chosen, axis=-1), mode="drop"
    )
    state = replace(state, position=position)
    if state.total_mass is None:
        return state
    mass = jnp.take_along_axis(obs.total_mass, chosen, axis=-1)
    return replace(state, total_mass=state.total_mass.at[rows, here].set(mass, mode="drop"))


def _carry(state: KVState, obs: Observation, k, layer) -> KVState:
    """What the layer remembers for the next scale."""
    if state.policy_state is not None:
        memory = jax.tree.map(
            lambda all_, new: all_.at[layer].set(new), state.policy_state, obs.state
        )
        state = replace(state, policy_state=memory)
    if state.previous_keys is not None:
        tokens = min(k.shape[2], state.previous_keys.shape[3])
        layer = order_after(layer, obs.key_similarity)
        keys = k[:, :, :tokens].astype(state.previous_keys.dtype)
        stored = state.previous_keys.at[layer, :, :, :tokens].set(keys)
        state = replace(state, previous_keys=stored)
    return state
