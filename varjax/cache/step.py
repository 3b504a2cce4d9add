"""One layer's cache step: attend, observe, decide what survives, store.

Two strategies behind one interface, chosen per segment by `cache_step`:

    StaticStep     contents are known beforehand: read and write by table
    DecidingStep   sizes are known beforehand, a policy decides on the device what fills them

A strategy has `attend_and_store`, the traced step that the engine calls between a layer's
projection and the rest of the layer.
"""

import enum
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cache_write import BlockWrites
from pallas_kernels.cache_write.reference import order_after
from pallas_kernels.projection import Projection
from pallas_kernels.ragged_attention import BlockTable, attend
from varjax.cache.layer_inputs import LayerInputs, RegionInputs, StaticInputs
from varjax.cache.observation import Observation, Rule
from varjax.cache.observe import AttentionView, observe
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.state import Entries, KVState, arrange, store, store_entries
from varjax.models.step_inputs import StepInputs


class CacheStep(Protocol):
    """What the engine asks of a strategy."""

    def attend_and_store(
        self,
        projection: Projection,
        *,
        step: StepInputs,
        layer: Int[Array, ""],
        state: KVState,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "R T N H"], KVState]:
        """Attention output of one layer, and the cache with this scale's survivors stored.

        inputs: what the strategy reads, of this layer.
        """
        ...


def cache_step(plan: ScalePlan, scales: range, attention: str | None) -> CacheStep:
    """Return the strategy of a plan for scales that share one program. attention: implementation of
    the kernels; None takes what the platform has."""
    if plan.static_content:
        return StaticStep(any(map(plan.stores, scales)), attention)
    rule, allocation = plan.rule, plan.allocation
    regroups = allocation.regroup_scale in scales
    changes = enumerate((plan.stores, plan.selects, plan.moves), 1)
    most = (update for update, needed in changes if any(map(needed, scales)))
    return DecidingStep(
        rule=rule,
        update=Update(max(most, default=0)),
        ragged=allocation.ragged,
        regroup_scale=allocation.regroup_scale if regroups else None,
        stateful=rule.init_state(plan.geometry, 1) is not None,
        last_scale=plan.geometry.schedule.num_scales - 1,
        attention=attention,
    )


@dataclass(frozen=True)
class StaticStep:
    """Contents known beforehand. stores: whether anything of the segment is stored."""

    stores: bool
    attention: str | None

    def attend_and_store(self, projection, *, step, layer, state, inputs: StaticInputs):
        out = attend(
            *(projection, step.length, state.kv_pool, inputs.read),
            kv_scale=state.kv_scale,
            implementation=self.attention,
        )
        if self.stores:
            # a slot that this scale frees is taken by one of its tokens: write after the read
            state = store(state, projection, inputs.write, self.attention, after=out)
        return out, state


class Update(enum.IntEnum):
    """The most that may happen to a region after a scale; each includes those before it."""

    NONE = 0
    APPEND = 1  # new tokens fill the room that is left
    SELECT = 2  # and some have to be chosen
    MOVE = 3  # and stored ones may change their slot


@dataclass(frozen=True)
class DecidingStep:
    """Contents decided on the device, per row: a head's tokens are the first slots of its region.

    ragged: rows may hold fewer tokens than the capacity. regroup_scale: when heads choose their
    regions, if that is in the segment. stateful: the policy carries a state from scale to scale, so
    it is asked at every scale, the last one included.
    """

    rule: Rule
    update: Update
    ragged: bool
    regroup_scale: int | None
    stateful: bool
    last_scale: int
    attention: str | None

    # --- what the segment's program contains ------------------------------------------------------

    @property
    def stores(self) -> bool:
        return self.update >= Update.APPEND

    @property
    def decides(self) -> bool:
        """Whether the policy looks at this segment: it chooses contents or keeps a state."""
        return self.update >= Update.SELECT or self.stateful

    @property
    def observes(self) -> bool:
        return self.stores or self.stateful

    @property
    def sums_attention(self) -> bool:
        """Whether the policy is shown attention weights summed over the scale's queries."""
        needs = self.rule.needs
        per_scale = self.decides and (needs.scale_mass or needs.query_variance)
        regroups = self.regroup_scale is not None and needs.regroup_mass
        return self.observes and (per_scale or regroups or needs.total_mass)

    # --- the step ---------------------------------------------------------------------------------

    def attend_and_store(self, projection, *, step, layer, state: KVState, inputs: RegionInputs):
        stored = StoredTokens.read(state, inputs.read, layer, self.ragged)
        found = attend(
            *(projection, step.length, state.kv_pool, stored.table),
            kv_scale=state.kv_scale,
            return_lse=self.sums_attention,
            implementation=self.attention,
        )
        out, lse = found if self.sums_attention else (found, None)
        if not self.observes:
            return out, state
        view = AttentionView(projection, lse, state, stored.table, step, self.attention)
        obs = _candidates(stored, view, layer, inputs)
        obs = observe(obs, view, stored.mass, layer, self)
        obs = replace(obs, state=self.rule.update_state(obs))
        keep, obs = self._decide(obs, inputs)
        if self.stores:
            state = self._store(state, keep, stored, obs, (projection, out), layer, inputs)
        return out, _carry_over(state, obs, projection, layer)

    def _decide(self, obs: Observation, inputs: RegionInputs) -> tuple[Bool[Array, "R N K"], Any]:
        """Keep mask, and the observation with the regions that heads use from now on."""
        if self.regroup_scale is not None:
            now = obs.scale == self.regroup_scale
            regions = jnp.where(now, self.rule.regroup(obs), obs.regions)
            obs = replace(obs, regions=regions, capacity=inputs.capacity[regions])
        keep = obs.live
        if self.update >= Update.SELECT:
            keep = keep & self.rule.select(obs)
        return keep & (obs.scale < self.last_scale), obs  # nothing reads the last scale

    def _store(
        self, state: KVState, keep, stored: "StoredTokens", obs, arrays, layer, inputs
    ) -> KVState:
        """Put kept tokens into the slots of their (new) regions and record where they are.

        arrays: projection of the scale, and the attention output, which has to be there first.
        """
        projection, out = arrays
        count, following = stored.slots.shape[-1], inputs.following.for_rows(obs.regions)
        slots = following.slots(state.block_size)
        stays = obs.regions == stored.regions
        places = following.slot_mask(state.block_size)
        contents, fresh = arrange(keep, count, stays, places)
        contents = order_after(contents, out)
        state = _update_positions(state, stored, obs, slots, contents)
        if self.update == Update.MOVE:
            # The barrier keeps XLA from fusing the read of the pool into the write: a scatter that
            # reads its own operand is done on a copy of the whole pool.
            new = Entries.encode(projection.keys(), projection.values(), state.kv_pool.dtype)
            entries = Entries.read(state, stored.slots).before(new).take(contents)
            entries = jax.lax.optimization_barrier(entries)
            state = store_entries(state, jnp.where(fresh, slots, state.num_slots), entries)
        else:
            source = jnp.where(fresh, contents - count, -1)
            writes = BlockWrites(following.ids, source.reshape(*following.ids.shape, -1))
            state = store(state, projection, writes, self.attention, after=out)
        if state.regions is not None and self.regroup_scale is not None:
            state = replace(state, regions=state.regions.at[layer].set(obs.regions))
        return state


@dataclass(frozen=True)
class StoredTokens:
    """What a layer's heads hold when the scale starts, per row: P places of each head's region."""

    table: BlockTable
    slots: Int[Array, "R N P"]
    live: Bool[Array, "R N P"]
    position: Int[Array, "R N P"]
    regions: Int[Array, "R N"]
    mass: Float[Array, "R N P"] | None

    @classmethod
    def read(
        cls, state: KVState, table: BlockTable, layer: Int[Array, ""], ragged: bool
    ) -> "StoredTokens":
        rows, heads = state.kv_pool.shape[0], table.ids.shape[-2]
        if state.regions is None:
            regions = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32), (rows, heads))
            table = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), table.sliced())
        else:
            regions = state.regions[layer]
            table = table.for_rows(regions)
        slots = table.slots(state.block_size)
        # explicit row numbers: slices or vmap over rows relay the whole pool out on TPU
        row = jnp.arange(rows)[:, None, None]
        position = state.position[row, slots]
        live = table.slot_mask(state.block_size) & (position >= 0)
        mass = None if state.total_mass is None else state.total_mass[row, slots]
        if ragged:
            table = table.filled_to(live.sum(-1))
        return cls(table, slots, live, position, regions, mass)


def _candidates(
    stored: StoredTokens, view: AttentionView, layer: Int[Array, ""], inputs: RegionInputs
) -> Observation:
    """The plain observation: what is stored, then the scale's own tokens."""
    tokens, step = view.tokens, view.step
    shape = (*stored.live.shape[:2], tokens)
    own = jnp.broadcast_to(jnp.arange(tokens) < step.length, shape)
    live = jnp.concatenate([stored.live, own], axis=-1)
    position = jnp.broadcast_to(step.token_index, shape)
    position = jnp.concatenate([stored.position, position], axis=-1)
    return Observation(
        scale=step.scale,
        live=live,
        own=jnp.arange(live.shape[-1]) >= stored.live.shape[-1],
        position=jnp.where(live, position, 0),
        capacity=inputs.capacity[stored.regions],
        regions=stored.regions,
        inputs=inputs.policy,
        state=jax.tree.map(lambda a: a[layer], view.state.policy_state),
    )


def _update_positions(
    state: KVState, stored: StoredTokens, obs: Observation, slots, contents
) -> KVState:
    """Positions and accumulated attention of what the slots hold from now on. Slots that are left
    become empty first: another head may have taken them over in the same step."""
    rows, none = jnp.arange(len(slots))[:, None, None], state.num_slots
    here = jnp.where(contents >= 0, slots, none)
    chosen = jnp.maximum(contents, 0)
    vacated = jnp.where(stored.live, stored.slots, none)
    position = state.position.at[rows, vacated].set(-1, mode="drop")
    # read before anything is changed: XLA would fuse the read into the second change, and copy
    moved = jnp.take_along_axis(jax.lax.optimization_barrier(obs.position), chosen, axis=-1)
    state = replace(state, position=position.at[rows, here].set(moved, mode="drop"))
    if state.total_mass is None:
        return state
    mass = jnp.take_along_axis(obs.total_mass, chosen, axis=-1)
    return replace(state, total_mass=state.total_mass.at[rows, here].set(mass, mode="drop"))


def _carry_over(
    state: KVState, obs: Observation, projection: Projection, layer: Int[Array, ""]
) -> KVState:
    """What the layer keeps for the next scale beside its tokens."""
    if state.policy_state is not None:
        updated = jax.tree.map(
            lambda layers, new: layers.at[layer].set(new), state.policy_state, obs.state
        )
        state = replace(state, policy_state=updated)
    if state.previous_keys is not None:
        k = projection.keys()
        tokens = min(k.shape[2], state.previous_keys.shape[3])
        # the similarity reads the keys that are overwritten here
        layer = order_after(layer, obs.key_similarity)
        keys = k[:, :, :tokens].astype(state.previous_keys.dtype)
        previous = state.previous_keys.at[layer, :, :, :tokens].set(keys)
        state = replace(state, previous_keys=previous)
    return state
