"""What a policy sees of one layer: built from queries, keys and the pool, and nothing that is not
asked for."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.projection import Projection
from pallas_kernels.ragged_attention import (
    BlockTable,
    QuerySums,
    attention_moments,
    attention_scores,
)
from varjax.cache.observation import Observation
from varjax.cache.state import KVState


@dataclass(frozen=True)
class AttentionView:
    """The attention of one layer, to compute parts of it again.

    projection: of the scale. lse: log-sum-exp of the attention's scores, where they are summed over
    queries.
    """

    projection: Projection
    lse: Float[Array, "R N T"] | None
    state: KVState
    table: BlockTable
    step: Any
    implementation: str | None

    @property
    def tokens(self) -> int:
        """T, own tokens with padding."""
        return self.projection.shape[2]

    @property
    def _stored(self) -> tuple:
        return self.step.length, self.state.kv_pool, self.table

    def scores(self, queries: Float[Array, "R N Q H"]) -> Float[Array, "R N Q K"]:
        keys = self.projection.keys()
        return attention_scores(queries, keys, *self._stored, kv_scale=self.state.kv_scale)

    def moments(self, squares: bool):
        """Attention mass of every key summed over the scale's queries; its squares on request."""
        weights = (jnp.arange(self.tokens) < self.step.length).astype(jnp.float32)
        return attention_moments(
            self.projection,
            *self._stored,
            QuerySums(weights, self.lse, squares),
            kv_scale=self.state.kv_scale,
            implementation=self.implementation,
        )


def observe(obs: Observation, view: AttentionView, stored_mass, layer, cache: Any) -> Observation:
    """Add to an observation what the policy needs in this segment.

    stored_mass: float32 [R, N, P], accumulated mass of the stored slots, or None.
    """
    needs = cache.rule.needs
    if cache.decides and needs.window:
        obs = _observe_window(obs, view, needs)
    if cache.sums_attention:
        obs = _sum_over_queries(obs, view, stored_mass, needs)
    if needs.key_similarity:
        obs = replace(obs, key_similarity=_key_similarity(view, layer))
    return obs


def _observe_window(obs: Observation, view: AttentionView, needs) -> Observation:
    # A window has few queries, so their scores are computed once more by the reference, on every
    # platform: the attention kernel never has a row of scores in memory.
    chosen = view.step.window
    stored = obs.live.shape[-1] - view.tokens
    own = (jnp.arange(view.tokens)[:, None] == chosen).any(-1)
    obs = replace(obs, window=obs.live & jnp.pad(own, (stored, 0)))
    queries = view.projection.queries()[:, :, chosen]
    if needs.window_mass or needs.window_attention:
        attention = jax.nn.softmax(view.scores(queries), axis=-1)
        if needs.window_attention:
            obs = replace(obs, window_attention=attention)
        obs = replace(obs, window_mass=attention.mean(2))
    if needs.window_logits:
        if needs.raw_queries:
            raw = view.projection.raw_queries()[:, :, chosen]
            queries = raw / math.sqrt(raw.shape[-1])
        obs = replace(obs, window_logits=view.scores(queries).mean(2))
    return obs


def _sum_over_queries(obs: Observation, view: AttentionView, stored_mass, needs) -> Observation:
    # Sums over all queries come from a second pass that is given the log-sum-exp of the first: it
    # needs no maximum and no division, and no scores are ever stored.
    total, squares = view.moments(needs.query_variance)
    mean = total / view.step.length
    obs = replace(obs, scale_mass=mean)
    if needs.query_variance:
        spread = squares / view.step.length - mean * mean
        obs = replace(obs, query_variance=spread.sum(-1))
    if needs.total_mass:
        # padding of stored slots may hold what an earlier token left there: masked by `live`
        before = jnp.pad(stored_mass, ((0, 0), (0, 0), (0, view.tokens)))
        obs = replace(obs, total_mass=jnp.where(obs.live, before, 0) + total)
    return obs


def _key_similarity(view: AttentionView, layer) -> Float[Array, " R"]:
    previous = view.state.previous_keys[layer].astype(jnp.float32)
    weights = view.step.neighbour_weights
    resized = sum(
        previous[:, :, view.step.neighbours[i]] * weights[i][:, None] for i in range(len(weights))
    )
    difference = view.projection.keys().astype(jnp.float32) - resized
    distance = jnp.sqrt(jnp.square(difference).sum(-1))
    real = jnp.arange(distance.shape[-1]) < view.step.length  # padding is no token
    mean = jnp.where(real, distance, 0).sum((1, 2)) / (view.step.length * distance.shape[1])
    return jnp.where(view.step.scale == 0, -jnp.inf, -mean)
