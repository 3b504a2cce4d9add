"""What policies see of a running program, against teacher-forced attention matrices with the same
tokens and the same eviction."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import models_under_test as models
from varjax.calibration.data import scas
from varjax.core.allocation import RegionAllocation
from varjax.core.observation import Needs
from varjax.core.sampling import Sampling
from varjax.generation import measure_calibration
from varjax.policies import Policy
from varjax.policies.scale_rule import ScaleRule

MODEL = "b_k6_sharedaln"
LABELS = np.array([3, 7], np.int32)


def visible_tokens(schedule) -> np.ndarray:
    """bool [K, tokens]: an arbitrary eviction; scales see all of themselves besides."""
    scale, token = np.arange(schedule.num_scales)[:, None], np.arange(schedule.total_tokens)
    seen = schedule.scale_of_token < scale
    for s in range(schedule.num_scales):
        seen[s:] &= (token * 7 + s) % 4 != 0
    return seen


class SpyRule(ScaleRule):
    """Evicts by `visible_tokens` and keeps every observation of every scale, by token."""

    recorded = ("window_mass", "window_logits", "scale_mass", "total_mass", "window")

    def visible(self, geometry):
        schedule = geometry.schedule
        later = schedule.scale_of_token < np.arange(schedule.num_scales)[:, None]
        return visible_tokens(schedule) if self.policy.evict else later

    def allocate(self, geometry, budget):
        count = self.visible(geometry).sum(-1)[:, None, None]
        shape = (len(count), geometry.num_layers, geometry.num_heads)
        return RegionAllocation(np.broadcast_to(count, shape).astype(np.int32), ragged=True)

    def inputs(self, geometry, allocation, image_index):
        seen = self.visible(geometry)
        following = np.concatenate([seen[1:], seen[-1:]])
        shape = (len(seen), geometry.num_layers, seen.shape[1])
        return np.broadcast_to(following[:, None], shape)

    def init_state(self, geometry, rows):
        schedule = geometry.schedule
        shape = (rows, geometry.num_heads, schedule.num_scales)
        notes = {n: jnp.zeros((*shape, schedule.total_tokens)) for n in self.recorded}
        similarity = jnp.zeros((rows, schedule.num_scales))
        return notes | {"query_variance": jnp.zeros(shape), "key_similarity": similarity}

    def update_state(self, obs):
        memory, s = dict(obs.state), obs.scale
        rows, heads, _ = obs.live.shape
        where = jnp.where(obs.live, obs.position, memory["window"].shape[-1])
        index = (jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None], s, where)
        for name in self.recorded:
            value = getattr(obs, name).astype(jnp.float32)
            memory[name] = memory[name].at[index].set(value, mode="drop")
        memory["query_variance"] = memory["query_variance"].at[:, :, s].set(obs.query_variance)
        memory["key_similarity"] = memory["key_similarity"].at[:, s].set(obs.key_similarity)
        return memory

    def select(self, obs):
        return obs.live & obs.inputs[obs.position]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spy(Policy):
    """Everything that can be observed."""

    evict: bool = True
    budget: float = 1.0

    rules = (SpyRule,)
    shrinks = False
    needs = Needs(
        window=5,
        window_mass=True,
        window_logits=True,
        raw_queries=True,
        scale_mass=True,
        total_mass=True,
        query_variance=True,
        key_similarity=True,
    )


@functools.cache
def spied(evict: bool):
    """(tokens of a greedy run, memory of the spy by name: [L, R, N, K, ...])."""
    generator = models.greedy_generator(models.fixture_model(MODEL), Spy(evict=evict))
    results, state = generator.run_batch(LABELS, np.arange(2))
    return np.asarray(results["tokens"]), {k: np.asarray(a) for k, a in state.policy_state.items()}


@functools.cache
def oracle(evict: bool):
    """Per layer (q, k, raw q, attention [R, N, tokens, tokens]) of the same tokens."""
    model = models.fixture_model(MODEL)
    transformer, schedule = model.transformer, model.geometry.schedule
    seen = Spy(evict=evict).rule("scales").visible(model.geometry)
    scale = np.array(schedule.scale_of_token)
    mask = seen[scale] | (scale[:, None] == scale)
    tokens, _ = spied(evict)

    @jax.jit
    def run(codec, transformer, tokens):
        codes = jnp.tile(codec.quantizer.teacher_inputs(tokens), (2, 1, 1))
        context = transformer.encode_condition(jnp.asarray(LABELS), guided=True)
        x = jnp.concatenate([context["start"], transformer.word_embedding(codes)], axis=1)
        x = x + transformer.position_embedding[...] + transformer.level_embedding[scale]
        x, layers = transformer.stream(x), []
        for i in range(model.geometry.num_layers):
            block, modulation = jax.tree.map(
                lambda a, i=i: a[i], (transformer.blocks, context["layers"])
            )
            projection, x = transformer.project(block, modulation, None, x)
            q, k, v = projection.queries(), projection.keys(), projection.values()
            scores = jnp.where(mask, jnp.einsum("rnth,rnsh->rnts", q, k), -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1)
            layers.append((q, k, projection.raw_queries() / np.sqrt(q.shape[-1]), weights))
            attended = (weights @ v).transpose(0, 2, 1, 3)
            x = transformer.post_attention(block, modulation, None, x, attended)
        return layers

    with jax.default_matmul_precision("highest"):
        layers = run(model.codec, transformer, jnp.asarray(tokens))
    return jax.tree.map(np.asarray, layers), seen, schedule


def scale_slice(schedule, s):
    return slice(schedule.starts[s], schedule.ends[s])


def test_masses_and_scores():
    _, memory = spied(True)
    layers, seen, schedule = oracle(True)
    for layer, (_, k, raw, weights) in enumerate(layers):
        total = np.zeros(weights.shape[:2] + weights.shape[-1:])
        for s in range(schedule.num_scales):
            own, found = scale_slice(schedule, s), {n: a[layer][..., s, :] if a.ndim == 5 else a
                                                    for n, a in memory.items()}  # fmt: skip
            inside = seen[s].copy()
            inside[own] = True
            attention = weights[:, :, own]
            window = np.floor((np.arange(5) + 0.5) / 5 * schedule.tokens[s]).astype(int)
            total += attention.sum(2)
            logits = np.einsum("rnwh,rnsh->rnws", raw[:, :, own][:, :, window], k).mean(2)
            for name, wanted in (
                ("window_mass", attention[:, :, window].mean(2)),
                ("scale_mass", attention.mean(2)),
                ("total_mass", total),
                ("window_logits", logits),
            ):
                np.testing.assert_allclose(
                    found[name][..., inside], wanted[..., inside], atol=2e-4, rtol=1e-4
                )
            chosen = np.flatnonzero(found["window"][0, 0])
            np.testing.assert_array_equal(chosen, np.unique(window) + schedule.starts[s])
            spread = attention.var(2).sum(-1)
            np.testing.assert_allclose(memory["query_variance"][layer][:, :, s], spread, atol=1e-5)


@functools.partial(jax.jit, static_argnums=1)
def resize(grid, size):
    return jax.image.resize(grid, size, "linear", antialias=False)


def test_key_similarity():
    """The previous keys are those computed, evicted or not; resized like jax.image does."""
    _, memory = spied(True)
    layers, _, schedule = oracle(True)
    for layer, (_, k, _, _) in enumerate(layers):
        assert (memory["key_similarity"][layer][:, 0] == -np.inf).all()
        for s in range(1, schedule.num_scales):
            before = k[:, :, scale_slice(schedule, s - 1)]
            grid = before.reshape(*before.shape[:2], *schedule.maps[s - 1], -1)
            size = (*grid.shape[:2], *schedule.maps[s], grid.shape[-1])
            resized = resize(grid, size)
            now = k[:, :, scale_slice(schedule, s)]
            distance = np.linalg.norm(now - resized.reshape(now.shape), axis=-1)
            np.testing.assert_allclose(
                memory["key_similarity"][layer][:, s], -distance.mean((1, 2)), rtol=1e-4
            )


@pytest.mark.slow
def test_measured_calibration():
    """`measure` is the same numbers averaged over the conditional rows."""
    model = models.fixture_model(MODEL)
    found = measure_calibration.measure(
        model, LABELS, Sampling(cfg=1.5, greedy=True), batch_size=2, runs=2
    )
    layers, _, schedule = oracle(False)
    attention = np.stack([w[:2] for *_, w in layers], 1).mean(0, dtype=np.float64)
    beta = np.zeros(found.beta.shape)
    for s in range(schedule.num_scales):
        rows = attention[:, :, scale_slice(schedule, s)].mean(-2)
        beta[..., s, :] = np.add.reduceat(rows, schedule.starts, axis=-1)
    np.testing.assert_allclose(found.beta, beta, atol=1e-5)
    np.testing.assert_allclose(found.beta.sum(-1), 1, atol=1e-5)
    images = measure_calibration.attention(model, LABELS, Sampling(cfg=1.5, greedy=True))
    np.testing.assert_allclose(images["mass"].mean(0), beta, atol=1e-5)
    for s, entropy in enumerate(np.moveaxis(images["entropy"], -1, 0)):
        rows = np.stack([w[:2] for *_, w in layers], 1)[:, :, :, scale_slice(schedule, s)].mean(-2)
        wanted = -np.where(rows > 0, rows * np.log(np.maximum(rows, 1e-30)), 0).sum(-1)
        np.testing.assert_allclose(entropy, wanted, atol=1e-4)
    assert found.num_samples == 4 and (found.rank_dispersion == 0).all()  # greedy: the same images
    assert np.isfinite(scas(found.beta, 1)[..., 1:-1]).all()
    assert (found.selectivity[:, 0] == 0).all() and (found.selectivity[:, 1:] > 0).all()
