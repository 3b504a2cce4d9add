"""Schedules, weight decay and the moving average."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from varjax.errors import UserError
from varjax.training import optimizer
from varjax.training.optimizer import OptimizerSettings


def test_learning_rate():
    rate = optimizer.learning_rate(OptimizerSettings(steps=100, lr=1.0, warm_up=10, flat_until=0.5))
    values = np.array([rate(n) for n in range(101)])
    assert 0 < values[0] < 0.2 and (np.diff(values[:10]) > 0).all()
    chex.assert_trees_all_close(values[10:50], 1)
    assert (np.diff(values[50:]) <= 0).all() and np.isclose(values[100], 0.01)


def test_weight_decay_spares_embeddings_biases_and_scales():
    names = ["a/kernel", "a/bias", "norm/scale", "quantizer/embedding", "quantizer/phi_kernel"]
    params = {name: jnp.ones((2, 2)) for name in names}
    settings = OptimizerSettings(steps=10, lr=0.1, weight_decay=0.5)
    state = optimizer.initial_state(params, settings)
    gradients = {name: jnp.zeros((2, 2)) for name in names}
    state, norm = optimizer.update(state, gradients, settings)
    changed = [name for name in names if not np.allclose(state["params"][name], 1)]
    assert changed == ["a/kernel"] and float(norm) == 0 and int(state["step"]) == 1


def test_average_follows_slowly():
    settings = OptimizerSettings(steps=10, lr=0.1, ema=0.9)
    state = optimizer.initial_state({"w": jnp.zeros(3)}, settings)
    state = {**state, "step": jnp.asarray(1000)}
    new, _ = optimizer.update(state, {"w": -jnp.ones(3)}, settings)
    chex.assert_trees_all_close(new["ema"]["w"], 0.1 * new["params"]["w"], rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"ema": 1.0}])
def test_wrong_settings(wrong):
    with pytest.raises(UserError):
        OptimizerSettings(**{"steps": 5, "lr": 0.1, **wrong})
