"""What a layer that draws token by token keeps after a stage: the policy is shown what is held, its
choice is stored.

Layers whose caches are alike decide together, as many as `StageDecision.at_once` says: a decision
is many small operations, of which a GPU starts each as a kernel. Their pools stay apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import implementations, slot_moves, target, token_attention
from varjax.cache.observation import Needs, Observation, Rule
from varjax.cache.token_state import EVERYTHING, LayerCache

# Bytes of positions of the layers that decide together: a dozen arrays of this size exist
# meanwhile. A CPU starts no kernels, and keeps what it compares: one layer at a time.
TOGETHER = {"cpu": 0, "gpu": 16 * 2**20, "tpu": 16 * 2**20}


@dataclass(frozen=True)
class StageDecision:
    """Layers that use their caches alike, and decide together.

    condition, main: slots of the condition, and those of image tokens outside the buffer. period:
      of the buffer. kept: tokens that stay after `group_stage`, if there is one, else after every
      stage. attention: implementation of the kernels.
    """

    rule: Rule
    condition: int
    main: int
    period: int
    kept: int
    group_stage: int | None
    attention: str | None

    @property
    def needs(self) -> Needs:
        return self.rule.needs

    @property
    def buffer(self) -> int:
        """The first slot of the buffer."""
        return self.condition + self.main

    def coming(self, stage) -> Int[Array, " P"]:
        """Positions of a stage's tokens."""
        return self.condition + stage * self.period + jnp.arange(self.period, dtype=jnp.int32)

    def at_once(self, cache):
        """As many layers as small kernels take turns for; one where policies look at keys."""
        if self.needs.keys:
            return 1
        position = cache.position
        return max(
            1, TOGETHER.get(target.platform(), 0) // (position.size * position.dtype.itemsize)
        )

    def decide(self, caches, stage, bias, inputs):
        """Rows of all layers side by side are rows like any others for a policy."""
        position, mass, reach = (
            _together([getattr(c, name) for c in caches]) for name in ("position", "mass", "reach")
        )
        if self.group_stage is not None:
            # under the condition only a small array is made: pools stay where they are
            reach = jax.lax.cond(
                *(stage == self.group_stage, self._reaches, lambda *_: reach),
                *(caches, position, bias),
            )
            caches = _apart(caches, reach=reach)
        seen = [self._looks(c) for c in caches]
        looks = {name: _together([each[name] for each in seen]) for name in seen[0]}
        obs = self._observation(position, mass, reach, looks, stage)
        if inputs is not None:
            known = jax.lax.dynamic_index_in_dim(inputs, stage, keepdims=False)
            obs = replace(obs, inputs=known)
        with implementations.naming(self.attention):
            keep = obs.live & self.rule.select(obs)
        return self._store(caches, position, mass, keep, stage)

    def _reaches(self, caches: Sequence[LayerCache], position, bias) -> Int[Array, "LR N"]:
        """Of all heads of layers, from the attention of the newest query."""
        masses = []
        for cache in caches:
            _, mass = token_attention.attend(
                *(cache.queries[:, :, -1], cache.pool, cache.position),
                first_bias=bias,
                pool_scale=cache.scale,
                mass=jnp.zeros(cache.pool.shape[:3], jnp.float32),
                implementation=self.attention,
            )
            masses.append(mass)
        live, heads = position >= 0, position.shape[:2]
        number = jnp.arange(heads[1], dtype=jnp.int32)
        obs = Observation(
            scale=jnp.int32(self.group_stage),
            live=live,
            position=jnp.where(live, position, 0),
            capacity=jnp.full(heads, self.kept, jnp.int32),
            regions=jnp.broadcast_to(number, heads),
            newest_mass=_together(masses),
        )
        with implementations.naming(self.attention):
            local = self.rule.regroup(obs) > 0
        return jnp.where(local, jnp.int32(self.rule.local_window), EVERYTHING)

    def _looks(self, cache: LayerCache) -> dict[str, Array]:
        """What a policy sees of a layer's pool: of image slots only."""
        needs, found = self.needs, {}
        options = {"pool_scale": cache.scale, "first": self.condition}
        scores = partial(token_attention.scores, implementation=self.attention, **options)
        if needs.window_logits:
            mean = cache.query_sum / needs.window
            found["window_logits"] = scores(mean[:, :, None], cache.pool)[:, :, 0]
        if needs.window_scores:
            found["window_scores"] = scores(cache.queries, cache.pool)
        if needs.keys:
            keys = cache.pool[:, :, self.condition :, : cache.pool.shape[-1] // 2]
            scale = None if cache.scale is None else cache.scale[..., self.condition :]
            found["keys"] = keys if scale is None else keys * scale[:, 0, :, :, None]
        return found

    def _observation(self, position, mass, reach, looks, stage: Int[Array, ""]) -> Observation:
        """What the policy sees: image slots only, the condition always stays."""
        needs, first = self.needs, self.condition
        position = position[:, :, first:] - first
        live, heads = position >= 0, position.shape[:2]
        seen = dict(looks)
        if mass is not None:
            queries = needs.window if needs.window_mass else self.period
            mass = mass[:, :, first:] / (1 if needs.total_mass else queries)
            name = next(n for n in ("total_mass", "scale_mass", "window_mass") if getattr(needs, n))
            seen[name] = jnp.where(live, mass, 0)
        for name, where in (("window_logits", live), ("window_scores", live[:, :, None])):
            if name in seen:
                seen[name] = jnp.where(where, seen[name], -jnp.inf)
        if needs.window:
            newest = (stage + 1) * self.period - needs.window
            seen["window"] = live & (position >= newest)
        capacity = self.kept
        if self.group_stage is not None:
            capacity = jnp.where(stage < self.group_stage, self.main, self.kept)
            seen["local"] = reach < EVERYTHING
        number = jnp.arange(heads[1], dtype=jnp.int32)
        return Observation(
            scale=stage,
            live=live,
            position=jnp.where(live, position, 0),
            capacity=jnp.full(heads, capacity, jnp.int32),
            regions=jnp.broadcast_to(number, heads),
            own=jnp.arange(live.shape[-1]) >= self.main,
            **seen,
        )

    def _store(self, caches, position, mass, keep, stage) -> tuple[LayerCache, ...]:
        """Kept tokens of the buffer move into the first slots that others have left. position,
        mass, keep: of all these layers, [L R, N, ...]."""
        first, main = self.condition, self.main
        stays, comes = keep[..., :main], keep[..., main:]
        free = ~stays
        turn, number = (jnp.cumsum(a, axis=-1, dtype=jnp.int32) - 1 for a in (free, comes))
        most = turn[..., -1:] if main else -1  # a table may keep nothing, and has no such slots
        filled, moves = free & (turn <= number[..., -1:]), comes & (number <= most)
        turn, number = jnp.where(free, turn, -1), jnp.where(comes, number, -2)
        goes = turn[..., None, :] == number[..., None]  # [L R, N, P, main]
        place = jnp.arange(main, dtype=jnp.int32)
        # slots outside the array are skipped; numbers are unique there, too
        outside = self.buffer + self.period + jnp.arange(self.period, dtype=jnp.int32)
        slot = jnp.where(moves, first + (goes * place).sum(-1, dtype=jnp.int32), outside)
        slot = jax.lax.optimization_barrier(slot)  # once, and not in every layer's move

        def moved(values, nothing, buffer):
            """Small numbers per slot: chosen, not scattered. buffer: what it holds then."""
            image = values[:, :, first:]
            new = jnp.where(goes, image[..., main:, None], 0).sum(-2)
            stay = jnp.where(stays, image[..., :main], jnp.where(filled, new, nothing))
            buffer = jnp.broadcast_to(buffer, (*values.shape[:2], self.period))
            return jnp.concatenate([values[:, :, :first], stay, buffer], axis=-1)

        changed = {"position": moved(position, -1, self.coming(stage + 1))}
        if mass is not None:
            total = self.needs.total_mass
            changed["mass"] = moved(mass, 0.0, jnp.float32(0)) if total else jnp.zeros_like(mass)
        rows, stored = len(caches[0].pool), []
        for i, cache in enumerate(caches):
            pool, scale = slot_moves.move(
                *(cache.pool, slot[i * rows : (i + 1) * rows]),
                pool_scale=cache.scale,
                implementation=self.attention,
            )
            stored.append(replace(cache, pool=pool, scale=scale))
        return _apart(stored, **changed)


def _together(arrays: Sequence[Array | None]) -> Array | None:
    """Rows of all layers, one layer after the other; None where layers have none."""
    if len(arrays) == 1 or arrays[0] is None:
        return arrays[0]
    return jnp.concatenate(arrays)


def _apart(caches: Sequence[LayerCache], **arrays: Array) -> tuple[LayerCache, ...]:
    """The inverse: caches of layers with their rows of arrays."""
    parts = {name: jnp.split(array, len(caches)) for name, array in arrays.items()}
    return tuple(
        replace(cache, **{name: part[i] for name, part in parts.items()})
        for i, cache in enumerate(caches)
    )
