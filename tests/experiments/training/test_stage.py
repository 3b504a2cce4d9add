"""Schedules, weight decay and the moving average."""

import chex
import jax.numpy as jnp
import numpy as np

from experiments.training import stage as optimizer


def test_learning_rate():
    rate = optimizer.learning_rate(1.0, steps=100, warm_up=10, flat_until=0.5)
    values = np.array([rate(n) for n in range(101)])
    assert 0 < values[0] < 0.2 and (np.diff(values[:10]) > 0).all()
    chex.assert_trees_all_close(values[10:50], 1)
    assert (np.diff(values[50:]) <= 0).all() and np.isclose(values[100], 0.01)


def _adamw(weight_decay: float):
    return optimizer.adamw(optimizer.learning_rate(0.1, 10), 0.95, 1.0, weight_decay)


def _state(params: dict, adamw) -> dict:
    averages, moments = dict(params), adamw.init(params)
    return {"params": params, "ema": averages, "optimizer": moments, "step": jnp.asarray(0)}


def test_weight_decay_spares_embeddings_biases_and_scales():
    names = ["a/kernel", "a/bias", "norm/scale", "quantizer/embedding", "quantizer/phi_kernel"]
    params, adamw = {name: jnp.ones((2, 2)) for name in names}, _adamw(weight_decay=0.5)
    state = _state(params, adamw)
    state, _, norm = optimizer.descend(state, lambda params: (0.0, ((), ())), (), adamw, 0.998)
    changed = [name for name in names if not np.allclose(state["params"][name], 1)]
    assert changed == ["a/kernel"] and float(norm) == 0 and int(state["step"]) == 1


def test_average_follows_slowly():
    adamw = _adamw(weight_decay=0.0)
    state = _state({"w": jnp.zeros(3)}, adamw)
    state = {**state, "step": jnp.asarray(1000)}
    new, _, _ = optimizer.descend(state, lambda p: (-p["w"].sum(), ((), ())), (), adamw, ema=0.9)
    chex.assert_trees_all_close(new["ema"]["w"], 0.1 * new["params"]["w"], rtol=1e-5)
