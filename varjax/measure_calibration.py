"""Measure a model with the full cache: everything that policies calibrate with, in one pass over a
few generated images. `Probe` is the policy that records it: it keeps everything."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from varjax import jax_settings
from varjax.arguments import integer
from varjax.cache.allocation import Geometry, RegionAllocation
from varjax.cache.observation import Needs, Observation
from varjax.calibration.data import Calibration, orders_from_scores, scas
from varjax.calibration.files import model_digest
from varjax.conditions import Condition
from varjax.errors import UserError
from varjax.generator import Generator
from varjax.model import Model, check_model
from varjax.policies import building_blocks as blocks
from varjax.policies.base import Policy, per_layer
from varjax.sampling import Sampling, check_seed

PATTERN_DIGITS = 4  # after the point, of attention maps
EXAMPLES = 6  # attention maps that are kept as pictures
SUMMED = ("beta", "query_variance", "concentration", "key_distance")
CONCENTRATED_SHARE = 0.1  # share of the earlier tokens that `concentration` looks at


@jax_settings.pinned()
def measure(
    model: Model,
    condition: Condition,
    sampling: Sampling,
    *,
    runs: int = 1,
    seed: int = 0,
    batch_size: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> Calibration:
    """Measurements averaged over the conditional rows of `runs` times the images of `condition`.

    Image i of run r depends on (seed + r, i, label). With several runs, `rank_dispersion` says how
    much the removal orders of the single runs differ.

    Raises:
      UserError: an argument that cannot work, or a model that gives no finite numbers.
    """
    check_scales(check_model(model))
    runs = integer("runs", runs, 1, 10**6)
    seed = check_seed(seed, runs)
    sampling = model.resolve_sampling(sampling)
    schedule = model.geometry.schedule
    probe = Probe(pattern_scale=max(0, schedule.num_scales - 2))
    generator = Generator(model, probe, sampling=sampling, batch_size=batch_size)
    means, patterns = [], None
    for run in range(runs):
        total = None
        for start in range(0, len(condition), batch_size):
            index = np.arange(start, min(start + batch_size, len(condition)))
            _, cache = generator.run_images(condition, index, seed=seed + run)
            # float64 [L, images, ...]: the conditional rows, which come first
            state = {
                name: np.asarray(array, np.float64)[:, : index.size]
                for name, array in cache.policy_state.items()
            }
            patterns = state.pop("pattern")[:, 0] if patterns is None else patterns
            sums = {name: state[name].sum(1) for name in SUMMED}
            total = sums if total is None else {n: total[n] + sums[n] for n in SUMMED}
            progress(run * len(condition) + int(index[-1]) + 1)
        means.append({name: a / len(condition) for name, a in total.items()})
    found = _summarise(model, sampling, probe, means, patterns, runs * len(condition))
    found.check(model.geometry_for(sampling))  # broken weights give NaN
    return found


def check_scales(model: Model) -> None:
    """Raises `UserError` for models that draw token by token."""
    if model.draws_tokens:
        raise UserError(
            f"{model.name} draws token by token: no policy for such models uses a "
            "calibration, they decide from what they see while drawing: run them without"
        )


def _summarise(model, sampling, probe, means, patterns, num_samples: int) -> Calibration:
    geometry = model.geometry_for(sampling)
    mean = {name: np.mean([run[name] for run in means], axis=0) for name in SUMMED}
    beta = mean["beta"]
    current = np.diagonal(beta, axis1=-2, axis2=-1)
    chosen = different_heads(beta[..., probe.pattern_scale, :], EXAMPLES)
    return Calibration(
        model=model.name,
        model_digest=model_digest(model.metadata),
        schedule=geometry.schedule,
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        guidance=sampling.guidance,
        num_samples=num_samples,
        beta=beta,
        key_discrepancy=mean["key_distance"],
        query_variance=mean["query_variance"][..., 1:].mean(-1),
        selectivity=(current * mean["concentration"]).mean(1),
        pattern_heads=chosen,
        patterns=np.round(patterns[chosen[:, 1], chosen[:, 0]], PATTERN_DIGITS),
        pattern_scale=probe.pattern_scale,
        pattern_edges=probe.edges(geometry),
        rank_dispersion=rank_dispersion([r["beta"] for r in means]) if len(means) > 1 else None,
    )


def different_heads(beta: np.ndarray, count: int) -> np.ndarray:
    """int32 [count, 2] of (head, layer): heads whose mass over source scales [L, N, K] differs most
    from each other (farthest-point choice, starting from the most concentrated)."""
    layers, heads, _ = beta.shape
    flat = beta.reshape(layers * heads, -1)
    chosen = [int(flat.max(-1).argmax())]
    while len(chosen) < min(count, len(flat)):
        distance = np.abs(flat[:, None] - flat[chosen]).sum(-1).min(-1)
        chosen.append(int(distance.argmax()))
    layer, head = np.divmod(chosen, heads)
    return np.stack([head, layer], -1).astype(np.int32)


def rank_dispersion(betas: list[np.ndarray]) -> np.ndarray:
    """float64 [K - 1]: standard deviation over runs of a head's rank in the S-CAS order of each
    source scale, averaged over heads (HeatKV, Figure 6). Ranks go from 0 to L * N - 1."""
    num_scales = betas[0].shape[-1]
    ranks = []
    for beta in betas:
        scores = scas(beta, 0)
        orders = orders_from_scores(scores, 0)
        where = orders[..., 1] * beta.shape[1] + orders[..., 0]
        ranks.append(np.argsort(where, axis=-1))
    return np.std(ranks, axis=0).mean(-1).reshape(num_scales - 1)


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

    def allocate(
        self, geometry: Geometry, budget: float, calibration: Calibration | None = None
    ) -> RegionAllocation:
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
        source = jnp.searchsorted(obs.inputs["starts"], obs.position, side="right") - 1
        of_source = jax.nn.one_hot(source, state["beta"].shape[-1])  # 0 for slots without a token
        measured = {
            "beta": jnp.einsum("rnk,rnkg->rng", obs.scale_mass, of_source),
            "query_variance": obs.query_variance,
            "concentration": _concentration(obs),
        }
        for name, value in measured.items():
            state[name] = state[name].at[:, :, scale].set(value)
        distance = jnp.where(scale == 0, 0.0, -obs.key_similarity)
        state["key_distance"] = state["key_distance"].at[:, scale].set(distance)
        column = jnp.searchsorted(obs.inputs["edges"], obs.position, side="right") - 1
        member = jax.nn.one_hot(column, state["pattern"].shape[-1])
        pattern = jnp.einsum("rnqk,rnkc->rnqc", obs.window_attention, member)
        state["pattern"] = jnp.where(scale == self.pattern_scale, pattern, state["pattern"])
        return state


def _concentration(obs: Observation):
    history = obs.live & ~obs.own
    count = jnp.ceil(CONCENTRATED_SHARE * history.sum(-1)).astype(jnp.int32)
    best = blocks.top(obs.scale_mass, history, count)
    share = jnp.where(best, obs.scale_mass, 0).sum(-1) / jnp.maximum(
        jnp.where(history, obs.scale_mass, 0).sum(-1), 1e-20
    )
    return jnp.where(history.any(-1), share, 0.0)
