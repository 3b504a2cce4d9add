"""The decision after a stage, where tokens are drawn one by one: the policy is shown the tokens of
a layer, and those that it chooses are stored.

Layers whose caches are alike decide together, as many as `StageDecision.at_once` says: a decision
is many small operations, and a GPU starts each of them as a kernel. Pools stay apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import slot_moves, target, token_attention
from pallas_kernels.token_attention import Query
from varjax.core.observation import Observation
from varjax.core.policy import Rule
from varjax.core.token_state import EVERYTHING, LayerCache

# Bytes of positions of the layers that decide together: a dozen arrays of this size exist
# meanwhile, and on GPUs copies of the buffers, which take several times as much, unless a kernel
# moves slots. A CPU starts no kernels, and keeps what it compares: one layer at a time. Before
# Hopper XLA makes reductions of 18 layers a kernel that its assembler takes many minutes for.
TOGETHER = {"cpu": 0, "gpu": 16 * 2**20, "tpu": 16 * 2**20}
TOGETHER_SINCE_HOPPER = 40 * 2**20
HOPPER = 9  # major compute capability
MOST_CHOSEN = 32  # tokens of a buffer that a GPU compares with a slot one by one


@dataclass(frozen=True)
class StageDecision:
    """The decision of layers that use their caches alike.

    condition: slots of the condition, the first ones.
    main: slots of image tokens outside of the buffer.
    period: slots of the buffer, the last ones.
    positions: more than any token has, those awaited in the buffer included.
    kept: tokens that stay after `group_stage`, or after every stage if heads are not grouped.
    group_stage: the stage after which heads are grouped; None: they are not.
    queries_per_head: query heads that share a head of keys and values (G). They decide as one.
    attention: implementation of the kernels.
    """

    rule: Rule
    condition: int
    main: int
    period: int
    positions: int
    kept: int
    group_stage: int | None
    attention: str | None
    queries_per_head: int = 1
    needs = property(attrgetter("rule.needs"))

    @property
    def buffer(self) -> int:
        """The first slot of the buffer."""
        return self.condition + self.main

    def coming(self, stage) -> Int[Array, " P"]:
        """Positions of the tokens of a stage."""
        return self.condition + stage * self.period + jnp.arange(self.period, dtype=jnp.int32)

    def at_once(self, cache: LayerCache) -> int:
        """The number of layers that `decide` may be called for together: as many as `TOGETHER`
        allows; one where policies look at keys, which are large."""
        if self.needs.keys:
            return 1
        size = cache.position.size * cache.position.dtype.itemsize
        most = TOGETHER.get(target.platform(), 0)
        if target.platform() == "gpu" and target.major() >= HOPPER:
            most = TOGETHER_SINCE_HOPPER
            if slot_moves.has_kernel(self.attention):
                most *= 2  # nothing is copied
        return max(1, most // size)

    def decide(
        self,
        caches: Sequence[LayerCache],
        stage: Int[Array, ""],
        bias: Float[Array, " R"] | None,
        inputs: Array | None,
    ) -> tuple[LayerCache, ...]:
        """Caches of layers after the decision of image stage `stage`, counted from 0. For a policy,
        the rows of all these layers are rows like any others. inputs: what it knows beforehand
        about all stages that end with a decision (`Rule.inputs`); layers that have some decide one
        by one."""
        short = [c.position.astype(self._short(self.positions)) for c in caches]
        held = _made_once(_together(short))
        position = held.astype(jnp.int32)
        mass = _together([c.mass for c in caches])
        reach = _together([c.reach for c in caches])
        if self.group_stage is not None:
            # under the condition only a small array is made: pools stay where they are
            groups_now, before = stage == self.group_stage, reach
            reach = jax.lax.cond(groups_now, self._reaches, lambda *_: before, caches, held, bias)
            # XLA for GPUs cuts what it has just computed into layers by one kernel, but what a
            # branch returned by a kernel for each of them.
            reach = jnp.minimum(reach, EVERYTHING)
            parts = zip(caches, jnp.split(reach, len(caches)), strict=True)
            caches = tuple(replace(cache, reach=part) for cache, part in parts)
        looks = [self._look(c) for c in caches]
        looks = tuple(map(_together, zip(*looks, strict=True)))
        obs = self._observation(position, mass, reach, looks, stage)
        if inputs is not None:
            # a row for each stage that ends with a decision
            known = jax.lax.dynamic_index_in_dim(inputs, stage, keepdims=False)
            obs = replace(obs, inputs=known)
        keep = obs.live & self.rule.select(obs)  # never an empty slot
        return self._store(caches, position, mass, keep, stage)

    def _reaches(self, caches: Sequence[LayerCache], position, bias) -> Int[Array, "LR N"]:
        """Each head's reach, measured by the newest query's attention."""
        position = position.astype(jnp.int32)
        mass, of_group = _together([self._newest_mass(cache, bias) for cache in caches]), None
        if self.queries_per_head > 1:
            mass, of_group = mass.mean(2), mass
        live, heads = position >= 0, position.shape[:2]
        number = jnp.arange(heads[1], dtype=jnp.int32)
        obs = Observation(
            scale=jnp.int32(self.group_stage),
            live=live,
            position=jnp.where(live, position, 0),
            capacity=jnp.full(heads, self.kept, jnp.int32),
            regions=jnp.broadcast_to(number, heads),
            newest_mass=mass,
            group_mass=of_group,
            implementation=self.attention,
            by_position=True,
        )
        local = self.rule.regroup(obs) > 0
        return jnp.where(local, jnp.int32(self.rule.local_window), EVERYTHING)

    def _newest_mass(self, cache: LayerCache, bias) -> Float[Array, "R N *G C"]:
        """Attention weights of the newest query; with groups, of each query head of a group."""
        # The newest query sees everything that is held, also in heads that were local. Sums start
        # at 0, so they are this query's weights.
        sums = jnp.zeros(cache.pool.shape[:3], jnp.float32)

        def weights(q: Float[Array, "R N H"]) -> Float[Array, "R N C"]:
            query, slots = Query(q, first_bias=bias), replace(cache, mass=sums, reach=None)
            _, mass = token_attention.attend(query, slots, implementation=self.attention)
            return mass  # pyright: ignore[reportReturnType]

        newest = cache.queries[:, :, -1]
        if self.queries_per_head == 1:
            return weights(newest)
        # Sums would mix the query heads of a group: one of each attends at a time, once per image.
        in_groups = newest.reshape(len(newest), -1, self.queries_per_head, newest.shape[-1])
        return jnp.moveaxis(jax.lax.map(weights, jnp.moveaxis(in_groups, 2, 0)), 0, 2)

    def _look(self, cache: LayerCache) -> tuple[Array | None, ...]:
        """`window_logits`, `window_scores` and `keys` of a layer's image slots, as in
        `Observation`."""
        needs, window_logits, window_scores, keys = self.needs, None, None, None
        scores = partial(
            token_attention.scores, slots=cache, first=self.condition, implementation=self.attention
        )
        if needs.window_logits and cache.scores is not None:
            window_logits = cache.scores[:, :, self.condition :]
        elif needs.window_logits:
            # the mean of scores is the score of the mean query: one product in place of W
            mean = cache.query_sum / needs.window
            window_logits = scores(mean[:, :, None])[:, :, 0]
        if needs.window_scores:
            window_scores = cache.by_head(scores(cache.queries), jnp.max)
        if needs.keys:
            keys = cache.pool[:, :, self.condition :, : cache.pool.shape[-1] // 2]
            if cache.scale is not None:
                keys = keys * cache.scale[..., self.condition :][:, 0, :, :, None]
        return window_logits, window_scores, keys

    def _observation(self, position, mass, reach, looks, stage) -> Observation:
        """The policy's view: image slots only, because the condition always stays."""
        needs = self.needs
        position = position[:, :, self.condition :] - self.condition
        live, heads = position >= 0, position.shape[:2]
        total, scale = needs.total_mass, needs.scale_mass and not needs.total_mass
        if mass is not None:
            # A mean over the query heads of a group, and over the queries that count; `total_mass`
            # is a sum over queries.
            queries = needs.window if needs.window_mass else self.period
            queries = self.queries_per_head * (1 if total else queries)
            mass = jnp.where(live, mass[:, :, self.condition :] / queries, 0)
        window_logits, window_scores, keys = looks
        if window_logits is not None:
            window_logits = jnp.where(live, window_logits, -jnp.inf)
        if window_scores is not None:
            window_scores = jnp.where(live[:, :, None], window_scores, -jnp.inf)
        # the first of the window's tokens, counted from the first image token
        newest = (stage + 1) * self.period - needs.window
        capacity, groups = self.kept, self.group_stage is not None
        if groups:
            # until heads are grouped nothing is known of them, and all room is used
            capacity = jnp.where(stage < self.group_stage, self.main, self.kept)
        number = jnp.arange(heads[1], dtype=jnp.int32)
        return Observation(
            scale=stage,
            live=live,
            position=jnp.where(live, position, 0),
            capacity=jnp.full(heads, capacity, jnp.int32),
            regions=jnp.broadcast_to(number, heads),
            own=jnp.arange(live.shape[-1]) >= self.main,
            window=live & (position >= newest) if needs.window else None,
            window_mass=None if total or scale else mass,
            scale_mass=mass if scale else None,
            total_mass=mass if total else None,
            window_logits=window_logits,
            window_scores=window_scores,
            local=reach < EVERYTHING if groups else None,
            keys=keys,
            implementation=self.attention,
            by_position=True,
        )

    def _store(self, caches, position, mass, keep, stage) -> tuple[LayerCache, ...]:
        """Caches in which kept tokens of the buffer lie in the slots that others have left: the
        first token that comes takes the first free slot, and so on."""
        keep = _made_once(keep)
        stays, comes = keep[..., : self.main], keep[..., self.main :]
        free, count = ~stays, self._short(self.buffer + self.period)
        turn, number = (jnp.cumsum(a, axis=-1, dtype=count) - count(1) for a in (free, comes))
        # a table may keep nothing, and then has no slots outside of the buffer
        most = turn[..., -1:] if self.main else -1
        # slots outside of the buffer that get a new token, and tokens of the buffer that find one
        filled, fits = free & (turn <= number[..., -1:]), comes & (number <= most)
        # A token goes to the slot whose turn is its number. Both are negative for slots that are
        # not free and tokens that do not come, and differ, so that these never meet.
        turn, number = jnp.where(free, turn, count(-1)), jnp.where(comes, number, count(-2))
        turn, number = _made_once(turn), _made_once(number)

        def goes() -> Bool[Array, "LR N P B"]:
            """Mask of the token of the buffer that each slot receives."""
            return turn[..., None, :] == number[..., None]

        def moved(values, nothing, buffer):
            """Small numbers per slot after the moves: chosen, not scattered. nothing: what slots
            hold that are left empty. buffer: what the buffer holds afterwards."""
            image = values[:, :, self.condition :]
            last = image[..., self.main :]
            if target.platform() != "gpu" or self.period > MOST_CHOSEN:
                # at most one token goes to a slot, so the sum is its number
                found = jnp.where(goes(), last[..., None], 0).sum(-2)
            else:  # XLA for GPUs makes and cuts this by one kernel, but a sum by one for each layer
                found = jnp.zeros((), last.dtype)
                for token in range(self.period):
                    here = turn == number[..., token, None]
                    found = jnp.where(here, last[..., token, None], found)
            left = jnp.where(filled, found, nothing)
            stay = jnp.where(stays, image[..., : self.main], left)
            buffer = jnp.broadcast_to(buffer, (*values.shape[:2], self.period))
            return jnp.concatenate([values[:, :, : self.condition], stay, buffer], axis=-1)

        place = jnp.arange(self.main, dtype=jnp.int32)
        slot = self.condition + (goes() * place).sum(-1, dtype=jnp.int32)
        # slots outside the array are skipped; numbers are unique there, too
        outside = self.buffer + self.period + jnp.arange(self.period, dtype=jnp.int32)
        # once, and not in every layer's move
        slot = jax.lax.optimization_barrier(jnp.where(fits, slot, outside))
        # the buffer awaits the tokens of the next stage, whose positions are known
        position = moved(position, -1, self.coming(stage + 1))
        if mass is not None and self.needs.total_mass:
            mass = moved(mass, 0.0, jnp.float32(0))
        elif mass is not None:
            mass = jnp.zeros_like(mass)  # the next stage has sums of its own
        caches = slot_moves.move_all(caches, slot, below=self.buffer, implementation=self.attention)
        masses = [None] * len(caches) if mass is None else jnp.split(mass, len(caches))
        layers = jnp.split(position, len(caches)), masses
        return tuple(
            replace(cache, position=position, mass=mass)
            for cache, position, mass in zip(caches, *layers, strict=True)
        )

    @staticmethod
    def _short(count: int):
        """The type of numbers below `count`, and of -1 and -2. On GPUs it is a short one, because a
        decision waits for memory there."""
        return jnp.int16 if target.platform() == "gpu" and count < 2**15 else jnp.int32


def _made_once(array: Array) -> Array:
    """An array that several operations read. XLA for GPUs would rather compute it again in each of
    them, from arrays that are larger."""
    once = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(array, cuda=once, default=lambda array: array)


def _together(arrays: Sequence[Array | None]) -> Array | None:
    """Rows of all layers, one layer after the other; None where layers have none."""
    if len(arrays) == 1 or arrays[0] is None:
        return arrays[0]
    return jnp.concatenate(arrays)
