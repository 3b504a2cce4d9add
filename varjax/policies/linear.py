"""LineAR: after every line of the image, the middle drops what the line attended to least."""

from dataclasses import dataclass

from varjax.core import masks
from varjax.core.allocation import Geometry
from varjax.core.observation import Observation
from varjax.policies.registry import register
from varjax.policies.token_rule import StagedPolicy, WindowedRule


class LineARTokens(WindowedRule):
    """LineAR's stages are lines."""

    def longest_period(self, geometry: Geometry) -> int:
        return geometry.schedule.line


@register("linear")
@dataclass(frozen=True, kw_only=True)
class LineAR(StagedPolicy):
    """LineAR (Qin et al. 2025, arXiv 2512.04857), for models that draw token by token.

    Idea: neighbouring lines of an image look at the same places. So the image is drawn in stages of
    a line, and after each line the tokens that its queries attended to least are dropped.

    Every head of every layer holds the same number of tokens: the condition, the first `sinks`
    image tokens (the paper's initial anchors), the newest `window` (its recent lines), and those
    tokens between them that have the highest scores S. S is the attention that a token receives,
    averaged over the queries of the stage (softmax over everything that the query saw, summed up as
    the line is drawn).

    Args:
      budget: fraction of the full cache: condition, tokens that stay and buffer together.
      period: tokens of a stage; by default a line, halved until it is at most a third of the image
        tokens that a head has room for.
      window: newest image tokens that always stay; by default two lines, halved until a sixth of
        what stays is left for the middle.
      sinks: image tokens that stay from the start on (0).
      score: "attention", or "logit": the average of the scores before the softmax instead.

    All of this is our reading: we have the paper's abstract, README and tables, and there is no
    code. Not known are the number of recent lines, what the anchors are (we take none beside the
    condition), whether scores are taken after the softmax, and how the running line counts (it is
    part of the budget here). The HeadKV paper describes it as HeadKV with one stratum and without
    local heads. Query heads that share keys decide together: S is the mean over them.
    """

    budget: float = 0.25
    window: int | None = None
    sinks: int = 0
    score: str = "attention"

    rules = (LineARTokens,)
    summary = "per line of the image what it attended to, and the newest lines"
    unsuited = "its stages are lines of an image that is drawn token by token"
    allocation_arguments = ()

    def select(self, obs: Observation):
        score = obs.window_logits if self.score == "logit" else obs.scale_mass
        newest = masks.newest(obs, obs.live, self.window)
        middle = obs.live & ~newest & (obs.position >= self.sinks)
        surplus = obs.live.sum(-1) - obs.capacity
        return obs.live & ~masks.lowest(obs, score, middle, surplus)
