"""AdamW with clipping, learning rate schedules, and the moving average of the weights.

Parameters are flat dictionaries {name: array} (`varjax.models.parameters.named`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from varjax.errors import UserError

MOST_STEPS = 10**9  # the count is an int32


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What is needed to build the optimiser of a stage. `UserError` if a value is out of range."""

    steps: int
    lr: float
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0
    warm_up: int = 0  # steps of linear increase
    flat_until: float = 0.0  # part of the run before the cosine decay starts
    ema: float = 0.998

    def __post_init__(self):
        if self.steps < 1:
            raise UserError(f"{self.steps} training steps given: at least 1 is needed")
        if self.steps > MOST_STEPS:
            raise UserError(f"{self.steps} training steps given: at most {MOST_STEPS} work")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError(f"learning rate {self.lr} given: it must be positive and finite")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise UserError(
                f"weight decay {self.weight_decay} given: it must be at least 0 and finite"
            )
        if not 0 <= self.ema < 1:
            raise UserError(f"EMA decay {self.ema} given: it must be in [0, 1)")


def learning_rate(settings: OptimizerSettings) -> optax.Schedule:
    """Linear warm-up, constant until `flat_until`, then a cosine to 1 % of the peak."""
    warm_up = min(settings.warm_up, settings.steps // 2)
    flat = max(0, round(settings.steps * settings.flat_until) - warm_up)
    pieces = [
        optax.linear_schedule(settings.lr / max(warm_up, 1), settings.lr, max(warm_up - 1, 1)),
        optax.constant_schedule(settings.lr),
        optax.cosine_decay_schedule(settings.lr, max(settings.steps - warm_up - flat, 1), 0.01),
    ]
    return optax.join_schedules(pieces, [warm_up, warm_up + flat])


def decays(params: Mapping) -> dict[str, bool]:
    """Weight decay acts on matrices and convolutions, not on embeddings, biases, scales or phi."""
    return {name: name.endswith("/kernel") for name in params}


def build(settings: OptimizerSettings) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(
            learning_rate(settings),
            b1=settings.b1,
            b2=settings.b2,
            weight_decay=settings.weight_decay,
            mask=decays,
        ),
    )


def initial_state(params: Mapping, settings: OptimizerSettings) -> dict:
    """{"params", "ema", "optimizer", "step"}: what a checkpoint holds, all arrays."""
    # an explicit type: weakly typed leaves would make the first step compile twice
    params = {name: jnp.asarray(value, value.dtype) for name, value in params.items()}
    return {
        "params": params,
        "ema": jax.tree.map(jnp.copy, params),
        "optimizer": build(settings).init(params),
        "step": jnp.zeros((), jnp.int32),
    }


def update(state: dict, gradients: Mapping, settings: OptimizerSettings) -> tuple[dict, jax.Array]:
    """One step. Returns the new state and the norm of the gradients before clipping.

    The average follows quickly at first (decay (1 + n) / (10 + n)), so that short runs have a
    useful one.
    """
    changes, optimizer = build(settings).update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    count = state["step"].astype(jnp.float32)
    decay = jnp.minimum(settings.ema, (1 + count) / (10 + count))
    ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state["ema"], params)
    new = {"params": params, "ema": ema, "optimizer": optimizer, "step": state["step"] + 1}
    norm = jnp.sqrt(sum(jnp.square(gradient).sum() for gradient in gradients.values()))
    return {**state, **new}, norm
