"""H2O: heavy hitters and recent tokens."""

from dataclasses import dataclass

from varjax.core import masks
from varjax.core.arguments import within
from varjax.core.observation import Needs, Observation
from varjax.policies.registry import register
from varjax.policies.token_rule import StagedPolicy


@register("h2o")
@dataclass(frozen=True, kw_only=True)
class H2O(StagedPolicy):
    """H2O (Zhang et al. 2023, "Heavy-Hitter Oracle").

    Idea: a few tokens collect most of the attention, at every step the same ones. So a head keeps
    those that have collected most so far, and the newest, which had no time to collect anything.

    After every scale, in each head that holds more than its capacity C = floor(budget * F):
    1. The newest floor(recent_share * C) tokens stay (newest in raster order).
    2. The rest goes to the heavy hitters: the other tokens with the most accumulated attention.
       That is the attention mass summed over all queries that saw the token, in all scales, the
       scale just generated included. Among equals the first in the cache stays.

    Every head of every layer has the same capacity.

    Args:
      budget: fraction of the full cache.
      recent_share: part of the capacity for the newest tokens; the paper uses halves. 0 keeps heavy
        hitters only, 1 is a sliding window.
      period: tokens between two decisions, on models that draw token by token; see
        `help(varjax.policies.token_rule.StagedPolicy)`.

    On models that draw token by token this is the paper's rule, decided after every `period` tokens
    and not after each. B - P image tokens stay: floor(recent_share * (B - P)) of them are the
    newest, the others have collected most since they were drawn, their own attention to themselves
    included. Among equals the newer stays. Of query heads that share keys the mean counts.

    On next-scale models it differs from the paper, because scales replace tokens:
      - One decision per scale, about all of its tokens at once, instead of one eviction per token.
      - A scale's tokens see each other in both directions, so even the newest have collected
        something. Sums are not divided by the number of queries, as in the paper, so a large scale
        weighs more than all smaller ones before it.
      - There are no sinks, as in the original; the first scales collect for longest.
    """

    budget: float = 0.25
    recent_share: float = within(0.5, 0, 1)

    allocation_arguments = ()
    summary = "most accumulated attention, and the newest tokens"
    needs = Needs(total_mass=True)

    def select(self, obs: Observation):
        recent = masks.part_of(obs.capacity, self.recent_share)
        newest = masks.newest(obs, obs.live, recent)
        return masks.fill(obs, newest, obs.total_mass)
