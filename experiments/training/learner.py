"""Learning of last uses: which head may see which token for how long, by exchanges in a table.

A token of scale j has in every head one last use u in {j, ..., K - 1}. A step forces images that
the full cache has drawn through the model, with the gates of a table, and finds for all gates at
once what turning one over would do to the divergence from the full cache's logits:

- to first order its effect on the outputs of attention times their gradient (`turning`);
- to second order half of the square of the same effect on the log probability of tokens that are
  drawn from the gated logits: Fisher's information is the divergence's second derivative.

A gate is worth the divergence without its key less that with it. The worths, averaged over steps,
decide the next table: the best last uses under the budget, where what is kept has an advantage, so
great that a certain share of the table is exchanged. The share falls from step to step: early ones
change much at once, late ones what interacts.

Where tokens are drawn one by one, a stage takes the place of a scale, and every head has room of
its own (`policies.learned.LearnedTokens`).

Letters: B images, K scales or stages, L layers, N heads, F tokens that are cached (of the image),
V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, UInt8

from experiments.training import turning
from experiments.training.mesh import TrainingMesh
from experiments.training.stage import pictures_of_step, whole_batches
from varjax.core.allocation import Geometry
from varjax.core.sampling import Sampling
from varjax.core.sequence import SCALES, TOKENS
from varjax.models import teacher_forcing
from varjax.models.teacher_forcing import Gates
from varjax.policies.learned import Learned, LearnedScales, LearnedTokens, gain_of
from varjax.policies.token_rule import SHORT_STAGE, period_of

# At the first step and at the last one: the share of what a table keeps that is exchanged (token by
# token the start is further off), and how much the newest worths count in the average.
SHARES = {SCALES: (0.15, 0.005), TOKENS: (0.3, 0.005)}
NEWEST = 0.5, 0.3
TRIES, NEAR = 8, 0.8  # for an advantage; the share may be so much of what it should be
LEAST = 1e-6  # gain, in parts of the greatest: room that is left over takes any token
# Of stored gains: the advantage of what is kept, in those of the last step, and the share of what
# is kept that is worth less than what a file can hold.
SURE, ENOUGH = 4, 0.9
STATE = "last_use", "worth", "advantage"


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
    has. images: of a step. batch_size: those that are in memory together. digest: of all that the
    samples depend on. period: as of `Learned`."""

    budget: float
    steps: int
    images: int
    batch_size: int
    seed: int
    digest: str
    period: int | None = None
    log_every: ClassVar[int] = 1
    validate_every: ClassVar[int] = 4
    checkpoint_every: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return f"budget-{self.budget!r}"

    def rule(self, geometry: Geometry) -> LearnedScales | LearnedTokens:
        """The policy's rule; `UserError` if its budget is too small, or the period cannot be."""
        rule = Learned(budget=self.budget, period=self.period).rule(geometry.kind)
        rule.check(geometry)
        rule.check_budget(geometry)
        return rule

    def between(self, ends: tuple[float, float], n: int) -> float:
        """What falls by equal factors, at step n."""
        first, last = ends
        return first * (last / first) ** (n / max(1, self.steps - 1))

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
    batch_size = property(attrgetter("settings.images"))

    @cached_property
    def _programs(self) -> "Programs":
        return Programs(self.sampling, self.geometry, self.settings.period)

    @cached_property
    def room(self) -> int:
        """Tokens that all heads may hold together; token by token, that may stay in each."""
        return self.settings.rule(self.geometry).room(self.geometry, self.settings.budget)

    @cached_property
    def first_divergence(self) -> float:
        """That of the start."""
        return self.divergence(self.start)

    # --- states -----------------------------------------------------------------------------------

    @cached_property
    def shapes(self) -> dict:
        return jax.eval_shape(self.first_state)

    def first_state(self) -> dict:
        """The table, what its gates are worth, [K, L, N, F] in nats per token, and the advantage of
        what it keeps, by which it was made."""
        worth = jnp.zeros((self._programs.scales, *self.start.shape), jnp.float32)
        values = jnp.asarray(self.start, jnp.int32), worth, jnp.zeros((), jnp.float32)
        return dict(zip(STATE, values, strict=True))

    def places(self, state: dict) -> dict:
        """Where each array of a state lies: it is changed on the host."""
        one = jax.sharding.SingleDeviceSharding(jnp.zeros(()).devices().pop())
        return jax.tree.map(lambda _: one, state)

    def step(self, state: dict, n: int) -> tuple[dict, dict]:
        last_use, worth, advantage = (np.asarray(state[name]) for name in STATE)
        chosen = pictures_of_step(len(self.train), self.batch_size, self.settings.seed, n)
        lost, first, second = self._effects(last_use, chosen, n)
        # the divergence bends up both ways: where a key goes, and where one comes
        newest = np.where(self._kept(last_use), second / 2, -second / 2) - first
        part = self.settings.between(NEWEST, n) if n else 1
        worth = (1 - part) * worth + part * newest
        last_use, advantage = self._exchanged(last_use, worth, float(advantage), n)
        values = zip(STATE, (last_use, worth, advantage), strict=True)
        new = {name: jnp.asarray(value, state[name].dtype) for name, value in values}
        return new, {"loss": lost}

    def _effects(self, last_use: np.ndarray, chosen: np.ndarray, n: int) -> list[np.ndarray]:
        """Means over the chosen images (`Programs.effects`)."""
        table = jnp.asarray(np.where(self._kept(last_use), 1, turning.SHUT), jnp.float32)
        key, total = jax.random.fold_in(jax.random.key(self.settings.seed), n), None
        batches = list(whole_batches(len(chosen), self.settings.batch_size))
        for i, part in enumerate(batches):
            batch = self._spread(self.train.take(chosen[part]))
            one = self._programs.effects(self._network, table, batch, jax.random.fold_in(key, i))
            total = one if total is None else jax.tree.map(jnp.add, total, one)
        return [a / len(batches) for a in jax.device_get(total)]

    def _exchanged(
        self, last_use: np.ndarray, worth: np.ndarray, advantage: float, n: int
    ) -> tuple[np.ndarray, float]:
        """The table after step n, and the advantage of what was kept before. advantage: that of the
        step before; 0 for none."""
        wanted = self.settings.between(SHARES[self.geometry.kind], n)
        held = max(1, (last_use - self._programs.source).sum())
        low, high, best = 0.0, float(max(worth.max(), 1e-30)), last_use
        tried = advantage or high / 10
        for _ in range(TRIES):
            found = self.best(self._gain(last_use, worth, tried))
            share = np.abs(found - last_use).sum() / (2 * held)
            if share > wanted:
                low = tried
            else:
                best, high = found, tried
                if share >= NEAR * wanted:
                    break
            tried = np.sqrt(low * high) if low else tried / 2
        return best, high

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

    # --- tables -----------------------------------------------------------------------------------

    def _kept(self, last_use: Int[np.ndarray, "L N F"]) -> np.ndarray:
        """bool [K, L, N, F]: whether a scale may see a token."""
        return last_use >= np.arange(self._programs.scales)[:, None, None, None]

    def _gain(self, last_use: np.ndarray, worth: np.ndarray, advantage: float) -> np.ndarray:
        """float32 [K, L, N, F], in parts of the greatest."""
        gain = worth + advantage * self._kept(last_use)
        gain = gain / max(float(gain.max()), 1e-30)
        return np.maximum(gain, LEAST, dtype=np.float32)

    def stored(self, state: Mapping) -> UInt8[np.ndarray, "stored L N F"]:
        """The table as a file holds it: gains of scales 1 to K - 1, by which the best last uses are
        those of the state, and under other budgets good ones."""
        last_use, worth, advantage = (np.asarray(state[name]) for name in STATE)
        seen = np.arange(self._programs.scales)[:, None] > self._programs.source
        kept = self._kept(last_use) & seen[:, None, None]
        if not kept.any():
            return np.zeros(worth[1:].shape, np.uint8)
        advantage = SURE * advantage
        full = max(float(np.quantile(worth[kept], ENOUGH)) + advantage, 1e-30)
        gain = np.where(seen[:, None, None], worth + advantage * kept, 0)
        return np.round(255 * np.clip(gain / full, 0, 1))[1:].astype(np.uint8)

    def best(self, gain: np.ndarray) -> Int[np.ndarray, "L N F"]:
        """The best last uses under the budget. gain: [K, L, N, F], what each scale sees in a
        token."""
        return self.settings.rule(self.geometry).last_uses(gain, self.geometry, self.room)

    def divergence(self, last_use: Int[np.ndarray, "L N F"]) -> float:
        """Mean divergence of the held-back images under a table, in nats per token."""
        table = jnp.asarray(self._kept(last_use), jnp.float32)
        batches = whole_batches(len(self.held), self.settings.batch_size)
        batches = (self._spread(self.held.take(batch)) for batch in batches)
        found = [self._programs.lost(self._network, table, batch) for batch in batches]
        return float(np.mean(jax.device_get(found)))

    def validate(self, state: dict) -> dict:
        return {"KL": self.divergence(self.best(gain_of(self.stored(state))))}


@dataclass(frozen=True)
class Programs:
    """The compiled functions of all budgets; those of equal fields are the same."""

    sampling: Sampling
    geometry: Geometry
    period: int | None = None

    @cached_property
    def source(self) -> np.ndarray:
        """int [F]: the scale, or stage, of every cached token."""
        return Learned(period=self.period).rule(self.geometry.kind).source(self.geometry)

    @property
    def scales(self) -> int:
        """K. The last scale has no token that is cached, the last stage has."""
        return 1 + int(self.source[-1]) + (not self.period)

    @partial(jax.jit, static_argnums=0)
    def lost(self, transformer: nnx.Module, table: Float[Array, "K L N F"], batch: tuple) -> Array:
        """Mean divergence of some images under a table, in nats per token."""
        gates = Gates(jnp.moveaxis(table, 1, 0)[:, None], period=self.period or 1)
        return divergence(self._logs(transformer, gates, batch), batch).mean()

    @partial(jax.jit, static_argnums=0)
    def effects(
        self, transformer: nnx.Module, table: Float[Array, "K L N F"], batch: tuple, key: Array
    ) -> tuple[Array, Float[Array, "K L N F"], Float[Array, "K L N F"]]:
        """Mean divergence of some images under a table of gates that are 1 or `turning.SHUT`, in
        nats per token; and by how much it is greater with each gate open than with it shut, to
        first order, and the second derivative along that way."""
        gates = jnp.moveaxis(table, 1, 0)[:, None]
        of_images = jnp.broadcast_to(gates, (len(gates), len(batch[1]), *gates.shape[2:]))

        def both(values):
            gated = Gates(values, turning.attention, self.period or 1)
            logs = self._logs(transformer, gated, batch)
            drawn = jax.random.categorical(key, jax.lax.stop_gradient(logs))
            likelihood = jnp.take_along_axis(logs, drawn[..., None], -1)
            return divergence(logs, batch).mean(1), likelihood.sum(range(1, likelihood.ndim))

        (lost, likelihood), effects_on = jax.vjp(both, of_images)
        one, none = jnp.ones_like(lost), jnp.zeros_like(lost)
        # by the logarithms of gates
        ways = jnp.stack([one, none]), jnp.stack([none, one])
        first, score = of_images * jax.vmap(effects_on)(ways)[0]
        second = score**2 / batch[1].shape[1]
        return lost.mean(), *(jnp.moveaxis(a.mean(1), 1, 0) for a in (first, second))

    def _logs(self, transformer, gates: Gates, batch: tuple) -> Float[Array, "B L *bits V"]:
        """Log probabilities of all tokens."""
        condition, given, _ = batch
        logits = teacher_forcing.guided(transformer, condition, given, self.sampling, gates)
        return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def divergence(logs: Float[Array, "B L *bits V"], batch: tuple) -> Float[Array, "B L"]:
    """KL from the full cache's distribution of every token; of one of bits the sum over them."""
    _, given, reference = batch
    full = jax.nn.log_softmax(reference.astype(jnp.float32), axis=-1)
    lost = (jnp.exp(full) * (full - logs)).sum(-1)
    return lost.reshape(*given.shape[:2], -1).sum(-1)


def even_period(geometry: Geometry, asked: int | None = None) -> int | None:
    """Tokens of a stage, at most as many as are asked for (None: 8), where tokens are drawn one by
    one: stages are as even as can be, so that a table tells the period."""
    if geometry.kind == SCALES or (asked or 0) >= geometry.schedule.steps:
        return asked  # what cannot be is told by the rule, as it was asked for
    stages = -(-geometry.schedule.steps // (asked or SHORT_STAGE))
    return period_of(geometry.schedule, stages)
