"""One layer's cache step: attend, observe, decide what survives, store.

Two strategies behind one interface, chosen per segment by `cache_step`:

    StaticStep     contents are known beforehand: the tables say what to read and where to write
    DecidingStep   sizes are known beforehand: a policy decides on the device what fills them
"""

import enum
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cache_write import BlockWrites, reference
from pallas_kernels.cache_write.reference import order_after
from pallas_kernels.projection import Projection
from pallas_kernels.ragged_attention import attend, store_and_attend
from varjax.core import observe
from varjax.core.layer_inputs import RegionInputs, StaticInputs
from varjax.core.observation import Observation
from varjax.core.observe import LayerView
from varjax.core.policy import Rule
from varjax.core.scale_plan import ScalePlan
from varjax.core.state import KVState, arrange, read_encoded, store, store_encoded
from varjax.core.step_inputs import StepInputs


def cache_step(plan: ScalePlan, scales: range, attention: str | None) -> "CacheStep":
    """The strategy of a plan for scales that share one program.

    attention: implementation of the kernels; None takes what the platform has.
    """
    if plan.static_content:
        return StaticStep(any(map(plan.stores, scales)), attention)
    rule, allocation = plan.rule, plan.allocation
    regroups = allocation.regroup_scale in scales
    # One compiled body serves the whole segment, so it has to do the most that any scale needs.
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
    """Contents known beforehand.

    stores: whether anything of the segment is stored.
    attention: implementation of the kernels.
    """

    stores: bool
    attention: str | None

    def attend_and_store(
        self,
        projection: Projection,
        *,
        step: StepInputs,
        layer: Int[Array, ""],
        state: KVState,
        inputs: StaticInputs,
    ) -> tuple[Float[Array, "R T N H"], KVState]:
        """The attention output of one layer, and the cache with the scale's survivors.

        projection: queries, keys and values of the scale.
        inputs: the layer's tables, and what its policy knows beforehand.
        """
        options = dict(kv_scale=state.kv_scale, implementation=self.attention)
        given = (projection, step.length, state.kv_pool, inputs.read)
        if self.stores and inputs.apart:
            options |= dict(following=inputs.following)
            out, pool, scale = store_and_attend(*given, inputs.write, **options)
            return out, replace(state, kv_pool=pool, kv_scale=scale)
        out = attend(*given, **options)
        if self.stores:
            # A slot that this scale frees is taken by one of its own tokens. `after` makes the
            # write wait for the read: without it XLA copies the pool in every layer (CPU, GPU).
            state = store(state, projection, inputs.write, self.attention, after=out)
        return out, state  # pyright: ignore[reportReturnType]


class Update(enum.IntEnum):
    """The most that may happen to a region after a scale; each includes those before it."""

    NONE = 0
    APPEND = 1  # new tokens fill the room that is left
    SELECT = 2  # and some have to be chosen
    MOVE = 3  # and stored ones may change their slot


@dataclass(frozen=True)
class DecidingStep:
    """Contents decided on the device, per row: a head's tokens are the first slots of its region.

    rule: what the policy does on this kind of model.
    update: the most that happens to a region in this segment.
    ragged: whether rows may hold fewer tokens than the capacity.
    regroup_scale: the scale at which heads choose their regions, if it is in the segment.
    stateful: whether the policy carries a state from scale to scale. It is then asked at every
      scale, the last one included.
    last_scale: index of the last scale, of which nothing is kept.
    attention: implementation of the kernels.
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
        """Whether anything of the segment is stored."""
        return self.update >= Update.APPEND

    @property
    def decides(self) -> bool:
        """Whether the policy looks at this segment: it chooses contents or keeps a state."""
        return self.update >= Update.SELECT or self.stateful

    @property
    def observes(self) -> bool:
        """Whether the segment's program builds an observation at all."""
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
        how = {"ragged": self.ragged, "implementation": self.attention}
        view = LayerView.of(projection, step, state, inputs.read, layer, **how)
        given = (projection, step.length, state.kv_pool, view.table)
        options = dict(kv_scale=state.kv_scale, implementation=self.attention)
        found = attend(*given, return_lse=self.sums_attention, **options)
        out, lse = found if self.sums_attention else (found, None)
        if not self.observes:
            return out, state
        view, needs = replace(view, lse=lse), self.rule.needs
        obs = _candidates(view, layer, inputs)
        if self.decides and needs.window:
            obs = observe.observe_window(obs, view, needs)
        if self.sums_attention:
            obs = observe.sum_over_queries(obs, view, needs)
        if needs.key_similarity:
            obs = replace(obs, key_similarity=observe.key_similarity(view, layer))
        # before the decision: `select` sees the newest state
        obs = replace(obs, state=self.rule.update_state(obs))
        keep, obs = self._decide(obs, inputs)
        if self.stores:
            state = self._store(keep, obs, view, out, layer, inputs)
        return out, _carry_over(state, obs, projection, layer)

    def _decide(
        self, obs: Observation, inputs: RegionInputs
    ) -> tuple[Bool[Array, "R N K"], Observation]:
        """Which candidates stay, and the observation with the regions that heads use from now."""
        if self.regroup_scale is not None:
            # The segment's other scales run the same program, so the scale is compared as data.
            now = obs.scale == self.regroup_scale
            regions = jnp.where(now, self.rule.regroup(obs), obs.regions)
            obs = replace(obs, regions=regions, capacity=inputs.capacity[regions])
        keep = obs.live
        if self.update >= Update.SELECT:
            keep = keep & self.rule.select(obs)
        return keep & (obs.scale < self.last_scale), obs  # nothing reads the last scale

    def _store(
        self,
        keep: Bool[Array, "R N K"],
        obs: Observation,
        view: LayerView,
        out: Float[Array, "R T N H"],
        layer: Int[Array, ""],
        inputs: RegionInputs,
    ) -> KVState:
        """Puts kept tokens into the slots of their (new) regions, once the attention output `out`
        has read them, and records where they are."""
        state, projection = view.state, view.projection
        count, following = view.slots.shape[-1], inputs.following.for_rows(obs.regions)
        slots = following.slots(state.block_size)
        stays = obs.regions == view.regions
        places = following.slot_mask(state.block_size)
        contents, fresh = arrange(keep, count, stays, places)
        # Every write below depends on `contents`, so all of them wait for the read.
        contents = order_after(contents, out)
        state = _update_positions(state, view, obs, slots, contents)
        if self.update == Update.MOVE:
            # The barrier keeps XLA from fusing the read of the pool into the write: a scatter that
            # reads its own operand is done on a copy of the whole pool.
            new = reference.encode(projection.keys(), projection.values(), state.kv_pool.dtype)
            both = read_encoded(state, view.slots), new
            tokens = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), *both)
            index = jnp.maximum(contents, 0)[..., None]  # of none an arbitrary one, never stored
            tokens = jax.tree.map(lambda a: jnp.take_along_axis(a, index, axis=2), tokens)
            tokens = jax.lax.optimization_barrier(tokens)
            state = store_encoded(state, jnp.where(fresh, slots, state.position.shape[1]), tokens)
        else:
            # Stored tokens keep their slots, so only the scale's own ones are written. Candidates
            # count stored tokens first, the kernel counts the scale's own from 0.
            source = jnp.where(fresh, contents - count, -1)
            writes = BlockWrites(following.ids, source.reshape(*following.ids.shape, -1))
            state = store(state, projection, writes, self.attention, after=out)
        if state.regions is not None and self.regroup_scale is not None:
            state = replace(state, regions=state.regions.at[layer].set(obs.regions))
        return state


CacheStep = StaticStep | DecidingStep


def _candidates(view: LayerView, layer: Int[Array, ""], inputs: RegionInputs) -> Observation:
    """The plain observation: the candidates are what is held, then the scale's own tokens."""
    tokens, step = view.projection.shape[2], view.step
    shape = (*view.live.shape[:2], tokens)
    own = jnp.broadcast_to(jnp.arange(tokens) < step.length, shape)
    live = jnp.concatenate([view.live, own], axis=-1)
    position = jnp.broadcast_to(step.token_index, shape)
    position = jnp.concatenate([view.position, position], axis=-1)
    return Observation(
        scale=step.scale,
        live=live,
        own=jnp.arange(live.shape[-1]) >= view.live.shape[-1],
        position=jnp.where(live, position, 0),
        capacity=inputs.capacity[view.regions],
        regions=view.regions,
        inputs=inputs.policy,
        state=jax.tree.map(lambda a: a[layer], view.state.policy_state),
    )


def _update_positions(
    state: KVState,
    view: LayerView,
    obs: Observation,
    slots: Int[Array, "R N P"],
    contents: Int[Array, "R N P"],
) -> KVState:
    """Records positions and accumulated attention of what the slots hold from now on: `slots` are
    the places of the (new) regions, `contents` the candidate in each, -1 for none."""
    rows, none = jnp.arange(len(slots))[:, None, None], state.position.shape[1]  # "drop" skips it
    here = jnp.where(contents >= 0, slots, none)
    chosen = jnp.maximum(contents, 0)
    # Slots become empty before others are filled: a head may take over, in this very step, a slot
    # that another head leaves.
    vacated = jnp.where(view.live, view.slots, none)
    position = state.position.at[rows, vacated].set(-1, mode="drop")
    # The barrier makes the read happen before anything changes: XLA would fuse it into the second
    # scatter, and then copy the array that both use.
    moved = jnp.take_along_axis(jax.lax.optimization_barrier(obs.position), chosen, axis=-1)
    state = replace(state, position=position.at[rows, here].set(moved, mode="drop"))
    if state.total_mass is None:
        return state
    mass = jnp.take_along_axis(obs.total_mass, chosen, axis=-1)
    return replace(state, total_mass=state.total_mass.at[rows, here].set(mass, mode="drop"))


def _carry_over(
    state: KVState, obs: Observation, projection: Projection, layer: Int[Array, ""]
) -> KVState:
    """Records what the layer keeps for the next scale beside its tokens."""
    if state.policy_state is not None:
        updated = jax.tree.map(
            lambda layers, new: layers.at[layer].set(new), state.policy_state, obs.state
        )
        state = replace(state, policy_state=updated)
    if state.previous_keys is not None:
        # The last scale may be longer than what is remembered; its keys are never compared, so the
        # tail is cut off. `neighbours` names real tokens only, so padding is never looked at.
        k = projection.keys()
        tokens = min(k.shape[2], state.previous_keys.shape[3])
        # The similarity reads the keys that are overwritten here: the write has to wait for it.
        layer = order_after(layer, obs.key_similarity)
        keys = k[:, :, :tokens].astype(state.previous_keys.dtype)
        previous = state.previous_keys.at[layer, :, :, :tokens].set(keys)
        state = replace(state, previous_keys=previous)
    return state
