"""One layer's cache step where contents are known and what queries read is not: a ring of the
newest tokens, of which every head skips some offsets.

An offset is the distance from a query back to a key, 0 for the query's own token. A head that skips
an offset skips another token at every step, so all of them have to be stored:

    slot of the ring     0  1  2  3  4  5  6  7
    read by token 7      x  x  .  x  x  x  .  x      skipped: offsets 5 and 1
    read by token 8      x  x  x  .  x  x  x  .      token 8 replaces token 0, in slot 0

So the set, written as slots, moves on by one slot per token, and around with the ring. Offsets are
chosen before the ring is full for the first time, one at most after a token; afterwards nothing is
scored any more.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import target, token_attention
from pallas_kernels.token_attention import NewToken, Query
from varjax.cache import token_decision
from varjax.cache.observation import Observation, Rule
from varjax.cache.token_step import RingStep


@dataclass(frozen=True)
class OffsetStep(RingStep):
    """The step of a ring of which offsets are skipped; fields as in `RingStep`.

    rule: its `select` is shown the tokens of the ring that a query has just read. What it drops is
      skipped from then on: not the token, but its distance to the query.
    reads: tokens of the ring that a query reads, fewer than the ring holds.
    """

    rule: Rule
    reads: int

    @property
    def first(self) -> int:
        """The first slot of the ring."""
        return self.condition + self.protected

    def current(self, cache, token, place):
        return replace(super().current(cache, token, place), place=place)

    def attend(self, cache, heads, current):
        # a stage is one token here: after the last decision there is no place in a stage
        choosing, first = current.place is not None, self.first
        skipped = jnp.roll(cache.skipped, 1, axis=-1)  # every offset is one slot further on
        # Skipped slots have no position: kernels then leave them out, whatever they know of
        # offsets. Positions are the same in all heads until that makes them differ.
        fixed, ring = current.position[..., :first], current.position[..., first:]
        fixed = jnp.broadcast_to(fixed, (*skipped.shape[:2], first))
        position = jnp.concatenate([fixed, jnp.where(skipped, -1, ring)], axis=-1)
        # the sums that this query's weights are added to: those of the offsets so far, or zeros
        mass = None
        if choosing and self.rule.needs.total_mass:
            # what comes around is 0: the last slot is empty as long as offsets are chosen
            ring = jnp.roll(cache.mass[..., first:], 1, axis=-1)
            mass = jnp.concatenate([cache.mass[..., :first], ring], axis=-1)
        elif choosing:
            mass = jnp.zeros_like(cache.mass)
        slots = replace(cache, position=position, used=current.used, mass=mass)
        out, found = token_attention.store_and_attend(
            # sums of a group of queries become their mean
            Query(heads.q, first_bias=heads.bias, mass_weight=1.0 / cache.group_size(heads.q)),
            slots,
            NewToken(heads.k, heads.v, current.slot),
            implementation=self.attention,
        )
        mass = found.mass if choosing else cache.mass
        own = dict(position=cache.position, used=None, mass=mass, skipped=skipped)
        return out, replace(found, **own)

    def at_once(self, cache):
        """As many layers as `TOGETHER` allows."""
        # sums are what exists several times meanwhile: nothing is moved here, unlike in a stage
        size = cache.mass.size * cache.mass.dtype.itemsize
        return max(1, token_decision.TOGETHER.get(target.platform(), 0) // size)

    def decide(self, caches, stage, bias, inputs):
        """stage: the number of the newest token, because a stage is one token."""
        skipped = jnp.concatenate([cache.skipped for cache in caches])
        mass = jnp.concatenate([cache.mass for cache in caches])
        obs = self._observation(skipped, mass[..., self.first :], stage)
        # The set only grows: sums know nothing of the queries that a skipped offset has missed.
        skipped |= obs.live & ~self.rule.select(obs)
        parts = zip(caches, jnp.split(skipped, len(caches)), strict=True)
        return tuple(replace(cache, skipped=part) for cache, part in parts)

    def _observation(
        self, skipped: Bool[Array, "LR N K"], mass: Float[Array, "LR N K"], token: Int[Array, ""]
    ) -> Observation:
        """The policy's view: the ring only, because all others are read whatever it says."""
        position = self.contents(token)[self.protected :] - self.condition
        live, heads = (position >= 0) & ~skipped, skipped.shape[:2]
        mass = jnp.where(live, mass, 0)
        total = self.rule.needs.total_mass
        return Observation(
            scale=token,
            live=live,
            position=jnp.where(live, position, 0),
            # the next token takes the last place of those that it reads
            capacity=jnp.full(heads, self.reads - 1, jnp.int32),
            regions=jnp.broadcast_to(jnp.arange(heads[1], dtype=jnp.int32), heads),
            own=position == token,
            scale_mass=None if total else mass,
            total_mass=mass if total else None,
            implementation=self.attention,
        )
