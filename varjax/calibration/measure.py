"""Measure a model with the full cache: everything that policies calibrate with, in one pass over a
few generated images."""

from collections.abc import Callable

import numpy as np

from varjax import calibration as measured
from varjax.calibration import Calibration
from varjax.calibration.probe import Probe
from varjax.conditions import Condition
from varjax.generator import Generator
from varjax.model import Model
from varjax.sampling import Sampling

PATTERN_DIGITS = 4  # after the point, of attention maps
EXAMPLES = 6  # attention maps that are kept as pictures
SUMMED = ("beta", "query_variance", "concentration", "key_distance")


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
    """
    schedule = model.geometry.schedule
    probe = Probe(pattern_scale=max(0, schedule.num_scales - 2))
    generator = Generator(model, probe, sampling=sampling, batch_size=batch_size)
    means, patterns = [], None
    for run in range(runs):
        total = None
        for start in range(0, len(condition), batch_size):
            index = np.arange(start, min(start + batch_size, len(condition)))
            state = _probe_state(generator, condition, index, seed + run)
            patterns = state.pop("pattern")[:, 0] if patterns is None else patterns
            sums = {name: state[name].sum(1) for name in SUMMED}
            total = sums if total is None else {n: total[n] + sums[n] for n in SUMMED}
            progress(run * len(condition) + int(index[-1]) + 1)
        means.append({name: a / len(condition) for name, a in total.items()})
    return _summarise(model, sampling, probe, means, patterns, runs * len(condition))


def _probe_state(
    generator: Generator, condition: Condition, index: np.ndarray, seed: int
) -> dict[str, np.ndarray]:
    """float64 [L, images, ...]: the probe's state, of the conditional rows of one batch."""
    _, state = generator.run_images(condition, index, seed=seed)
    return {k: np.asarray(a, np.float64)[:, : index.size] for k, a in state.policy_state.items()}


def _summarise(model, sampling, probe, means, patterns, num_samples: int) -> Calibration:
    geometry = model.geometry_for(sampling)
    mean = {name: np.mean([run[name] for run in means], axis=0) for name in SUMMED}
    beta = mean["beta"]
    current = np.diagonal(beta, axis1=-2, axis2=-1)
    chosen = different_heads(beta[..., probe.pattern_scale, :], EXAMPLES)
    return Calibration(
        model=model.name,
        model_digest=measured.model_digest(model.metadata),
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
        scores = measured.scas(beta, 0)
        orders = measured.orders_from_scores(scores, 0)
        where = orders[..., 1] * beta.shape[1] + orders[..., 0]
        ranks.append(np.argsort(where, axis=-1))
    return np.std(ranks, axis=0).mean(-1).reshape(num_scales - 1)
