"""Measure a model with the full cache: everything that policies calibrate with, in one pass over a
few generated images. `CalibrationProbe` is the policy that records it: it keeps everything."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from varjax import jax_settings
from varjax.calibration.data import Calibration, orders_from_scores, scas
from varjax.calibration.files import model_digest
from varjax.conditions import Condition
from varjax.core import masks
from varjax.core.allocation import Geometry
from varjax.core.arguments import integer
from varjax.core.errors import UserError
from varjax.core.observation import Needs, Observation
from varjax.core.sampling import Sampling, check_seed
from varjax.generation.generator import Generator
from varjax.models.model import Model, check_model
from varjax.policies import Policy
from varjax.policies.scale_rule import ScaleRule, per_layer

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
    `UserError`: an argument that cannot work, or a model that gives no finite numbers.

    Image i of run r depends on (seed + r, i, label). With several runs, `rank_dispersion` says how
    much the removal orders of the single runs differ.
    """
    check_scales(check_model(model))
    runs = integer("runs", runs, 1, 10**6)
    seed = check_seed(seed, runs)
    sampling = model.resolve_sampling(sampling)
    generator = Generator(model, CalibrationProbe(), sampling=sampling, batch_size=batch_size)
    means = []
    for run in range(runs):
        total = None
        for done, seen in _seen(generator, condition, seed + run):
            sums = {name: array.sum(1) for name, array in seen.items()}
            total = sums if total is None else {n: total[n] + sums[n] for n in sums}
            progress(run * len(condition) + done)
        means.append({name: a / len(condition) for name, a in total.items()})
    mean = {name: np.mean([run[name] for run in means], axis=0) for name in means[0]}
    current = np.diagonal(mean["beta"], axis1=-2, axis2=-1)
    geometry = model.geometry_for(sampling)
    found = Calibration(
        model=model.name,
        model_digest=model_digest(model.metadata),
        schedule=geometry.schedule,
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        guidance=sampling.guidance,
        num_samples=runs * len(condition),
        beta=mean["beta"],
        key_discrepancy=mean["key_distance"],
        query_variance=mean["query_variance"][..., 1:].mean(-1),
        selectivity=(current * mean["concentration"]).mean(1),
        rank_dispersion=rank_dispersion([r["beta"] for r in means]) if runs > 1 else None,
    )
    found.check(geometry)  # broken weights give NaN
    return found


def attention(
    model: Model,
    condition: Condition,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    batch_size: int = 1,
) -> dict[str, np.ndarray]:
    """How heads attend with the full cache, image by image: float64, "mass" [B, L, N, K, K], of
    query scale and source scale, averaged over queries, and "entropy" [B, L, N, K], in nats, of
    the mass on single tokens. A calibration's `beta` is the mean mass of its images.

    condition: of the images (`conditions.resolve`). sampling: None: as the checkpoint recommends.
    Image i depends on (seed, i, its label or prompt). `UserError`: as of `measure`.
    """
    check_scales(check_model(model))
    sampling = model.resolve_sampling(sampling)
    generator = Generator(model, CalibrationProbe(), sampling=sampling, batch_size=batch_size)
    seen = [found for _, found in _seen(generator, condition, check_seed(seed))]
    named = {"mass": "beta", "entropy": "entropy"}
    return {
        name: np.concatenate([found[field] for found in seen], 1).swapaxes(0, 1)
        for name, field in named.items()
    }


def _seen(
    generator: Generator, condition: Condition, seed: int
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """After each batch the images that are done, and what the probe saw: float64 [L, images, ...],
    of the conditional rows, which come first."""
    for start in range(0, len(condition), generator.batch_size):
        index = np.arange(start, min(start + generator.batch_size, len(condition)))
        _, cache = generator.run_images(condition, index, seed=seed)
        state = cache.policy_state
        found = {n: np.asarray(a, np.float64)[:, : index.size] for n, a in state.items()}
        yield int(index[-1]) + 1, found


def check_scales(model: Model) -> None:
    """Raises `UserError` for models that draw token by token."""
    if model.draws_tokens:
        raise UserError(
            f"{model.name} draws token by token: no policy for such models uses a "
            "calibration, they decide from what they see while drawing: run them without"
        )


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


class ProbeRule(ScaleRule):
    """The full cache; every layer's state holds what was seen, float32, per row R and head N.

    beta [R, N, K, K]: attention mass from query scale to source scale, averaged over queries.
    entropy [R, N, K]: of that mass, token by token, in nats.
    query_variance [R, N, K]: per query scale, `Observation.query_variance`.
    concentration [R, N, K]: share of the mass on earlier scales that falls on their best attended
      tenth (of the tokens, by mass averaged over queries); 0 for the first scale.
    key_distance [R, K]: mean distance of keys to those of the scale before; 0 for the first scale.
    """

    def inputs(self, geometry: Geometry, allocation, image_index: np.ndarray):
        """int32 [K, L, K]: the first tokens of all scales."""
        return per_layer(geometry, np.array(geometry.schedule.starts, np.int32))

    def init_state(self, geometry: Geometry, rows: int):
        heads, scales = (rows, geometry.num_heads), geometry.schedule.num_scales
        return {
            "beta": jnp.zeros((*heads, scales, scales)),
            "entropy": jnp.zeros((*heads, scales)),
            "query_variance": jnp.zeros((*heads, scales)),
            "concentration": jnp.zeros((*heads, scales)),
            "key_distance": jnp.zeros((rows, scales)),
        }

    def update_state(self, obs: Observation):
        state, scale = dict(obs.state), obs.scale
        source = jnp.searchsorted(obs.inputs, obs.position, side="right") - 1
        of_source = jax.nn.one_hot(source, state["beta"].shape[-1])  # 0 for slots without a token
        history = obs.live & ~obs.own
        count = jnp.ceil(CONCENTRATED_SHARE * history.sum(-1)).astype(jnp.int32)
        best = masks.top(obs, obs.scale_mass, history, count)
        share = jnp.where(best, obs.scale_mass, 0).sum(-1) / jnp.maximum(
            jnp.where(history, obs.scale_mass, 0).sum(-1), 1e-20
        )
        measured = {
            "beta": jnp.einsum("rnk,rnkg->rng", obs.scale_mass, of_source),
            "entropy": jax.scipy.special.entr(jnp.where(obs.live, obs.scale_mass, 0)).sum(-1),
            "query_variance": obs.query_variance,
            "concentration": jnp.where(history.any(-1), share, 0.0),
        }
        for name, value in measured.items():
            state[name] = state[name].at[:, :, scale].set(value)
        distance = jnp.where(scale == 0, 0.0, -obs.key_similarity)
        state["key_distance"] = state["key_distance"].at[:, scale].set(distance)
        return state


@dataclass(frozen=True, kw_only=True)
class CalibrationProbe(Policy):
    """The full cache, and what `ProbeRule` records. It is not registered."""

    name = "probe"
    rules = (ProbeRule,)
    summary = "everything, and records what it sees"
    shrinks = False
    needs = Needs(scale_mass=True, query_variance=True, key_similarity=True)
