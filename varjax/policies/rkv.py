"""R-KV: important and not redundant."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from varjax.core import masks
from varjax.core.arguments import within
from varjax.core.observation import Needs, Observation
from varjax.policies.registry import register
from varjax.policies.token_rule import ObservingRule, StagedPolicy

SIMILAR = 0.5  # cosine
EPSILON = 1e-8  # added to the norm of a key


@register("rkv")
@dataclass(frozen=True, kw_only=True)
class RKV(StagedPolicy):
    """R-KV (Cai et al. 2025, "Redundancy-aware KV Cache Compression"), for models that draw token
    by token, with the faults of the published code repaired.

    Idea: what is attended to should stay, but not ten copies of it. So a token's score is its
    importance less its redundancy.

    After every stage, in each head that holds more than it may keep:
    1. The newest `window` tokens (a) stay; their queries observe the others.
    2. Importance I: the softmax of each of these queries' scores over the image tokens outside the
       window, averaged over the queries, max-pooled over `kernel` neighbours in order of position.
    3. Redundancy R: the cosine similarities of all image tokens' keys with each other, none with
       itself. For every token the newest one that it resembles (above 0.5) does not count. The
       similarities of a token are averaged, and R is the softmax of these means over all tokens.
    4. The tokens with the highest mix * I - (1 - mix) * R stay. Among equals the newer stays.

    Args:
      budget: fraction of the full cache: condition, tokens that stay and buffer together.
      window: observing queries and tokens that always stay, a; by default 8, or the period if that
        is less.
      mix: the paper's lambda, 0.1 (the published code's default is 0.07).
      kernel: width of the pooling, odd; 1 turns it off.
      period: see `help(varjax.policies.token_rule.StagedPolicy)`; the published code's 128 is more
        than such budgets hold.

    Differs from the published code, which it repairs:
      - Similarities are those of every row. The code takes those of the first row for all.
      - Tokens are in order of position. The code keeps them in order of score, so that "the newest
        one" and neighbours of the pooling lose their meaning from the second update on.
      - If a token resembles none above 0.5, nothing is left out; the code leaves out the first.
      - The condition always stays. It neither observes nor counts among the similar tokens. The
        code protects nothing.
      - The period counts every image's own tokens. The code's counter runs on from image to image.

    As in the code, query heads that share keys decide together: the score of a query and a token is
    the largest over them, taken before the softmax of step 2.
    """

    budget: float = 0.25
    window: int | None = None
    mix: float = within(0.1, 0, 1)
    kernel: int = 7

    rules = (ObservingRule,)
    summary = "attended to by the newest queries and not redundant"
    unsuited = "it looks back from the newest few tokens, and a scale's tokens are equally new"
    allocation_arguments = ()

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, window_scores=True, keys=True)

    def select(self, obs: Observation):
        newest = masks.newest(obs, obs.live, self.window)
        others = obs.live & ~newest
        scores = jnp.where(others[:, :, None], obs.window_scores, -jnp.inf)
        # a head that holds no others has nothing to drop; its scores do not matter
        mass = jnp.where(others, jax.nn.softmax(scores, axis=-1).mean(2), 0)
        live, order, importance, keys = masks.by_age(obs, obs.live, others, mass, obs.keys)
        importance = masks.max_pool(jnp.where(order, importance, -jnp.inf), self.kernel)
        score = self.mix * importance - (1 - self.mix) * redundancy(keys, live)
        score = masks.from_age(obs, score)
        surplus = obs.live.sum(-1) - obs.capacity
        return obs.live & ~masks.lowest(obs, score, others, surplus)


def redundancy(keys, live):
    """float32 [R, N, K]: how much each key resembles the others. keys: [R, N, K, H] in order of
    position, the live ones first."""
    keys = jnp.where(live[..., None], keys.astype(jnp.float32), 0)
    unit = keys / (jnp.sqrt(jnp.square(keys).sum(-1, keepdims=True)) + EPSILON)
    similar = jnp.einsum("rnih,rnjh->rnij", unit, unit)
    index = jnp.arange(keys.shape[2])
    similar = jnp.where(index[:, None] == index, 0, similar)
    last = jnp.where(similar > SIMILAR, index, -1).max(-1, keepdims=True)
    similar = jnp.where(index == last, 0, similar)
    total = jnp.where(live[..., None], similar, 0).sum(2)
    mean = total / live.sum(-1, keepdims=True)
    return jax.nn.softmax(jnp.where(live, mean, -jnp.inf), axis=-1)
