"""What training the codec and training the transformer have in common: the order of the pictures,
where they lie, AdamW with clipping, learning rate schedules, and the moving average of the weights.

Parameters are flat dictionaries {name: array} (`varjax.nn.parameters.named`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from varjax.models import registry
from varjax.nn import parameters
from varjax.training.data import Dataset
from varjax.training.settings import TrainingSettings

RESIDENT = 16 * 2**30  # bytes of pictures or tokens that are put on the device once


@dataclass(frozen=True)
class Stage:
    """One stage of a training run: a model, its recipe and its data. Subclasses add

        optimizer() -> optax transformation
        step(state, n) -> (state, metrics)    step n, counted from 0; scalars on the device
        validate(state) -> dict of numbers    of the averaged weights

    Everything random in step n follows from the seed and n. So a state and its step are all that a
    checkpoint needs, and a resumed run repeats exactly what an uninterrupted one does.

    The compiled methods take the stage as a static argument, so that stages of the same settings in
    one process share them: they must not read `data`, which does not count in comparisons.
    """

    settings: TrainingSettings
    config: object
    data: Dataset = field(compare=False, repr=False)

    name: ClassVar[str]
    part: ClassVar[str]  # of the model: "codec" or "transformer"
    ema: ClassVar[float]  # decay of the averaged weights

    @property
    def network(self) -> type[nnx.Module]:
        return registry.family(self.settings.family).parts[self.part].module

    @property
    def steps(self) -> int:
        return getattr(self.settings, f"{self.name}_steps")

    @property
    def batch_size(self) -> int:
        return getattr(self.settings, f"{self.name}_batch_size")

    @property
    def new_programs(self) -> tuple[int, ...]:
        """Steps from which on another program runs, for estimates of time."""
        return ()

    def initial_state(self) -> dict:
        model = self.network(self.config, rngs=nnx.Rngs(self.settings.seed))
        return initial_state(parameters.named(model), self.optimizer())

    def model(self, params: Mapping) -> nnx.Module:
        """The network with these parameters, for example `state["ema"]`."""
        return parameters.fill(parameters.abstract(self.network, self.config), params)

    def key(self, n: int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.settings.seed), n)

    def drawn(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """int [B] and bool [B]: pictures of step n, and which of them are mirrored."""
        size, seed = self.batch_size, self.settings.seed
        chosen = indices(len(self.data.train_labels), size, seed, n)
        return chosen, flips(size, seed, n)

    def train_items(self, *index: np.ndarray):
        """Of the training data, which lies on the device unless it is large: steps then wait for
        no transfer."""
        return _take(self._train_data, index)

    @cached_property
    def _train_data(self):
        data = self.data.train
        return jnp.asarray(data) if data.nbytes <= RESIDENT else data


# --- which pictures a step sees: a pure function of seed and step, so resuming needs no state -----


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def indices(count: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """int64 [batch_size]: pictures of step `step`; every epoch is a new permutation."""
    positions = step * batch_size + np.arange(batch_size)
    return np.array([_order(count, seed, int(p // count))[p % count] for p in positions])


def flips(batch_size: int, seed: int, step: int) -> np.ndarray:
    """bool [batch_size]: which pictures of the step are mirrored, each with probability 1/2."""
    return np.random.default_rng((seed, step, 1)).random(batch_size) < 0.5


def _take(array, index: tuple):
    return _take_on_device(array, index) if isinstance(array, jax.Array) else array[index]


@jax.jit
def _take_on_device(array, index: tuple):
    return array[index]


def whole_batches(count: int, batch_size: int) -> Iterator[slice]:
    """Batches of one size in order, so that one program serves all; the rest is left out."""
    size = min(batch_size, count)
    return (slice(start, start + size) for start in range(0, count - size + 1, size))


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
