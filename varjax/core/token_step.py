"""One layer's cache step in a model that draws token by token: attend for a token, and after a
stage decide what stays.

There are three strategies (`TokenStep`), chosen by `core.tokens.token_step`:

    RingStep    contents are known beforehand: a token goes straight to its slot
    OffsetStep  the same, but queries read a part of it
    StageStep   a token goes to the buffer; after P of them a policy decides

All store a token before they attend for it: a token sees itself.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import target, token_attention
from pallas_kernels.token_attention import NewToken, Probe, Query, QuerySum
from varjax.core import token_decision
from varjax.core.observation import Observation
from varjax.core.policy import Rule
from varjax.core.token_decision import StageDecision
from varjax.core.token_state import LayerCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """A layer's projections of one token of every row: finished queries (with the attention scale)
    and keys, and values. Query head i reads the keys and values of head i // G. bias: float32,
    added to the score of the condition's first slot. query_sum: the sum that `TokenStep.summed`
    asks for, where the product has made it."""

    q: Float[Array, "R GN H"]
    k: Float[Array, "R N H"]
    v: Float[Array, "R N H"]
    bias: Float[Array, " R"] | None = None
    query_sum: Float[Array, "R N H"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CurrentToken:
    """The image token that goes through the layers: what all layers that use their caches alike
    share.

    slot: where it is stored.
    newest: its position, where slots may hold positions of tokens to come; else None.
    place: its number in a stage that ends with a decision; None in a stage that does not, where
      nothing has to be observed.
    position: int32, of all slots, where contents are known; else None.
    used: slots in use, the first ones, where contents are known; else None.
    """

    slot: Int[Array, ""]
    newest: Int[Array, ""] | None = None
    place: Int[Array, ""] | None = None
    position: Int[Array, "R 1 C"] | None = None
    used: Int[Array, ""] | None = None


class TokenStep:
    """A strategy, as the engine calls it. All have

        current(cache, token, place) -> CurrentToken    image token number `token`, once for all
            layers of this strategy; cache: of any of them
        attend(cache, heads, current) -> (out [R, GN, H], cache)    stores a token and attends for
            it

    and those that decide `at_once` and `decide`, too (`StageDecision`)."""

    def summed(self, cache: LayerCache, current: CurrentToken) -> QuerySum | None:
        """The running sum that this token's queries are added to, if there is one and every head
        has one query. Where the product adds it up, `Heads.query_sum` is the result."""

    def opened(self, cache: LayerCache) -> LayerCache:
        """The cache, which holds the condition, before the first stage."""
        return cache

    def closed(self, cache: LayerCache, token: Int[Array, ""]) -> LayerCache:
        """The cache after the last token that is read, `token`."""
        return cache


@dataclass(frozen=True)
class RingStep(TokenStep):
    """The step of known contents.

    condition: slots of the condition, the first ones. slots: those of image tokens. Of them the
    first `protected` keep their tokens, the others are a ring: a new token replaces the oldest.
    attention: implementation of the kernels.
    """

    condition: int
    slots: int
    protected: int
    attention: str | None

    def current(self, cache, token, place):
        # tokens fill the slots one after the other, then go around behind the protected ones
        ring = self.slots - self.protected
        around = self.protected + (token - self.protected) % ring
        slot = jnp.where(token < self.slots, token, around)
        # rows have conditions of different length, but the same image slots
        own = jnp.broadcast_to(self.contents(token), (len(cache.pool), 1, self.slots))
        return CurrentToken(
            slot=self.condition + slot,
            place=place,
            position=jnp.concatenate([cache.position, own], axis=-1),
            # slots behind these are empty, and kernels leave them unread
            used=self.condition + jnp.minimum(token + 1, self.slots),
        )

    def attend(self, cache, heads, current):
        out, found = token_attention.store_and_attend(
            Query(heads.q, first_bias=heads.bias),
            replace(cache, position=current.position, used=current.used),
            NewToken(heads.k, heads.v, current.slot),
            implementation=self.attention,
        )
        # the cache keeps what cannot be computed from the number of tokens drawn
        return out, replace(found, position=cache.position, used=None)

    def contents(self, token: Int[Array, ""]) -> Int[Array, " B"]:
        """Position in every image slot right after `token` was stored; -1: empty."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        # the newest token up to `token` whose place in the ring is this slot
        newest = token - (token - slot) % (self.slots - self.protected)
        found = jnp.where(newest >= self.protected, newest, -1)
        first = jnp.where(slot <= token, slot, -1)  # protected slots hold their own number
        found = jnp.where(slot < self.protected, first, found)
        return jnp.where(found >= 0, found + self.condition, -1)


@dataclass(frozen=True)
class OffsetStep(RingStep):
    """The step of a ring of the newest tokens, of which every head skips some offsets; fields as in
    `RingStep`.

    An offset is the distance from a query back to a key, 0 for the query's own token. A head that
    skips an offset skips another token at every step, so all of them have to be stored:

        slot of the ring     0  1  2  3  4  5  6  7
        read by token 7      x  x  .  x  x  x  .  x      skipped: offsets 5 and 1
        read by token 8      x  x  x  .  x  x  x  .      token 8 replaces token 0, in slot 0

    So the set, written as slots, moves on by one slot per token, and around with the ring. Offsets
    are chosen before the ring is full for the first time, one at most after a token; afterwards
    nothing is scored any more.

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
            by_position=True,
        )


@dataclass(frozen=True)
class StageStep(StageDecision, TokenStep):
    """Contents decided on the device, per row."""

    def current(self, cache, token, place):
        # after the last decision no more than P tokens are drawn: they fit into the buffer
        here = token % self.period if place is None else place
        newest = (self.condition + token).astype(jnp.int32)
        return CurrentToken(self.buffer + here, newest, place)

    def attend(self, cache, heads, current):
        # XLA's TPU compiler would compute queries again for the policy, for all layers at the end
        # of the token, and keep their projections until then (4 MiB per layer of LlamaGen-XL at
        # batch 128).
        once = jax.lax.optimization_barrier
        q = jax.lax.platform_dependent(heads.q, tpu=once, default=lambda q: q)
        place = current.place
        if place is not None:
            cache = self._observe_query(cache, replace(heads, q=q), place)
        # A weight of 0 in place of a branch where only a window's queries count: every token runs
        # the same program.
        counts = place is None or not self.needs.window_mass
        weight, probe = 1.0 if counts else self._in_window(place), None
        if cache.scores is not None and place is not None:
            # The stage's last token asks for scores of the window's mean query, for the decision
            # that follows: by then all its candidates are stored.
            wanted = place == self.period - 1
            probe = Probe(cache.query_sum, wanted, count=self.needs.window, every=self.period)
        query = Query(
            q,
            newest=current.newest,
            first_bias=heads.bias,
            mass_weight=weight,
            protected=self.condition,  # local heads see the condition, too
            probe=probe,
        )
        # after the last decision nobody asks for sums any more
        slots = cache if place is not None else replace(cache, mass=None)
        token = NewToken(heads.k, heads.v, current.slot)
        out, found = token_attention.store_and_attend(
            query, slots, token, implementation=self.attention
        )
        return out, replace(found, mass=cache.mass) if place is None else found

    def summed(self, cache, current):
        place, kept = current.place, cache.query_sum
        if place is None or kept is None or self.queries_per_head > 1:
            return None
        # a stage begins at 0, with the first token of it
        keep = (place > 0).astype(jnp.float32)
        return QuerySum(kept.reshape(len(kept), -1), keep, self._in_window(place))

    def _in_window(self, place) -> Float[Array, ""]:
        return (place >= self.period - self.needs.window).astype(jnp.float32)

    def _observe_query(self, cache: LayerCache, heads: Heads, place) -> LayerCache:
        q = heads.q
        if heads.query_sum is not None:
            cache = replace(cache, query_sum=heads.query_sum)
        elif cache.query_sum is not None:
            weight = self._in_window(place)
            # a stage begins at 0, with the first token of it
            before = jnp.where(place == 0, 0.0, cache.query_sum)
            # scores are linear in the query: the mean query has the mean of the group's scores
            mean = cache.by_head(q.astype(jnp.float32), jnp.mean)
            cache = replace(cache, query_sum=before + weight * mean)
        if cache.queries is not None:  # a ring, in no order; a ring of one holds the newest query
            start = (0, 0, place % cache.queries.shape[2], 0)
            new = q[:, :, None].astype(cache.queries.dtype)
            queries = jax.lax.dynamic_update_slice(cache.queries, new, start)
            cache = replace(cache, queries=queries)
        return cache

    def opened(self, cache):
        # written once per stage and not per token: `newest` hides the tokens to come
        first = (0, 0, self.buffer)
        coming = jnp.broadcast_to(self.coming(0), (*cache.position.shape[:2], self.period))
        position = jax.lax.dynamic_update_slice(cache.position, coming, first)
        scores = None
        if self.needs.window_logits and token_attention.scores_on_the_way(cache, self.attention):
            scores = jnp.zeros(cache.pool.shape[:3], jnp.float32)
        return replace(cache, position=position, scores=scores)

    def closed(self, cache, token):
        # positions in the buffer that no token has come to
        drawn = cache.position <= self.condition + token
        position = jnp.where(drawn, cache.position, -1)
        return replace(cache, position=position, scores=None)
