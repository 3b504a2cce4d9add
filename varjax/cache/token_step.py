"""One layer's cache step in a model that draws token by token: attend for a token, and after a
stage decide what stays.

Two strategies behind one interface, chosen by `token_step`:

    RingStep    contents are known beforehand: a token goes straight to its slot
    StageStep   a token goes to the buffer; after P of them a policy decides

Both write first and attend then: a token sees itself.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import token_attention
from varjax.cache.stages import TokenPlan
from varjax.cache.token_state import LayerCache
from varjax.policies.base import Needs, Observation
from varjax.policies.staged import TokenPolicy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """What a layer projects for one token of every row: finished queries (with the attention scale)
    and keys, and values. bias: float32, added to the score of the condition's first slot."""

    q: Float[Array, "R N H"]
    k: Float[Array, "R N H"]
    v: Float[Array, "R N H"]
    bias: Float[Array, " R"] | None = None


class TokenStep(Protocol):
    """What the engine asks of a strategy."""

    def attend(
        self, cache: LayerCache, heads: Heads, token: Int[Array, ""], place: Int[Array, ""] | None
    ) -> tuple[Float[Array, "R N H"], LayerCache]:
        """Store image token `token` and attend for it. place: its number in a stage that ends with
        a decision; None in one that does not, where nothing has to be observed."""
        ...

    def decide(
        self,
        cache: LayerCache,
        stage: Int[Array, ""],
        bias: Float[Array, " R"] | None,
        inputs: Array | None,
    ) -> LayerCache:
        """The cache after the decision of a stage; image stages are counted from 0. inputs: what
        the policy knows beforehand of all stages that end with one (`TokenPolicy.stage_inputs`)."""
        ...


def token_step(plan: TokenPlan, layer: int, attention: str | None) -> TokenStep:
    """The strategy of a layer. attention: implementation of the kernel."""
    allocation, condition = plan.allocation, plan.sequence.condition
    slots = int(allocation.slots[layer])
    if plan.static_content:
        return RingStep(condition, slots, allocation.protected, attention)
    main = slots - allocation.period
    return StageStep(
        policy=plan.policy,
        condition=condition,
        main=main,
        period=allocation.period,
        kept=main if allocation.kept is None else int(allocation.kept[layer]),
        group_stage=allocation.group_stage,
        attention=attention,
    )


@dataclass(frozen=True)
class RingStep:
    """Contents known beforehand: M slots of the condition, `protected` tokens that stay, and a
    ring."""

    condition: int
    slots: int
    protected: int
    attention: str | None

    def attend(self, cache, heads, token, place):
        ring = self.slots - self.protected
        around = self.protected + (token - self.protected) % ring
        slot = jnp.where(token < self.slots, token, around)
        cache = cache.write(heads.k[:, :, None], heads.v[:, :, None], self.condition + slot)
        own = jnp.broadcast_to(self.contents(token), (len(cache.pool), 1, self.slots))
        position = jnp.concatenate([cache.position, own], axis=-1)
        out, _ = token_attention.attend(
            *(heads.q, cache.pool, position),
            first_bias=heads.bias,
            pool_scale=cache.scale,
            implementation=self.attention,
        )
        return out, cache

    def contents(self, token: Int[Array, ""]) -> Int[Array, " B"]:
        """Position in every image slot right after `token` was stored; -1: empty."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        newest = token - (token - slot) % (self.slots - self.protected)
        found = jnp.where(newest >= self.protected, newest, -1)
        first = jnp.where(slot <= token, slot, -1)
        found = jnp.where(slot < self.protected, first, found)
        return jnp.where(found >= 0, found + self.condition, -1)

    def decide(self, cache, stage, bias, inputs):
        return cache


@dataclass(frozen=True)
class StageStep:
    """Contents decided on the device, per row. main: image slots outside the buffer. kept: tokens
    that stay after `group_stage`, if there is one, else after every stage."""

    policy: TokenPolicy
    condition: int
    main: int
    period: int
    kept: int
    group_stage: int | None
    attention: str | None

    @property
    def needs(self) -> Needs:
        return self.policy.stage_needs

    @property
    def _buffer(self) -> int:
        """The first slot of the buffer."""
        return self.condition + self.main

    # --- a token ----------------------------------------------------------------------------------

    def attend(self, cache, heads, token, place):
        here = token % self.period if place is None else place
        slot = self._buffer + here
        cache = cache.write(heads.k[:, :, None], heads.v[:, :, None], slot)
        now = (self.condition + token).astype(jnp.int32)
        new = jnp.broadcast_to(now, (*heads.q.shape[:2], 1))
        position = jax.lax.dynamic_update_slice(cache.position, new, (0, 0, slot))
        mass = None if place is None else cache.mass
        out, mass = token_attention.attend(
            *(heads.q, cache.pool, position),
            oldest=self._oldest(cache, now),
            protected=self.condition,
            first_bias=heads.bias,
            pool_scale=cache.scale,
            mass=mass,
            mass_weight=self._mass_weight(place),
            implementation=self.attention,
        )
        cache = replace(cache, position=position)
        if place is None:
            return out, cache
        return out, self._observe_query(replace(cache, mass=mass), heads.q, place)

    def _oldest(self, cache: LayerCache, now) -> Int[Array, "R N"] | None:
        if cache.local is None:
            return None
        return jnp.where(cache.local, now - self.policy.local_window + 1, 0)

    def _mass_weight(self, place) -> Float[Array, ""] | float:
        """Votes are those of the window's queries only."""
        if place is None or not self.needs.window_mass:
            return 1.0
        return (place >= self.period - self.needs.window).astype(jnp.float32)

    def _observe_query(self, cache: LayerCache, q: Float[Array, "R N H"], place) -> LayerCache:
        if cache.query_sum is not None:
            weight = (place >= self.period - self.needs.window).astype(jnp.float32)
            cache = replace(cache, query_sum=cache.query_sum + weight * q.astype(jnp.float32))
        if cache.queries is not None:  # a ring: in no order, but a ring of one holds the newest
            start = (0, 0, place % cache.queries.shape[2], 0)
            new = q[:, :, None].astype(cache.queries.dtype)
            queries = jax.lax.dynamic_update_slice(cache.queries, new, start)
            cache = replace(cache, queries=queries)
        return cache

    # --- a decision -------------------------------------------------------------------------------

    def decide(self, cache, stage, bias, inputs):
        if self.group_stage is not None:
            # under the condition only a small mask is made: the pool stays where it is
            local = jax.lax.cond(
                stage == self.group_stage, self._local_heads, lambda c, _: c.local, cache, bias
            )
            cache = replace(cache, local=local)
        obs = self._observation(cache, stage)
        if inputs is not None:
            known = jax.lax.dynamic_index_in_dim(inputs, stage, keepdims=False)
            obs = replace(obs, inputs=known)
        keep = obs.live & self.policy.select_stage(obs)
        return self._store(cache, keep)

    def _local_heads(self, cache: LayerCache, bias) -> Bool[Array, "R N"]:
        zero = jnp.zeros(cache.pool.shape[:3], jnp.float32)
        _, mass = token_attention.attend(
            *(cache.queries[:, :, -1], cache.pool, cache.position),
            first_bias=bias,
            pool_scale=cache.scale,
            mass=zero,
            implementation=self.attention,
        )
        return self.policy.local_heads(mass, cache.position)

    def _observation(self, cache: LayerCache, stage: Int[Array, ""]) -> Observation:
        """What the policy sees: image slots only, the condition always stays."""
        rows, heads, _, width = cache.pool.shape
        needs, first = self.needs, self.condition
        position = cache.position[:, :, first:] - first
        live = position >= 0
        pool = cache.pool[:, :, first:]
        scale = None if cache.scale is None else cache.scale[..., first:]
        seen = {}
        if cache.mass is not None:
            queries = needs.window if needs.window_mass else self.period
            mass = cache.mass[:, :, first:] / (1 if needs.total_mass else queries)
            name = next(n for n in ("total_mass", "scale_mass", "window_mass") if getattr(needs, n))
            seen[name] = jnp.where(live, mass, 0)
        if needs.window_logits:
            mean = cache.query_sum / needs.window
            found = token_attention.scores(mean[:, :, None], pool, pool_scale=scale)[:, :, 0]
            seen["window_logits"] = jnp.where(live, found, -jnp.inf)
        if needs.window_scores:
            found = token_attention.scores(cache.queries, pool, pool_scale=scale)
            seen["window_scores"] = jnp.where(live[:, :, None], found, -jnp.inf)
        if needs.keys:
            keys = pool[..., : width // 2]
            seen["keys"] = keys if scale is None else keys * scale[:, 0, :, :, None]
        if needs.window:
            newest = (stage + 1) * self.period - needs.window
            seen["window"] = live & (position >= newest)
        capacity = self.kept
        if self.group_stage is not None:
            capacity = jnp.where(stage < self.group_stage, self.main, self.kept)
            seen["local"] = cache.local
        number = jnp.arange(heads, dtype=jnp.int32)
        return Observation(
            scale=stage,
            live=live,
            position=jnp.where(live, position, 0),
            capacity=jnp.full((rows, heads), capacity, jnp.int32),
            regions=jnp.broadcast_to(number, (rows, heads)),
            own=jnp.arange(live.shape[-1]) >= self.main,
            **seen,
        )

    def _store(self, cache: LayerCache, keep: Bool[Array, "R N K"]) -> LayerCache:
        """Kept tokens of the buffer move into the first slots that others have left."""
        first, main = self.condition, self.main
        stays, comes = keep[..., :main], keep[..., main:]
        free = ~stays
        turn = jnp.where(free, jnp.cumsum(free, axis=-1, dtype=jnp.int32) - 1, -1)
        number = jnp.where(comes, jnp.cumsum(comes, axis=-1, dtype=jnp.int32) - 1, -2)
        goes = turn[..., None, :] == number[..., None]  # [R, N, P, main]
        place = jnp.arange(main, dtype=jnp.int32)
        # slots outside the array are skipped; numbers are unique there, too
        outside = self._buffer + self.period + jnp.arange(self.period, dtype=jnp.int32)
        slot = jnp.where(goes.any(-1), first + (goes * place).sum(-1, dtype=jnp.int32), outside)

        def moved(values, kept, nothing):
            """Small numbers per slot: chosen, not scattered."""
            new = jnp.where(goes, values[..., main:, None], 0).sum(-2)
            stay = jnp.where(kept, values[..., :main], jnp.where(goes.any(-2), new, nothing))
            return jnp.pad(stay, ((0, 0), (0, 0), (0, self.period)), constant_values=nothing)

        def update(array, image):
            return jax.lax.dynamic_update_slice(array, image, (0, 0, first))

        position = update(cache.position, moved(cache.position[:, :, first:], stays, -1))
        cache = replace(self._scattered(cache, slot), position=position)
        if cache.mass is not None and self.needs.total_mass:
            mass = moved(cache.mass[:, :, first:], stays, 0.0)
            cache = replace(cache, mass=update(cache.mass, mass))
        elif cache.mass is not None:
            cache = replace(cache, mass=jnp.zeros_like(cache.mass))
        if cache.query_sum is not None:
            cache = replace(cache, query_sum=jnp.zeros_like(cache.query_sum))
        return cache

    def _scattered(self, cache: LayerCache, slot: Int[Array, "R N P"]) -> LayerCache:
        """The buffer's keys and values in their new slots."""
        rows, heads, _ = slot.shape
        row, head = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None]

        def scatter(array, new, *places):
            # The barrier keeps XLA from fusing the read into the write: a scatter that reads its
            # own operand is done on a copy of the whole pool.
            new = jax.lax.optimization_barrier(new)
            return array.at[places].set(new, mode="drop", unique_indices=True)

        scale = cache.scale
        if scale is not None:
            places = row[..., None], jnp.arange(2)[:, None, None], head, slot[:, None]
            scale = scatter(scale, scale[..., self._buffer :], *places)
        pool = scatter(cache.pool, cache.pool[:, :, self._buffer :], row, head, slot)
        return replace(cache, pool=pool, scale=scale)
