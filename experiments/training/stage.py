"""Parts that all training stages share: the order of the pictures, their sharding, AdamW with
clipping, learning rate schedules, and the moving average of the weights.

Parameters are flat dictionaries {name: array} (`varjax.storage.parameters.named`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.training.data import Dataset
from experiments.training.decoding import Ahead, InFiles
from experiments.training.mesh import TrainingMesh
from experiments.training.settings import TrainingSettings
from varjax.generation import hosts
from varjax.generation.sharding import place
from varjax.models import registry
from varjax.storage import parameters

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class TrainingStage:
    """One stage of a training run: a model, its recipe and its data. Subclasses add

        optimizer() -> optax transformation
        step(state, n) -> (state, metrics)    step n, counted from 0; scalars on the device
        validate(state) -> dict of numbers    measured with the averaged weights

    Everything random in step n follows from the seed and n. So a checkpoint needs only a state and
    its step, and a resumed run repeats exactly what an uninterrupted one does.

    The compiled methods take the stage as a static argument, so that stages with equal settings in
    one process share programs. These methods must not read `data`, which comparisons leave out.
    """

    settings: TrainingSettings
    config: object
    data: Dataset = field(compare=False, repr=False)
    mesh: TrainingMesh = field(default=TrainingMesh(), kw_only=True)
    # returns {name: array}, the parameters before step 0; None: they are drawn
    given: Callable[[], Mapping] | None = field(
        default=None, kw_only=True, compare=False, repr=False
    )
    # (stage, state, folder, step) -> path: draws a sheet of pictures; None: there are none
    draw: Callable[["TrainingStage", dict, Path, int], Path] | None = field(
        default=None, kw_only=True, compare=False, repr=False
    )

    name: ClassVar[str]
    part: ClassVar[str]  # which part of the model is trained: "codec" or "transformer"
    ema: ClassVar[float]  # decay of the averaged weights
    phases: ClassVar[Mapping[int, str]] = {}  # steps for which another program is compiled

    @property
    def network(self) -> type[nnx.Module]:
        return registry.family(self.settings.family).parts[self.part].module

    @property
    def steps(self) -> int:
        return getattr(self.settings, f"{self.name}_steps")

    @property
    def batch_size(self) -> int:
        return getattr(self.settings, f"{self.name}_batch_size")

    def state_of(self, params: Mapping) -> dict:
        """State before step 0 with these parameters, all that a checkpoint holds: {"params",
        "ema", "optimizer", "step"}. It may be traced."""
        # an explicit type: weakly typed leaves would make the first step compile twice
        params = {name: jnp.asarray(value, value.dtype) for name, value in params.items()}
        return {
            "params": params,
            "ema": jax.tree.map(jnp.copy, params),
            "optimizer": self.optimizer().init(params),
            "step": jnp.zeros((), jnp.int32),
        }

    def first_state(self) -> dict:
        """Return the state before step 0, where it belongs. On a mesh each device makes its own
        part of averages and moments."""
        places = self.places(self.shapes)
        if self.given:
            params = self.given()
        else:
            drawn = self.network(self.config, rngs=nnx.Rngs(self.settings.seed))
            params = parameters.named(drawn)
        if self.mesh.size == 1:
            return jax.device_put(self.state_of(params), places)
        # a compiled initialisation of all parameters takes minutes to compile
        return jax.jit(self.state_of, out_shardings=places)(place(params, places["params"]))

    @cached_property
    def shapes(self) -> dict:
        """Shapes and types of the state, by which it is placed and read back."""
        params = parameters.named(parameters.abstract(self.network, self.config))
        return jax.eval_shape(self.state_of, params)

    def places(self, state: dict) -> dict:
        """Return where each array of a state lies, in place of the array."""
        if self.mesh.size == 1:
            # the default device, and committed: every later state is, and would compile again
            place = jax.sharding.SingleDeviceSharding(jnp.zeros(()).devices().pop())
            return jax.tree.map(lambda _: place, state)
        return self.mesh.state(state)

    def spread(self, *arrays: np.ndarray | jax.Array) -> list:
        """Return arrays of pictures as they are divided over the mesh. They are whole on all
        devices where they cannot be divided evenly, as in a short validation."""
        if self.mesh.size == 1:
            return list(arrays)
        even = all(len(array) % self.mesh.size == 0 for array in arrays)
        where = self.mesh.batch() if even else self.mesh.whole()
        return [place(array, where) for array in arrays]

    def everywhere(self, tree: Tree) -> Tree:
        """Return arrays that every device of every process needs, for a compiled method."""
        return place(tree, self.mesh.whole()) if hosts.count() > 1 else tree

    def seen(self, tree: Tree) -> Tree:
        """Return results of a compiled method so that every process can read them."""
        if hosts.count() == 1:
            return tree
        whole = self.mesh.whole()
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, whole), tree)

    def kept(self, state: dict) -> dict:
        """Return a new state of a compiled step, which lies as the old one did."""
        if self.mesh.size == 1:
            return state
        return jax.lax.with_sharding_constraint(state, self.mesh.state(state))

    def model(self, params: Mapping) -> nnx.Module:
        """Return the network with these parameters, for example `state["ema"]`."""
        return parameters.fill(parameters.abstract(self.network, self.config), params)

    def key(self, n: int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.settings.seed), n)

    def pictures(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pictures of step n, int [B], and which of them are mirrored, bool [B]."""
        size, seed = self.batch_size, self.settings.seed
        chosen = pictures_of_step(len(self.data.train_labels), size, seed, n)
        return chosen, np.random.default_rng((seed, n, 1)).random(size) < 0.5

    def images(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pictures of step n, uint8 [B, S, S, 3], half of them mirrored on average, and
        their labels [B]."""
        chosen, mirrored = self.pictures(n)
        images = self._ahead.batch(n) if self._ahead else self.data.train[chosen]
        images = np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
        return images, self.data.train_labels[chosen]

    @cached_property
    def _ahead(self) -> Ahead | None:
        """The steps' pictures that stay in their files. A process reads what its devices take."""
        if not isinstance(self.data.train, InFiles):
            return None
        own = None
        if hosts.count() > 1:
            every = np.arange(self.batch_size)
            parts = self.mesh.batch().addressable_devices_indices_map((self.batch_size,))
            own = np.unique(np.concatenate([every[index] for index in parts.values()]))
        return Ahead(self.data.train, lambda n: self.pictures(n)[0], own)


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def pictures_of_step(count: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Return int64 [batch_size], the pictures of a step. Every epoch is a new permutation. It is a
    pure function of seed and step, so that resuming needs no state."""
    positions = step * batch_size + np.arange(batch_size)
    return np.array([_order(count, seed, int(p // count))[p % count] for p in positions])


def whole_batches(count: int, batch_size: int) -> Iterator[slice]:
    """Return batches of one size in order, so that one program serves all. The rest is left out."""
    size = min(batch_size, count)
    return (slice(start, start + size) for start in range(0, count - size + 1, size))


def learning_rate(
    peak: float, steps: int, warm_up: int = 0, flat_until: float = 0.0
) -> optax.Schedule:
    """Return a schedule: linear warm-up, a constant peak, then a cosine to 1 % of the peak.

    warm_up: steps. flat_until: the part of the run after which the cosine begins.
    """
    warm_up = min(warm_up, steps // 2)
    flat = max(0, round(steps * flat_until) - warm_up)
    pieces = [
        optax.linear_schedule(peak / max(warm_up, 1), peak, max(warm_up - 1, 1)),
        optax.constant_schedule(peak),
        optax.cosine_decay_schedule(peak, max(steps - warm_up - flat, 1), 0.01),
    ]
    return optax.join_schedules(pieces, [warm_up, warm_up + flat])


def adamw(
    rate: optax.Schedule, b2: float, clip: float, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """AdamW on gradients that are clipped to the norm `clip` over all parameters. Matrices and
    convolutions decay; embeddings, biases, scales and phi do not."""
    moments = optax.adamw(
        rate,
        b1=0.9,
        b2=b2,
        weight_decay=weight_decay,
        mask=lambda params: {name: name.endswith("/kernel") for name in params},
    )
    return optax.chain(optax.clip_by_global_norm(clip), moments)


def descend(
    state: dict,
    loss_of: Callable,
    batch: tuple,
    optimizer: optax.GradientTransformation,
    ema: float,
    parts: int = 1,
) -> tuple[dict, tuple, jax.Array]:
    """Take one step down the gradient of a loss.

    The average follows quickly at first (decay (1 + n) / (10 + n), at most `ema`), so that it is
    useful after short runs, too.

    Args:
      loss_of: function (params, *batch) -> (loss, (means, totals)). loss, means: means over the
        batch; totals: sums over it.
      parts: how many equal parts of the batch run one after the other, so that only one of them is
        in memory at a time. Every device has pictures of every part.

    Returns the new state, (loss, (means, totals)), and the norm of the gradients before clipping.
    """
    function = jax.value_and_grad(loss_of, has_aux=True)

    def add(total, part):
        return jax.tree.map(jnp.add, total, function(state["params"], *part)), None

    if parts == 1:
        found, gradients = function(state["params"], *batch)
    else:
        # part i takes pictures i, i + parts, ..., which lie on all devices
        batch = jax.tree.map(lambda a: a.reshape(-1, parts, *a.shape[1:]).swapaxes(0, 1), batch)
        first = jax.tree.map(lambda a: a[0], batch)
        shapes = jax.eval_shape(function, state["params"], *first)
        zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        ((loss, (means, totals)), gradients), _ = jax.lax.scan(add, zero, batch)
        loss, means, gradients = jax.tree.map(lambda a: a / parts, (loss, means, gradients))
        found = loss, (means, totals)
    changes, moments = optimizer.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    count = state["step"].astype(jnp.float32)
    decay = jnp.minimum(ema, (1 + count) / (10 + count))
    average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state["ema"], params)
    new = {"params": params, "ema": average, "optimizer": moments, "step": state["step"] + 1}
    return {**state, **new}, found, optax.tree.norm(gradients)
