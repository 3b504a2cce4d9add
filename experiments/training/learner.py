"""Learning of last uses: which head may see which token for how long, by gradients through the
model (`varjax.models.teacher_forcing.Gates`).

A token of scale j has in every head one last use u in {j, ..., K - 1}, with logits z. For every
image a step samples last uses by Gumbel-softmax, so that attention, which renormalises, cannot
shrink all gates at no cost; the gate of scale s is P(u >= s), stretched so that 0 and 1 are
reached. The loss is the divergence from the full cache's logits, tokens forced. An augmented
Lagrangian holds the expected tokens after every store at the budget. At the end the best last uses
under the budget are those that gain most of sqrt(P(u >= s)) (`policies.last_uses`).

Where tokens are drawn one by one, a stage takes the place of a scale, and every head has room of
its own (`policies.learned.LearnedTokens`).

The loss is told in parts of the first table's divergence, so that nothing here depends on how large
a model's divergences are.

Letters: B images, K scales or stages, L layers, N heads, F tokens that are cached (of the image),
V vocabulary.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from experiments.training.mesh import TrainingMesh
from experiments.training.stage import pictures_of_step, whole_batches
from varjax.core.allocation import Geometry
from varjax.core.sampling import Sampling
from varjax.core.sequence import SCALES, TOKENS
from varjax.models import teacher_forcing
from varjax.models.teacher_forcing import Gates
from varjax.policies.learned import Learned, LearnedScales, LearnedTokens
from varjax.policies.token_rule import SHORT_STAGE, period_of

# Of the start's last use; the others have 0. By scale, in small budgets, which what is not yet sure
# would fill by itself, it is more: 1.8 for every factor e below 0.2.
FIRST_LOGIT = {SCALES: 2.5, TOKENS: 4.0}
SURER_BELOW, SURER = 0.2, 1.8
# Of the samples, at the first step and at the last one. Colder ones learn slower.
TEMPERATURES = 1.0, 0.6
STRETCH = 0.05  # what is cut off at both ends of a gate
RATE, B1, B2, EPSILON = 0.3, 0.9, 0.98, 1e-15  # of Adam; its rate falls to a tenth
# Of a violated budget: quadratic, and of its multipliers, at most at so great an excess a step: the
# first samples hold much more than small budgets, and what is dropped then is hardly found again.
WEIGHT, MULTIPLIER_STEP, LARGEST_EXCESS = 5.0, 0.5, 0.1
# of the budget, so that no token that is sure to stay has to leave when the table is made
AIM = 0.99


@dataclass(frozen=True, eq=False)
class Samples:
    """Images that the full cache has drawn.

    condition: arrays of all images, as `encode_condition` takes them.
    given: float32 [I, L, C], `teacher_forcing.seen_codes` of their tokens; token by token these
      themselves, int32 [I, L].
    logits: float32 [I, L, (bits,) V], the full cache's.
    """

    condition: PyTree[np.ndarray]
    given: np.ndarray
    logits: np.ndarray

    def __len__(self) -> int:
        return len(self.given)

    def take(self, index: np.ndarray | slice) -> tuple:
        return jax.tree.map(lambda a: a[index], (self.condition, self.given, self.logits))


@dataclass(frozen=True)
class LearnerSettings:
    """What decides the result besides model and samples, and how often a run says and saves what it
    has. digest: of all that the samples depend on. period: as of `Learned`."""

    budget: float
    steps: int
    batch_size: int
    seed: int
    digest: str
    period: int | None = None
    log_every: ClassVar[int] = 20
    validate_every: ClassVar[int] = 50
    checkpoint_every: ClassVar[int] = 50

    @property
    def name(self) -> str:
        return f"budget-{self.budget!r}"

    def rule(self, geometry: Geometry) -> LearnedScales | LearnedTokens:
        """The policy's rule; `UserError` if its budget is too small, or the period cannot be."""
        rule = Learned(budget=self.budget, period=self.period).rule(geometry.kind)
        rule.check(geometry)
        rule.check_budget(geometry)
        return rule

    def first_logit(self, geometry: Geometry) -> float:
        """The logit of the start's last uses."""
        smaller = math.log(SURER_BELOW / self.budget) if geometry.kind == SCALES else 0
        return FIRST_LOGIT[geometry.kind] + SURER * max(0, smaller)

    def deciding(self, stage: str) -> dict:
        return dataclasses.asdict(self)


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
    draw: ClassVar[None] = None
    phases: ClassVar[Mapping[int, str]] = {}

    name = property(attrgetter("settings.name"))
    steps = property(attrgetter("settings.steps"))
    batch_size = property(attrgetter("settings.batch_size"))

    @cached_property
    def _programs(self) -> "Programs":
        settings = self.settings
        return Programs(self.sampling, self.geometry, self.steps, settings.seed, settings.period)

    @cached_property
    def room(self) -> int:
        """Tokens that all heads may hold together; token by token, that may stay in each."""
        return self.settings.rule(self.geometry).room(self.geometry, self.settings.budget)

    @cached_property
    def first_divergence(self) -> float:
        """That of the start."""
        return max(self.divergence(self.start), 1e-9)

    # --- states -----------------------------------------------------------------------------------

    @cached_property
    def shapes(self) -> dict:
        return jax.eval_shape(self._first)

    def first_state(self) -> dict:
        return jax.device_put(self._first(), self.places(self.shapes))

    def _first(self) -> dict:
        return self._programs.first_state(self.start, self.settings.first_logit(self.geometry))

    def places(self, state: dict) -> dict:
        """Where each array of a state lies: whole on every device."""
        one = jax.sharding.SingleDeviceSharding(jnp.zeros(()).devices().pop())
        where = one if self.mesh.size == 1 else self.mesh.whole()
        return jax.tree.map(lambda _: where, state)

    def step(self, state: dict, n: int) -> tuple[dict, dict]:
        settings = self.settings
        chosen = pictures_of_step(len(self.train), self.batch_size, settings.seed, n)
        scale = jnp.float32(self.first_divergence), jnp.float32(self.room)
        batch = self._spread(self.train.take(chosen))
        return self._programs.step(self._network, state, jnp.int32(n), scale, batch)

    @cached_property
    def _network(self) -> nnx.Module:
        """The transformer, on every device of the mesh."""
        whole = self.mesh.size > 1
        return jax.device_put(self.transformer, self.mesh.whole()) if whole else self.transformer

    def _spread(self, batch: tuple) -> tuple:
        """Arrays of images as they are divided over the mesh; whole where they cannot be."""
        if self.mesh.size == 1:
            return batch
        even = len(batch[1]) % self.mesh.size == 0
        return jax.device_put(batch, self.mesh.batch() if even else self.mesh.whole())

    # --- what was learned -------------------------------------------------------------------------

    def keep(self, state: Mapping) -> np.ndarray:
        """float32 [K, L, N, F]: P(u >= s), the probability that scale s may see a token."""
        return np.moveaxis(np.asarray(self._programs.kept(state["logits"])), -1, 0)

    def best(self, gain: np.ndarray) -> Int[np.ndarray, "L N F"]:
        """The best last uses under the budget. gain: [K, L, N, F], what each scale sees in a
        token."""
        return self.settings.rule(self.geometry).last_uses(gain, self.geometry, self.room)

    def divergence(self, last_use: Int[np.ndarray, "L N F"]) -> float:
        """Mean divergence of the held-back images under a table, in nats per token."""
        scales = np.arange(self._programs.scales)
        table = (last_use[:, None] >= scales[:, None, None]).astype(np.float32)  # [L, K, N, F]
        batches = whole_batches(len(self.held), self.batch_size)
        batches = (self._spread(self.held.take(batch)) for batch in batches)
        found = [self._programs.lost(self._network, table, batch) for batch in batches]
        return float(np.mean(jax.device_get(found)))

    def validate(self, state: dict) -> dict:
        return {"KL": self.divergence(self.best(np.sqrt(self.keep(state))))}


@dataclass(frozen=True)
class Programs:
    """The compiled functions of all budgets; those of equal fields are the same."""

    sampling: Sampling
    geometry: Geometry
    steps: int
    seed: int
    period: int | None = None

    @cached_property
    def source(self) -> np.ndarray:
        """int [F]: the scale, or stage, of every cached token."""
        return Learned(period=self.period).rule(self.geometry.kind).source(self.geometry)

    @property
    def scales(self) -> int:
        """K. The last scale has no token that is cached, the last stage has."""
        return 1 + int(self.source[-1]) + (not self.period)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        rate = optax.cosine_decay_schedule(RATE, self.steps, 0.1)
        return optax.adam(rate, b1=B1, b2=B2, eps=EPSILON)

    def first_state(self, start: Int[Array | np.ndarray, "L N F"], logit: float) -> dict:
        """The state before step 0, which begins with these last uses, of this logit."""
        logits = logit * jax.nn.one_hot(start, self.scales)
        multipliers = jnp.zeros(jax.eval_shape(self.expected, logits).shape)
        moments = self.optimizer.init(logits)
        return {"logits": logits, "optimizer": moments, "multipliers": multipliers}

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def step(self, transformer: nnx.Module, state: dict, n: Array, scale: tuple, batch: tuple):
        """The state after step n, and its metrics. scale: divergence of the start, and tokens that
        fit."""
        start, limit = scale
        # 0 lets tokens be fewer than fit; slots of a head serve nobody else, so they are filled
        least, rooms = (-jnp.inf, state["multipliers"][0].size) if self.period else (0, 1)

        def loss_of(logits):
            gates = self.gates(logits, key, len(batch[1]), tau)
            lost = divergence(transformer, self.sampling, gates, batch).mean()
            over, multipliers = self.over(logits, limit), state["multipliers"]
            pressed = jnp.maximum(multipliers + WEIGHT * over, least)
            penalty = (pressed**2 - multipliers**2).sum() / (2 * WEIGHT * rooms)
            return lost / start + penalty, (lost, over)

        first, last = TEMPERATURES
        tau = first * (last / first) ** (n / self.steps)
        key = jax.random.fold_in(jax.random.key(self.seed), n)
        gradient, (lost, over) = jax.grad(loss_of, has_aux=True)(state["logits"])
        changes, moments = self.optimizer.update(gradient, state["optimizer"])
        excess = jnp.clip(over, -LARGEST_EXCESS, LARGEST_EXCESS)
        new = {
            "logits": optax.apply_updates(state["logits"], changes),
            "optimizer": moments,
            "multipliers": jnp.maximum(state["multipliers"] + MULTIPLIER_STEP * excess, least),
        }
        return state | new, {"loss": lost, "over": over.max()}

    @partial(jax.jit, static_argnums=0)
    def lost(self, transformer: nnx.Module, table: Float[Array, "L K N F"], batch: tuple) -> Array:
        """Mean divergence of some images under a table."""
        gates = Gates(table, period=self.period or 1)
        return divergence(transformer, self.sampling, gates, batch).mean()

    def existing(self, logits: Float[Array, "*L N F K"]) -> Float[Array, "*L N F K"]:
        """Logits without last uses before a token exists."""
        exists = np.arange(logits.shape[-1]) >= self.source[:, None]
        return jnp.where(exists, logits, -1e9)

    def kept(self, logits: Float[Array, "L N F K"]) -> Float[Array, "L N F K"]:
        """P(u >= s) of every scale s."""
        return kept_until(jax.nn.softmax(self.existing(logits), -1))

    def expected(self, logits: Float[Array, "L N F K"]) -> Float[Array, "..."]:
        """Expected tokens of all heads right after every store, [stores, L]; token by token those
        of every head that stay after a stage, [stages, L, N]."""
        later = np.arange(logits.shape[-1]) > self.source[:, None]
        held = jnp.moveaxis(jnp.where(later, self.kept(logits), 0).sum(2), -1, 0)  # [K, L, N]
        if self.period:
            return held[2:]
        held = held.sum(-1)
        # as `core.allocator.after_each_store`
        done, waiting = held[1:], held[:-1]
        return jnp.cumsum(done, -1) + waiting.sum(-1, keepdims=True) - jnp.cumsum(waiting, -1)

    def over(self, logits: Float[Array, "L N F K"], limit: Float[Array, ""]) -> Array:
        """How far what is expected is above the limit, in parts of it, shaped as `expected`."""
        if self.period:  # before it, as many as there are
            stages = np.arange(1, self.scales - 1)[:, None, None]
            limit = jnp.minimum(limit, stages * self.period)
        else:
            limit = AIM * limit
        return self.expected(logits) / limit - 1

    def gates(
        self, logits: Float[Array, "L N F K"], key: Array, images: int, tau: Float[Array, ""]
    ) -> Gates:
        """Gates of sampled last uses; they are drawn layer by layer, and again for gradients."""

        def of_layer(values) -> Float[Array, "B K N F"]:
            logits, key = values
            noise = jax.random.gumbel(key, (images, *logits.shape))
            kept = kept_until(jax.nn.softmax((self.existing(logits) + noise) / tau, -1))
            gates = jnp.clip((1 + 2 * STRETCH) * kept - STRETCH, 0, 1)
            return jnp.moveaxis(gates, -1, 1)

        keys = jax.random.split(key, len(logits))
        return Gates((logits, keys), of_layer, period=self.period or 1)


def even_period(geometry: Geometry, asked: int | None = None) -> int | None:
    """Tokens of a stage, at most as many as are asked for (None: 8), where tokens are drawn one by
    one: stages are as even as can be, so that a table tells the period."""
    if geometry.kind == SCALES or (asked or 0) >= geometry.schedule.steps:
        return asked  # what cannot be is told by the rule, as it was asked for
    stages = -(-geometry.schedule.steps // (asked or SHORT_STAGE))
    return period_of(geometry.schedule, stages)


def kept_until(p: Float[Array, "*shape K"]) -> Float[Array, "*shape K"]:
    """P(u >= s) of probabilities of u."""
    return jnp.flip(jnp.cumsum(jnp.flip(p, -1), -1), -1)


def divergence(
    transformer: nnx.Module, sampling: Sampling, gates: Gates, batch: tuple
) -> Float[Array, "B L"]:
    """KL from the full cache's distribution of every token; of one of bits the sum over them."""
    condition, given, reference = batch
    found = teacher_forcing.guided(transformer, condition, given, sampling, gates)
    p, q = (jax.nn.log_softmax(x.astype(jnp.float32), axis=-1) for x in (reference, found))
    return (jnp.exp(p) * (p - q)).sum(-1).reshape(*given.shape[:2], -1).sum(-1)
