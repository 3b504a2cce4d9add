"""The observations of one layer that a policy asks for, built from queries, keys and the pool."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.projection import Projection
from pallas_kernels.ragged_attention import (
    BlockTable,
    QuerySums,
    attention_moments,
    attention_scores,
)
from varjax.core.observation import Needs, Observation
from varjax.core.state import KVState
from varjax.core.step_inputs import StepInputs


@dataclass(frozen=True)
class LayerView:
    """View of a layer: its heads' contents when the scale starts, per row (P places of each head's
    region), and their attention, for computing parts of it a second time.

    projection: queries, keys and values of the scale; T tokens with padding.
    state: the cache before this layer has stored anything.
    table: the slots of the regions, per row, which the attention reads.
    slots: the slot of every place.
    live: whether the place holds a token.
    position: the token in the place, -1 for none.
    regions: the region that each head uses.
    mass: attention that the token has received so far, if it is kept.
    implementation: which kernels compute the attention.
    lse: log-sum-exp of every query's scores; None where no sum over queries is needed.
    """

    projection: Projection
    step: StepInputs
    state: KVState
    table: BlockTable
    slots: Int[Array, "R N P"]
    live: Bool[Array, "R N P"]
    position: Int[Array, "R N P"]
    regions: Int[Array, "R N"]
    mass: Float[Array, "R N P"] | None
    implementation: str | None
    lse: Float[Array, "R N T"] | None = None

    @classmethod
    def of(
        cls,
        projection: Projection,
        step: StepInputs,
        state: KVState,
        table: BlockTable,
        layer: Int[Array, ""],
        *,
        ragged: bool,
        implementation: str | None,
    ) -> "LayerView":
        """Looks up what the cache holds for a layer. table: its regions.

        ragged: whether the table has to be cut to the tokens that each row really holds.
        """
        rows, heads = state.kv_pool.shape[0], table.ids.shape[-2]
        if state.regions is None:
            regions = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32), (rows, heads))
            table = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), table.sliced())
        else:
            regions = state.regions[layer]
            table = table.for_rows(regions)
        slots = table.slots(state.block_size)
        # Explicit row numbers: with a slice or vmap over rows XLA changes the layout of the whole
        # array in every layer on TPU.
        row = jnp.arange(rows)[:, None, None]
        position = state.position[row, slots]
        # a place may be in the table and empty: rows may hold fewer tokens than the capacity
        live = table.slot_mask(state.block_size) & (position >= 0)
        mass = None if state.total_mass is None else state.total_mass[row, slots]
        if ragged:
            table = table.filled_to(live.sum(-1))
        held = slots, live, position, regions, mass
        return cls(projection, step, state, table, *held, implementation)

    def scores(self, queries: Float[Array, "R N Q H"]) -> Float[Array, "R N Q K"]:
        """Scores of some queries before the softmax, -inf where there is no key."""
        given = (self.projection.keys(), self.step.length, self.state.kv_pool, self.table)
        return attention_scores(queries, *given, kv_scale=self.state.kv_scale)


def observe_window(obs: Observation, view: LayerView, needs: Needs) -> Observation:
    """Adds to an observation what the policy needs of the queries in its window."""
    # A window has few queries, so their scores are computed once more by the reference, on every
    # platform: the attention kernel never has a row of scores in memory.
    chosen = view.step.window
    held = obs.live.shape[-1] - view.projection.shape[2]
    # a comparison, not a scatter: windows of early scales name a token more than once
    own = (jnp.arange(view.projection.shape[2])[:, None] == chosen).any(-1)
    obs = replace(obs, window=obs.live & jnp.pad(own, (held, 0)))
    queries = view.projection.queries()[:, :, chosen]
    if needs.window_mass:
        attention = jax.nn.softmax(view.scores(queries), axis=-1)
        obs = replace(obs, window_mass=attention.mean(2))
    if needs.window_logits:
        if needs.raw_queries:
            # ScaleKV's authors score with plain projections: no bias, rotation or multiplier
            raw = view.projection.raw_queries()[:, :, chosen]
            queries = raw / math.sqrt(raw.shape[-1])
        obs = replace(obs, window_logits=view.scores(queries).mean(2))
    return obs


def sum_over_queries(obs: Observation, view: LayerView, needs: Needs) -> Observation:
    """Adds sums of attention over the scale's queries."""
    # Sums over all queries come from a second pass that is given the log-sum-exp of the first: it
    # needs no maximum and no division, and no scores are ever stored.
    # Padded queries attend like others; only their weight keeps them out of the sums.
    weights = (jnp.arange(view.projection.shape[2]) < view.step.length).astype(jnp.float32)
    sums = QuerySums(weights, view.lse, needs.query_variance)
    given = (view.projection, view.step.length, view.state.kv_pool, view.table, sums)
    options = dict(kv_scale=view.state.kv_scale, implementation=view.implementation)
    total, squares = attention_moments(*given, **options)
    mean = total / view.step.length
    obs = replace(obs, scale_mass=mean)
    if needs.query_variance:
        # E[a^2] - E[a]^2 over queries, in float32: a second pass over the weights would be needed
        # for the centred form
        spread = squares / view.step.length - mean * mean
        obs = replace(obs, query_variance=spread.sum(-1))
    if needs.total_mass:
        # An empty slot may hold the mass of an earlier token: `live` masks it.
        before = jnp.pad(view.mass, ((0, 0), (0, 0), (0, view.projection.shape[2])))
        obs = replace(obs, total_mass=jnp.where(obs.live, before, 0) + total)
    return obs


def key_similarity(view: LayerView, layer: Int[Array, ""]) -> Float[Array, " R"]:
    """Negative mean distance of the scale's keys from the previous scale's, resized to it."""
    # the previous map resized bilinearly: every token is a weighted sum of four earlier ones
    previous = view.state.previous_keys[layer].astype(jnp.float32)
    weights = view.step.neighbour_weights
    resized = sum(
        previous[:, :, view.step.neighbours[i]] * weights[i][:, None] for i in range(len(weights))
    )
    difference = view.projection.keys().astype(jnp.float32) - resized
    distance = jnp.sqrt(jnp.square(difference).sum(-1))
    real = jnp.arange(distance.shape[-1]) < view.step.length  # padding must not enter the mean
    mean = jnp.where(real, distance, 0).sum((1, 2)) / (view.step.length * distance.shape[1])
    # scale 0 has nothing before it: what `previous_keys` holds then is zeros
    return jnp.where(view.step.scale == 0, -jnp.inf, -mean)
