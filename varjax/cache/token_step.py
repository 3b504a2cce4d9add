"""One layer's cache step in a model that draws token by token: attend for a token, and after a
stage decide what stays.

Two strategies behind one interface, chosen by `token_step`:

    RingStep    contents are known beforehand: a token goes straight to its slot
    StageStep   a token goes to the buffer; after P of them a policy decides

Both write first and attend then: a token sees itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import token_attention
from varjax.cache.stages import TokenPlan
from varjax.cache.token_decision import StageDecision
from varjax.cache.token_state import LayerCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """What a layer projects for one token of every row: finished queries (with the attention scale)
    and keys, and values. bias: float32, added to the score of the condition's first slot."""

    q: Float[Array, "R N H"]
    k: Float[Array, "R N H"]
    v: Float[Array, "R N H"]
    bias: Float[Array, " R"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Now:
    """An image token that goes through the layers: what all that use their caches alike share.

    slot: where it is stored. newest: its position, where others may lie in slots already.
    place: its number in a stage that ends with a decision; None in one that does not, where
      nothing has to be observed.
    position: int32 [R, 1, C] of all slots, of known contents. used: slots in use, the first ones.
    """

    slot: Int[Array, ""]
    newest: Int[Array, ""] | None = None
    place: Int[Array, ""] | None = None
    position: Int[Array, "R 1 C"] | None = None
    used: Int[Array, ""] | None = None


class TokenStep(Protocol):
    """What the engine asks of a strategy."""

    def now(self, cache: LayerCache, token: Int[Array, ""], place: Int[Array, ""] | None) -> Now:
        """Image token `token`, once for all layers of this strategy. cache: of any of them."""
        ...

    def attend(
        self, cache: LayerCache, heads: Heads, now: Now
    ) -> tuple[Float[Array, "R N H"], LayerCache]:
        """Store a token and attend for it."""
        ...

    def opened(self, cache: LayerCache) -> LayerCache:
        """The cache, which holds the condition, before the first stage."""
        ...

    def closed(self, cache: LayerCache, token: Int[Array, ""]) -> LayerCache:
        """The cache after the last token that is read, `token`."""
        ...

    def at_once(self, cache: LayerCache) -> int:
        """For how many layers `decide` is called."""
        ...

    def decide(
        self,
        caches: Sequence[LayerCache],
        stage: Int[Array, ""],
        bias: Float[Array, " R"] | None,
        inputs: Array | None,
    ) -> tuple[LayerCache, ...]:
        """Caches of layers after the decision of a stage; image stages are counted from 0. inputs:
        of a single layer, what the policy knows beforehand of all stages that end with one
        (`Rule.inputs`)."""
        ...


def token_step(plan: TokenPlan, layer: int, attention: str | None) -> TokenStep:
    """The strategy of a layer. attention: implementation of the kernel."""
    allocation, condition = plan.allocation, plan.sequence.condition
    slots = int(allocation.slots[layer])
    if plan.static_content:
        return RingStep(condition, slots, allocation.protected, attention)
    main = slots - allocation.period
    return StageStep(
        rule=plan.rule,
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

    def now(self, cache, token, place):
        ring = self.slots - self.protected
        around = self.protected + (token - self.protected) % ring
        slot = jnp.where(token < self.slots, token, around)
        own = jnp.broadcast_to(self.contents(token), (len(cache.pool), 1, self.slots))
        return Now(
            slot=self.condition + slot,
            position=jnp.concatenate([cache.position, own], axis=-1),
            used=self.condition + jnp.minimum(token + 1, self.slots),
        )

    def attend(self, cache, heads, now):
        out, _, pool, scale = token_attention.store_and_attend(
            *(heads.q, heads.k, heads.v, now.slot, cache.pool, now.position),
            used=now.used,
            first_bias=heads.bias,
            pool_scale=cache.scale,
            implementation=self.attention,
        )
        return out, replace(cache, pool=pool, scale=scale)

    def contents(self, token: Int[Array, ""]) -> Int[Array, " B"]:
        """Position in every image slot right after `token` was stored; -1: empty."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        newest = token - (token - slot) % (self.slots - self.protected)
        found = jnp.where(newest >= self.protected, newest, -1)
        first = jnp.where(slot <= token, slot, -1)
        found = jnp.where(slot < self.protected, first, found)
        return jnp.where(found >= 0, found + self.condition, -1)

    def opened(self, cache):
        return cache

    def closed(self, cache, token):
        return cache

    def at_once(self, cache):
        return 1

    def decide(self, caches, stage, bias, inputs):
        return tuple(caches)


@dataclass(frozen=True)
class StageStep(StageDecision):
    """Contents decided on the device, per row."""

    def now(self, cache, token, place):
        here = token % self.period if place is None else place
        return Now(self.buffer + here, (self.condition + token).astype(jnp.int32), place)

    def attend(self, cache, heads, now):
        place, q = now.place, _computed_once(heads.q)
        out, mass, pool, scale = token_attention.store_and_attend(
            *(q, heads.k, heads.v, now.slot, cache.pool, cache.position),
            newest=now.newest,
            reach=cache.reach,
            protected=self.condition,
            first_bias=heads.bias,
            pool_scale=cache.scale,
            mass=None if place is None else cache.mass,
            mass_weight=self._mass_weight(place),
            implementation=self.attention,
        )
        cache = replace(cache, pool=pool, scale=scale)
        if place is None:
            return out, cache
        return out, self._observe_query(replace(cache, mass=mass), q, place)

    def _mass_weight(self, place) -> Float[Array, ""] | float:
        """Votes are those of the window's queries only."""
        if place is None or not self.needs.window_mass:
            return 1.0
        return (place >= self.period - self.needs.window).astype(jnp.float32)

    def _observe_query(self, cache: LayerCache, q: Float[Array, "R N H"], place) -> LayerCache:
        if cache.query_sum is not None:
            weight = (place >= self.period - self.needs.window).astype(jnp.float32)
            before = jnp.where(place == 0, 0.0, cache.query_sum)  # of this stage
            cache = replace(cache, query_sum=before + weight * q.astype(jnp.float32))
        if cache.queries is not None:  # a ring: in no order, but a ring of one holds the newest
            start = (0, 0, place % cache.queries.shape[2], 0)
            new = q[:, :, None].astype(cache.queries.dtype)
            queries = jax.lax.dynamic_update_slice(cache.queries, new, start)
            cache = replace(cache, queries=queries)
        return cache

    def opened(self, cache):
        first = (0, 0, self.buffer)
        coming = jnp.broadcast_to(self.coming(0), (*cache.position.shape[:2], self.period))
        position = jax.lax.dynamic_update_slice(cache.position, coming, first)
        return replace(cache, position=position)

    def closed(self, cache, token):
        drawn = cache.position <= self.condition + token
        return replace(cache, position=jnp.where(drawn, cache.position, -1))


def _computed_once(q: Float[Array, "R N H"]) -> Float[Array, "R N H"]:
    """Queries that a policy observes, too. XLA's TPU compiler would compute them again for it, for
    all layers at the end of the token, and keep their projections until then (4 MiB per layer of
    LlamaGen-XL at batch 128)."""
    return jax.lax.platform_dependent(q, tpu=jax.lax.optimization_barrier, default=lambda q: q)
