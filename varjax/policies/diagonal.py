"""Diagonal Attention: a ring of the newest tokens, of which every head leaves out the distances
that it attended to least."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from varjax.core.allocation import Geometry, StageAllocation
from varjax.core.arguments import within
from varjax.core.errors import choose
from varjax.core.observation import Needs, Observation
from varjax.policies.capacities import image_slots
from varjax.policies.registry import register
from varjax.policies.token_rule import StagedPolicy
from varjax.policies.windows import Ring

SCORES = ("mean", "query")
ALONE = "its tokens are stored by their number, and it chooses distances, not tokens"


class DiagonalRing(Ring):
    """The ring, and how much of it is read."""

    def check(self, geometry: Geometry) -> None:
        super().check(geometry)
        choose("score", self.policy.score, SCORES)

    def slots(self, geometry: Geometry, budget: float) -> int:
        policy = self.policy
        room = image_slots(geometry, budget, policy.accounting)
        if policy.accounting == "tokens":
            room = policy.sinks + math.ceil((room - policy.sinks) / policy.share - 1e-6)
        return min(room, geometry.schedule.steps)

    def allocate(self, geometry: Geometry, budget: float) -> StageAllocation:
        policy, slots = self.policy, self.slots(geometry, budget)
        if policy.accounting == "tokens":
            reads = image_slots(geometry, budget, policy.accounting) - policy.sinks
        elif slots == geometry.schedule.steps:
            return StageAllocation.known(geometry, slots)
        else:
            reads = max(1, math.floor((slots - policy.sinks) * policy.share + 1e-6))
        return StageAllocation.known(geometry, slots, policy.sinks, reads)


@register("diagonal")
@dataclass(frozen=True, kw_only=True)
class Diagonal(StagedPolicy):
    """Diagonal Attention (arXiv 2609.19702), for models that draw token by token.

    Idea: in raster order a head looks at fixed distances: the token before, the one above. In its
    matrix of attention these are diagonals. So a head can do without a distance for all queries,
    and which ones these are can be seen early.

    Every head of every layer stores the condition, the first `sinks` image tokens and a ring of the
    newest N_r, and reads the condition, the sinks and N_att of the ring. The offset of a key is its
    distance from the query, 0 to N_r - 1, 0 for the query's own token. Query t, counted from the
    first token behind the sinks, has weights w_t (softmax over all that it reads, the condition
    included). A_t(o) is the mean of w_o(o), ..., w_t(o): over all queries so far that had this
    offset, which is the head's diagonal. The head skips the offsets

      S_t+1 = S_t + argmin {A_t(o): o <= t, o not in S_t}    for N_att - 1 <= t <= N_r - 2
      S_t+1 = S_t                                            before and after, from S_0 = {} on

    Each of these steps brings one key and skips one, so that queries read N_att keys from t = N_att
    - 1 on. From t = N_r - 1 on nothing is scored any more.

    Args:
      budget: fraction of the full cache, for what is *stored*: condition, sinks and ring. With
        `accounting=tokens` it is the fraction of the image tokens that are *read* (sinks and
        N_att), and N_r follows: ceil(N_att / share), at most all.
      share: N_att / N_r (0.5); N_att is rounded down, and at least 1. With 1 nothing is skipped,
        and the policy is `streaming`.
      sinks: first image tokens that are stored and read from the start on, beside the ring; the
        paper's optional sinks are 4 (0). On our demo they are worth having.
      score: "mean", or "query": w_t, the weights of the newest query alone, in place of A_t.
      period: has no effect; see `help(varjax.policies.windows.Ring)`.

    What is read: a query's weights are zero on skipped keys and these are in no sum, but our
    kernels mask them, so that they fetch all N_r from memory. The bytes of the cache are those of
    N_r. A plan says both numbers.

    With room for all tokens (budget 1) the cache is the full one and nothing is skipped, as with
    every policy here.

    All of this is our reading of a description of the paper; text and code could not be had. It
    says: the text always stays; a window of the newest N_r image keys; a set of skipped offsets for
    each head, which moves with the query; once t reaches N_att - 1 every step adds the offset with
    the least attention, until N_r - N_att are skipped. It leaves open, and we take:
      - whose attention: after the softmax, in the mean along the diagonal. `score=query` is the
        other reading; on our demo it loses much more, as one query says little about an offset that
        no later query has then (docs/lab/demo_policies.md). Skipped keys have no attention.
      - which offsets may go: all, 0 included. Of equals the larger goes. Offset N_r - 1 never goes,
        since no query has it before the last one is chosen.
      - each row of each image has sets of its own, so conditional and unconditional rows differ.
      - query heads that share keys share a set, by the mean of their weights.
      - sinks are image tokens, beside the N_r and N_att; t counts from the first token behind them.
      - N_att / N_r, and which of the two a stated compression counts.
      - new lines that a model forces are image tokens like others, so offsets count them.
      - an int8 cache is scored as it is read.
    """

    budget: float = 0.25
    share: float = within(0.5, 0, 1, above=True)
    sinks: int = 0
    score: str = "mean"

    rules = (DiagonalRing,)
    summary = "newest tokens, of which each head reads the distances that it attends to"
    unsuited = "it skips distances between tokens that are drawn one by one"
    contents = "known beforehand; what is read, per image"
    unfit_roles = {"allocate": ALONE, "select": ALONE}

    @property
    def needs(self) -> Needs:
        return Needs(total_mass=True) if self.score == "mean" else Needs(scale_mass=True)

    def select(self, obs: Observation):
        score = obs.scale_mass
        if self.score == "mean":
            # the queries that had the offset of token i so far: as many as there are tokens up to i
            score = obs.total_mass / (obs.position - self.sinks + 1)
        surplus = obs.live.sum(-1) > obs.capacity
        # the lowest score, of equals the oldest token: without ranks, as every token decides
        score = jnp.where(obs.live, score, jnp.inf)
        among = obs.live & (score == score.min(-1, keepdims=True))
        position = jnp.where(among, obs.position, jnp.iinfo(jnp.int32).max)
        lowest = among & (position == position.min(-1, keepdims=True))
        return obs.live & ~(lowest & surplus[..., None])
