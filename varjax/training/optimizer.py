"""AdamW with clipping, learning rate schedules, and the moving average of the weights.

Parameters are flat dictionaries {name: array} (`varjax.models.parameters.named`).
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax


def learning_rate(
    peak: float, steps: int, warm_up: int = 0, flat_until: float = 0.0
) -> optax.Schedule:
    """Linear warm-up over `warm_up` steps, constant until the part `flat_until` of the run, then a
    cosine to 1 % of the peak."""
    warm_up = min(warm_up, steps // 2)
    flat = max(0, round(steps * flat_until) - warm_up)
    pieces = [
        optax.linear_schedule(peak / max(warm_up, 1), peak, max(warm_up - 1, 1)),
        optax.constant_schedule(peak),
        optax.cosine_decay_schedule(peak, max(steps - warm_up - flat, 1), 0.01),
    ]
    return optax.join_schedules(pieces, [warm_up, warm_up + flat])


def decays(params: Mapping) -> dict[str, bool]:
    """Weight decay acts on matrices and convolutions, not on embeddings, biases, scales or phi."""
    return {name: name.endswith("/kernel") for name in params}


def adamw(
    rate: optax.Schedule, b2: float, clip: float, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """AdamW on gradients whose norm over all parameters is at most `clip`."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(rate, b1=0.9, b2=b2, weight_decay=weight_decay, mask=decays),
    )


def initial_state(params: Mapping, optimizer: optax.GradientTransformation) -> dict:
    """{"params", "ema", "optimizer", "step"}: what a checkpoint holds, all arrays."""
    # an explicit type: weakly typed leaves would make the first step compile twice
    params = {name: jnp.asarray(value, value.dtype) for name, value in params.items()}
    return {
        "params": params,
        "ema": jax.tree.map(jnp.copy, params),
        "optimizer": optimizer.init(params),
        "step": jnp.zeros((), jnp.int32),
    }


def descend(
    state: dict, loss_of: Callable, optimizer: optax.GradientTransformation, ema: float
) -> tuple[dict, object, jax.Array]:
    """One step down `loss_of(params) -> (loss, more)`.

    The average follows quickly at first (decay (1 + n) / (10 + n), at most `ema`), so that short
    runs have a useful one.

    Returns the new state, what `loss_of` gave, and the norm of the gradients before clipping.
    """
    found, gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
    changes, moments = optimizer.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    count = state["step"].astype(jnp.float32)
    decay = jnp.minimum(ema, (1 + count) / (10 + count))
    average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state["ema"], params)
    new = {"params": params, "ema": average, "optimizer": moments, "step": state["step"] + 1}
    return {**state, **new}, found, optax.tree.norm(gradients)
