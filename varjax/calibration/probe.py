"""A policy that keeps everything and records what it sees: how a model is measured before it is
compressed."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from varjax.cache.allocation import Geometry, RegionAllocation
from varjax.policies import building_blocks as blocks
from varjax.policies.base import Needs, Observation, Policy, per_layer

CONCENTRATED_SHARE = 0.1  # share of the earlier tokens that `concentration` looks at


@dataclass(frozen=True, kw_only=True)
class Probe(Policy):
    """The full cache; every layer's state holds what was seen, float32, per row R and head N.

    beta [R, N, K, K]: attention mass from query scale to source scale, averaged over queries.
    query_variance [R, N, K]: per query scale, `Observation.query_variance`.
    concentration [R, N, K]: share of the mass on earlier scales that falls on their best attended
      tenth (of the tokens, by mass averaged over queries); 0 for the first scale.
    key_distance [R, K]: mean distance of keys to those of the scale before; 0 for the first scale.
    pattern [R, N, Q, C]: attention of `queries` queries of scale `pattern_scale`, spread evenly,
      with columns summed between `edges`.

    Not registered: it is what `experiments.calibrate` runs.
    """

    queries: int = 32
    columns: int = 96
    pattern_scale: int = 0

    name = "probe"
    summary = "everything, and records what it sees"
    shrinks = False

    @property
    def needs(self) -> Needs:
        return Needs(
            window=self.queries,
            window_attention=True,
            scale_mass=True,
            query_variance=True,
            key_similarity=True,
        )

    def minimum_budget(self, geometry: Geometry) -> float:
        return 1.0

    def edges(self, geometry: Geometry) -> np.ndarray:
        """int [C + 1]: column c of a pattern covers tokens edges[c] to edges[c + 1] - 1; no column
        crosses the border of a scale."""
        starts, end = geometry.schedule.starts, geometry.schedule.ends[self.pattern_scale]
        width = max(1, -(-end // self.columns))
        inside = starts[: self.pattern_scale + 1]
        columns = [np.arange(a, b, width) for a, b in zip(inside, [*inside[1:], end], strict=True)]
        return np.concatenate([*columns, [end]]).astype(np.int32)

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> RegionAllocation:
        starts = np.array(geometry.schedule.starts, np.int32)[:, None, None]
        shape = (starts.size, geometry.num_layers, geometry.num_heads)
        return RegionAllocation(np.broadcast_to(starts, shape).copy())

    def inputs(self, geometry: Geometry, allocation, image_index: np.ndarray):
        """Per scale and layer: first tokens of all scales, and of the pattern's columns."""
        return {
            "starts": per_layer(geometry, np.array(geometry.schedule.starts, np.int32)),
            "edges": per_layer(geometry, self.edges(geometry)),
        }

    def init_state(self, geometry: Geometry, rows: int):
        heads, scales = (rows, geometry.num_heads), geometry.schedule.num_scales
        columns = len(self.edges(geometry)) - 1
        return {
            "beta": jnp.zeros((*heads, scales, scales)),
            "query_variance": jnp.zeros((*heads, scales)),
            "concentration": jnp.zeros((*heads, scales)),
            "key_distance": jnp.zeros((rows, scales)),
            "pattern": jnp.zeros((*heads, self.queries, columns)),
        }

    def update_state(self, obs: Observation):
        state, scale = dict(obs.state), obs.scale
        for name, value in self._measured(obs).items():
            state[name] = state[name].at[:, :, scale].set(value)
        distance = jnp.where(scale == 0, 0.0, -obs.key_similarity)
        state["key_distance"] = state["key_distance"].at[:, scale].set(distance)
        column = jnp.searchsorted(obs.inputs["edges"], obs.position, side="right") - 1
        member = jax.nn.one_hot(column, state["pattern"].shape[-1])
        pattern = jnp.einsum("rnqk,rnkc->rnqc", obs.window_attention, member)
        state["pattern"] = jnp.where(scale == self.pattern_scale, pattern, state["pattern"])
        return state

    def _measured(self, obs: Observation) -> dict:
        source = jnp.searchsorted(obs.inputs["starts"], obs.position, side="right") - 1
        return {
            "beta": _sum_by(obs.scale_mass, source, obs.state["beta"].shape[-1]),
            "query_variance": obs.query_variance,
            "concentration": _concentration(obs),
        }


def _sum_by(values, group, groups: int):
    """Sums of the last axis by group number [..., groups]; numbers outside are left out."""
    return jnp.einsum("rnk,rnkg->rng", values, jax.nn.one_hot(group, groups))


def _concentration(obs: Observation):
    history = obs.live & ~obs.own
    count = jnp.ceil(CONCENTRATED_SHARE * history.sum(-1)).astype(jnp.int32)
    best = blocks.top(obs.scale_mass, history, count)
    share = jnp.where(best, obs.scale_mass, 0).sum(-1) / jnp.maximum(
        jnp.where(history, obs.scale_mass, 0).sum(-1), 1e-20
    )
    return jnp.where(history.any(-1), share, 0.0)
