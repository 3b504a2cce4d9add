"""Learning of last uses: which head may see which token for how long, by gradients through the
model (`varjax.models.teacher_forcing.Gates`).

A token of scale j has in every head one last use u in {j, ..., K - 1}, with logits z. For every
image a step samples last uses by Gumbel-softmax, so that attention, which renormalises, cannot
shrink all gates at no cost; the gate of scale s is P(u >= s), stretched so that 0 and 1 are
reached. The loss is the divergence from the full cache's logits, tokens forced. An augmented
Lagrangian holds the expected tokens after every store at the budget. At the end the best last uses
under the budget are those that gain most of sqrt(P(u >= s)) (`policies.last_uses`).

The loss is told in parts of the first table's divergence, so that nothing here depends on how large
a model's divergences are.

Letters: B images, K scales, L layers, N heads, F tokens that are cached, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from experiments.training.mesh import TrainingMesh
from experiments.training.stage import pictures_of_step, whole_batches
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.sampling import Sampling
from varjax.generation.sharding import place
from varjax.models import teacher_forcing
from varjax.models.teacher_forcing import Gates
from varjax.policies.last_uses import best_last_uses

FIRST_LOGIT = 2.5  # of the start's last use; the others have 0
TEMPERATURES = 0.7, 0.2  # of the samples, at the first step and at the last one
STRETCH = 0.05  # what is cut off at both ends of a gate
RATE, B1, B2, EPSILON = 0.15, 0.9, 0.98, 1e-15  # of Adam; its rate falls to a tenth
WEIGHT, MULTIPLIER_STEP = 5.0, 0.5  # of a violated budget: quadratic, and of its multipliers


@dataclass(frozen=True, eq=False)
class Samples:
    """Images that the full cache has drawn.

    condition: arrays of all images, as `encode_condition` takes them.
    codes: float32 [I, L, C], `teacher_forcing.seen_codes` of their tokens.
    logits: float32 [I, L, (bits,) V], the full cache's.
    """

    condition: PyTree[np.ndarray]
    codes: np.ndarray
    logits: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, index: np.ndarray | slice) -> tuple:
        return jax.tree.map(lambda a: a[index], (self.condition, self.codes, self.logits))


@dataclass(frozen=True)
class LearnerSettings:
    """What decides the result besides model and samples, and how often a run says and saves what it
    has. digest: of all that the samples depend on."""

    budget: float
    steps: int
    batch_size: int
    seed: int
    digest: str
    log_every: int = 20
    validate_every: int = 100
    checkpoint_every: int = 50

    @property
    def name(self) -> str:
        return f"budget-{self.budget:g}"

    def deciding(self, stage: str) -> dict:
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if not name.endswith("_every")}


@dataclass(frozen=True, eq=False, kw_only=True)
class Learner:
    """Learning under one budget, a stage of `experiments.training.loop`.

    start: int [L, N, F], the last uses that it begins with.
    """

    transformer: nnx.Module
    sampling: Sampling
    geometry: Geometry
    train: Samples
    held: Samples
    start: np.ndarray
    settings: LearnerSettings
    mesh: TrainingMesh = field(default=TrainingMesh())

    name = property(lambda self: self.settings.name)
    steps = property(lambda self: self.settings.steps)
    batch_size = property(lambda self: self.settings.batch_size)

    @property
    def limit(self) -> int:
        """Tokens that all heads may hold together after any store."""
        return int(self.settings.budget * self.geometry.dense_tokens + 1e-6)

    @cached_property
    def source(self) -> np.ndarray:
        """int [F]: the scale of every cached token."""
        schedule = self.geometry.schedule
        return schedule.scale_of_token[: schedule.persistent_tokens]

    @staticmethod
    def check_budget(settings: LearnerSettings, geometry: Geometry) -> None:
        """`UserError` if the budget holds no token."""
        if settings.budget * geometry.dense_tokens < 1:
            least = np.ceil(1e4 / max(1, geometry.dense_tokens)) / 1e4
            raise UserError(
                f"budget={settings.budget:g} holds no token of this model: give at least {least:g}"
            )

    # --- the state --------------------------------------------------------------------------------

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        rate = optax.cosine_decay_schedule(RATE, self.steps, 0.1)
        return optax.adam(rate, b1=B1, b2=B2, eps=EPSILON)

    def first_state(self) -> dict:
        scales, layers = self.geometry.schedule.num_scales, self.geometry.num_layers
        logits = FIRST_LOGIT * jax.nn.one_hot(self.start, scales)
        first = self.divergence(self.start)
        state = {
            "logits": logits,
            "optimizer": self.optimizer.init(logits),
            "multipliers": jnp.zeros((scales - 1, layers)),
            "first": jnp.float32(max(first, 1e-9)),
        }
        return jax.device_put(state, self.places(state))

    @cached_property
    def shapes(self) -> dict:
        scales, layers = self.geometry.schedule.num_scales, self.geometry.num_layers
        shape = jax.ShapeDtypeStruct
        logits = shape((*self.start.shape, scales), jnp.float32)
        return {
            "logits": logits,
            "optimizer": jax.eval_shape(self.optimizer.init, logits),
            "multipliers": shape((scales - 1, layers), jnp.float32),
            "first": shape((), jnp.float32),
        }

    def places(self, state: dict) -> dict:
        """Where each array of a state lies: whole on every device."""
        one = jax.sharding.SingleDeviceSharding(jnp.zeros(()).devices().pop())
        where = one if self.mesh.size == 1 else self.mesh.whole()
        return jax.tree.map(lambda _: where, state)

    # --- a step -----------------------------------------------------------------------------------

    def masked(self, logits: Float[Array, "*L N F K"]) -> Float[Array, "*L N F K"]:
        """Logits without last uses before a token exists."""
        exists = np.arange(logits.shape[-1]) >= self.source[:, None]
        return jnp.where(exists, logits, -1e9)

    def expected(self, logits: Float[Array, "L N F K"]) -> Float[Array, "stores L"]:
        """Expected tokens right after every store, as a part of the limit, less 1."""
        kept = kept_until(jax.nn.softmax(self.masked(logits), -1))
        later = np.arange(kept.shape[-1]) > self.source[:, None]
        held = jnp.where(later, kept, 0).sum((1, 2)).T  # [K, L]
        done, waiting = held[1:], held[:-1]
        rows = jnp.cumsum(done, -1) + waiting.sum(-1, keepdims=True) - jnp.cumsum(waiting, -1)
        return rows / self.limit - 1

    def gates(self, logits: Float[Array, "L N F K"], key: Array, images: int, tau) -> Gates:
        """Gates of sampled last uses; they are drawn layer by layer, and again for gradients."""

        def of_layer(values) -> Float[Array, "B K N F"]:
            logits, key = values
            noise = jax.random.gumbel(key, (images, *logits.shape))
            kept = kept_until(jax.nn.softmax((self.masked(logits) + noise) / tau, -1))
            gates = jnp.clip((1 + 2 * STRETCH) * kept - STRETCH, 0, 1)
            return jnp.moveaxis(gates, -1, 1)

        return Gates((logits, jax.random.split(key, len(logits))), of_layer)

    @cached_property
    def _step(self):
        def loss_of(logits, transformer, state, key, tau, batch):
            gates = self.gates(logits, key, len(batch[1]), tau)
            lost = divergence(transformer, self.sampling, gates, batch).mean()
            over, multipliers = self.expected(logits), state["multipliers"]
            pressed = jnp.maximum(multipliers + WEIGHT * over, 0)
            penalty = (pressed**2 - multipliers**2).sum() / (2 * WEIGHT)
            return lost / state["first"] + penalty, (lost, over)

        def step(transformer, state, n, batch):
            first, last = TEMPERATURES
            tau = first * (last / first) ** (n / self.steps)
            key = jax.random.fold_in(jax.random.key(self.settings.seed), n)
            gradient = jax.grad(loss_of, has_aux=True)
            found, (lost, over) = gradient(state["logits"], transformer, state, key, tau, batch)
            changes, moments = self.optimizer.update(found, state["optimizer"])
            multipliers = jnp.maximum(state["multipliers"] + MULTIPLIER_STEP * over, 0)
            new = {
                "logits": optax.apply_updates(state["logits"], changes),
                "optimizer": moments,
                "multipliers": multipliers,
            }
            return state | new, {"loss": lost, "over": over.max()}

        return jax.jit(step)

    def step(self, state: dict, n: int) -> tuple[dict, dict]:
        seed, count = self.settings.seed, len(self.train)
        batch = self.train.take(pictures_of_step(count, self.batch_size, seed, n))
        return self._step(self._network, state, jnp.int32(n), self._spread(batch))

    def _spread(self, batch: tuple) -> tuple:
        """Arrays of images as they are divided over the mesh."""
        if self.mesh.size == 1:
            return batch
        return jax.tree.map(lambda a: place(a, self.mesh.batch()), batch)

    @cached_property
    def _network(self) -> nnx.Module:
        """The transformer, on every device of the mesh."""
        if self.mesh.size == 1:
            return self.transformer
        return jax.device_put(self.transformer, self.mesh.whole())

    # --- what was learned -------------------------------------------------------------------------

    def keep(self, state: Mapping) -> np.ndarray:
        """float32 [K, L, N, F]: P(u >= s), the probability that scale s may see a token."""
        kept = kept_until(jax.nn.softmax(self.masked(state["logits"]), -1))
        return np.moveaxis(np.asarray(kept), -1, 0)

    def last_uses(self, state: Mapping) -> np.ndarray:
        """int [L, N, F]: the best last uses under the budget."""
        size = np.ones_like(self.source)
        return best_last_uses(np.sqrt(self.keep(state)), self.source, size, self.limit)

    def divergence(self, last_use: Int[np.ndarray, "L N F"]) -> float:
        """Mean divergence of the held-back images under a table, in nats per token."""
        scales = np.arange(self.geometry.schedule.num_scales)
        table = (last_use[:, None] >= scales[:, None, None]).astype(np.float32)  # [L, K, N, F]
        batches = whole_batches(len(self.held), self.batch_size)
        batches = (self._spread(self.held.take(batch)) for batch in batches)
        found = [self._lost(self._network, table, batch) for batch in batches]
        return float(np.mean(jax.device_get(found)))

    @cached_property
    def _lost(self):
        def lost(transformer, table, batch):
            return divergence(transformer, self.sampling, Gates(table), batch).mean()

        return jax.jit(lost)

    def validate(self, state: dict) -> dict:
        return {"KL": self.divergence(self.last_uses(state))}


def kept_until(p: Float[Array, "*shape K"]) -> Float[Array, "*shape K"]:
    """P(u >= s) of probabilities of u."""
    return jnp.flip(jnp.cumsum(jnp.flip(p, -1), -1), -1)


def divergence(
    transformer: nnx.Module, sampling: Sampling, gates: Gates, batch: tuple
) -> Float[Array, "B L"]:
    """KL from the full cache's distribution of every token; of one of bits the sum over them."""
    condition, codes, reference = batch
    found = teacher_forcing.guided_of_scales(transformer, condition, codes, sampling, gates)
    p, q = (jax.nn.log_softmax(x.astype(jnp.float32), axis=-1) for x in (reference, found))
    return (jnp.exp(p) * (p - q)).sum(-1).reshape(*codes.shape[:2], -1).sum(-1)
