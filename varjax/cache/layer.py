"""One layer's cache step: attend, decide what survives, store.

`CacheSegment` is the static side (what this segment of the program needs at all), `LayerTables` the
data of one (scale, layer), and `attend_and_store` the traced step that the engine calls between a
layer's projections and its feed-forward.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.ragged_attention import BlockTable, attend, attention_mass
from varjax.cache.plan import CachePlan
from varjax.cache.state import KVState
from varjax.cache.write import after, destinations, store
from varjax.policies.base import Observation, Policy
from varjax.segments import Segment


@dataclass(frozen=True)
class CacheSegment:
    """What a segment's program contains: stores or not, selections or not, and for which policy."""

    policy: Policy
    num_slots: int
    last_scale: int
    static_content: bool
    stores: bool
    selects: bool
    moves: bool
    ragged: bool
    regroup_scale: int | None
    attention: str | None

    @classmethod
    def of(
        cls, plan: CachePlan, policy: Policy, segment: Segment, attention: str | None
    ) -> "CacheSegment":
        scales = range(segment.start, segment.stop)
        regroup = getattr(plan.allocation, "regroup_scale", None)
        return cls(
            policy=policy,
            num_slots=plan.pool_tokens,
            last_scale=plan.geometry.schedule.num_scales - 1,
            static_content=plan.static_content,
            stores=any(plan.stores(s) for s in scales),
            selects=any(plan.selects(s) for s in scales),
            moves=any(plan.moves(s) for s in scales),
            ragged=getattr(plan.allocation, "ragged", False),
            regroup_scale=regroup if regroup in scales else None,
            attention=attention,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerTables:
    """Scan inputs: leading axes [scales of the segment, layers] are scanned away.

    read: the slots that the scale may read.
    write: int32 [N, T], slots of the scale's tokens (static contents).
    following, capacity: slots and sizes of the regions after the scale (dynamic contents).
    policy_inputs: `Policy.inputs` of the scale.
    """

    read: BlockTable
    write: Int[Array, "... N T"] | None = None
    following: BlockTable | None = None
    capacity: Int[Array, "... N"] | None = None
    policy_inputs: Any = None


def layer_tables(plan: CachePlan, segment: Segment, policy_inputs: Any) -> LayerTables:
    """Host arrays for one segment. Entries are cut to what the segment's scales need."""
    scales = np.arange(segment.start, segment.stop)
    read = _entries(plan, scales)
    if plan.static_content:
        return LayerTables(read=read, write=_write_table(plan, segment))
    following = np.minimum(scales + 1, plan.geometry.schedule.num_scales - 1)
    last = scales == plan.geometry.schedule.num_scales - 1
    capacity = np.where(last[:, None, None], 0, plan.capacity[following])
    inputs = jax.tree.map(lambda a: np.asarray(a)[scales], policy_inputs)
    return LayerTables(
        read=read, following=_entries(plan, following), capacity=capacity, policy_inputs=inputs
    )


def _entries(plan: CachePlan, scales: np.ndarray) -> BlockTable:
    m = max(plan.entries(int(s)) for s in scales)
    return BlockTable(
        *(np.ascontiguousarray(a[scales][..., :m]) for a in (plan.ids, plan.start, plan.stop))
    )


def _write_table(plan: CachePlan, segment: Segment) -> np.ndarray:
    """int32 [S, L, N, T]; `pool_tokens` where nothing is stored (padding, dropped tokens, the last
    scale)."""
    schedule = plan.geometry.schedule
    shape = (
        segment.stop - segment.start,
        plan.geometry.num_layers,
        plan.geometry.num_heads,
        segment.length,
    )
    table = np.full(shape, plan.pool_tokens, np.int32)
    assert plan.write_slots is not None
    for i, s in enumerate(range(segment.start, segment.stop)):
        slots = plan.write_slots[:, :, schedule.starts[s] : schedule.ends[s]]
        table[i, :, :, : schedule.tokens[s]] = np.where(slots >= 0, slots, plan.pool_tokens)
    return table


def attend_and_store(
    q: Float[Array, "R N T H"],
    k: Float[Array, "R N T H"],
    v: Float[Array, "R N T H"],
    *,
    scale: Int[Array, ""],
    length: Int[Array, ""],
    token_index: Int[Array, " T"],
    layer: Int[Array, ""],
    state: KVState,
    tables: LayerTables,
    segment: CacheSegment,
) -> tuple[Float[Array, "R N T H"], KVState]:
    """Attention output of one layer and the cache with this scale's survivors stored."""
    kv = jnp.concatenate([k, v], axis=-1)
    if segment.static_content:
        out = attend(q, k, v, length, state.kv_pool, tables.read, implementation=segment.attention)
        if segment.stores:
            slots = after(tables.write, out).reshape(1, -1)
            state = replace(state, kv_pool=store(state.kv_pool, slots, _rows(kv)))
        return out, state
    held = _Held.read(state, tables.read, layer, segment)
    out = attend(q, k, v, length, state.kv_pool, held.table, implementation=segment.attention)
    if segment.stores:
        own = jnp.broadcast_to(jnp.arange(q.shape[2]) < length, (*q.shape[:2], q.shape[2]))
        live = jnp.concatenate([held.live, own], axis=-1)
        position = jnp.concatenate(
            [held.position, jnp.broadcast_to(token_index, own.shape)], axis=-1
        )
        obs = Observation(
            scale=scale,
            live=live,
            position=jnp.where(live, position, 0),
            capacity=tables.capacity[held.regions],
            regions=held.regions,
            inputs=tables.policy_inputs,
        )
        obs = _observe(obs, q, k, length, state.kv_pool, held.table, segment)
        keep, regions = _decide(obs, tables, segment)
        state = _store_dynamic(state, keep, held, regions, obs, kv, out, layer, tables, segment)
    return out, state


def _rows(kv: Float[Array, "R N E W"]) -> Float[Array, "R NE W"]:
    return kv.reshape(kv.shape[0], -1, kv.shape[-1])


@dataclass(frozen=True)
class _Held:
    """What a layer's heads hold when the scale starts, per row."""

    table: BlockTable
    slots: Int[Array, "R N P"]
    live: Any
    position: Int[Array, "R N P"]
    regions: Int[Array, "R N"]

    @classmethod
    def read(cls, state: KVState, table: BlockTable, layer, segment: CacheSegment) -> "_Held":
        rows, heads = state.kv_pool.shape[0], table.ids.shape[0]
        if state.regions is None:
            regions = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32), (rows, heads))
            table = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), table)
        else:
            regions = state.regions[layer]
            table = table.for_rows(regions)
        slots = table.slots(state.block_size)
        position = state.position[jnp.arange(rows)[:, None, None], slots]
        live = table.slot_mask(state.block_size) & (position >= 0)
        if segment.ragged:
            table = table.filled_to(live.sum(-1), state.block_size)
        return cls(table, slots, live, position, regions)


def _observe(obs: Observation, q, k, length, kv_pool, table, segment: CacheSegment) -> Observation:
    """Add the attention masses that the policy asked for."""
    needs = segment.policy.needs
    if segment.selects and needs.window_mass:
        turn = (jnp.arange(needs.window) + 0.5) / needs.window
        chosen = jnp.floor(turn * length).astype(jnp.int32)
        weights = jnp.full((needs.window,), 1 / needs.window)
        mass = attention_mass(q[:, :, chosen], k, length, kv_pool, table, weights)
        obs = replace(obs, window_mass=mass)
    regroups = segment.regroup_scale is not None
    if (segment.selects and needs.scale_mass) or (regroups and needs.regroup_mass):
        weights = (jnp.arange(q.shape[2]) < length) / length
        obs = replace(obs, scale_mass=attention_mass(q, k, length, kv_pool, table, weights))
    return obs


def _decide(obs: Observation, tables: LayerTables, segment: CacheSegment):
    """(keep mask, region of every head from now on)."""
    regions = obs.regions
    if segment.regroup_scale is not None:
        regions = jnp.where(
            obs.scale == segment.regroup_scale, segment.policy.regroup(obs), regions
        )
        obs = replace(obs, regions=regions, capacity=tables.capacity[regions])
    keep = obs.live
    if segment.selects:
        keep = keep & segment.policy.select(obs)
    return keep & (obs.scale < segment.last_scale), regions


def _store_dynamic(
    state, keep, held: _Held, regions, obs, kv, out, layer, tables, segment
) -> KVState:
    """Put kept tokens into the slots of their (new) regions and keep the book of positions."""
    rows = jnp.arange(keep.shape[0])[:, None]
    stored, none = held.slots.shape[-1], segment.num_slots
    new_slots = tables.following.slots(state.block_size)[regions]
    slots, in_place = destinations(keep, stored, regions == held.regions, new_slots, none)
    slots = after(slots, out)
    vacated = jnp.where(held.live & ~in_place[..., :stored], held.slots, none)
    position = state.position.at[rows, vacated.reshape(len(rows), -1)].set(-1, mode="drop")
    position = position.at[rows, slots.reshape(len(rows), -1)].set(
        obs.position.reshape(len(rows), -1), mode="drop"
    )
    if segment.moves:
        width = kv.shape[-1]
        old = state.kv_pool.reshape(len(rows), -1, width)[rows[:, :, None], held.slots]
        # the barrier keeps XLA from reading the pool inside the write, for which it would copy it
        kv = jax.lax.optimization_barrier(jnp.concatenate([old, kv.astype(old.dtype)], axis=2))
    else:
        slots = slots[..., stored:]
    state = replace(state, position=position)
    state = replace(state, kv_pool=store(state.kv_pool, slots.reshape(len(rows), -1), _rows(kv)))
    if state.regions is not None and segment.regroup_scale is not None:
        state = replace(state, regions=state.regions.at[layer].set(regions))
    return state
