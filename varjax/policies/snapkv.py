"""SnapKV: what a window of recent queries looks at stays, and its neighbours with it."""

from dataclasses import dataclass, replace

from varjax.calibration.data import Calibration
from varjax.core import masks
from varjax.core.allocation import Geometry
from varjax.core.observation import Needs, Observation
from varjax.policies import capacities
from varjax.policies.registry import register
from varjax.policies.scale_rule import ScaleRule
from varjax.policies.token_rule import ObservingRule, StagedPolicy, check_kernel

WINDOW = 16
KERNEL, STAGE_KERNEL = 7, 5  # on next-scale models, and token by token
WINDOW_SHARE = 4  # an automatic window takes at most a quarter of a head's capacity


class SnapKVScales(ScaleRule):
    """SnapKV after every scale."""

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "SnapKV":
        policy = self.policy
        quarter = capacities.uniform(geometry, policy.budget) // WINDOW_SHARE
        return replace(
            policy,
            window=policy.window or min(WINDOW, max(1, quarter)),
            kernel=KERNEL if policy.kernel is None else policy.kernel,
        )

    def check(self, geometry: Geometry) -> None:
        most = max(*geometry.schedule.tokens, WINDOW)
        rule = f" must be 1 to {most} (queries of one scale), or 0 to let the budget decide"
        self.policy.require("window", 0 <= self.policy.window <= most, rule)
        check_kernel(self.policy)


class SnapKVTokens(ObservingRule):
    """SnapKV after every stage of a model that draws token by token."""

    most_queries = WINDOW

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "SnapKV":
        kernel = STAGE_KERNEL if self.policy.kernel is None else self.policy.kernel
        return replace(super().prepare(geometry, calibration), kernel=kernel)


@register("snapkv")
@dataclass(frozen=True, kw_only=True)
class SnapKV(StagedPolicy):
    """SnapKV (Li et al. 2024, "LLM Knows What You are Looking for Before Generation").

    Idea: what the latest queries look at is what later queries will need. So a small observation
    window of queries votes, and the winners stay.

    After every scale, in each head that holds more than its capacity:
    1. The window is `window` tokens of the scale just generated, spread evenly over its map. Their
       queries vote. They stay, as far as they fit (the best-voted of them if not all do).
    2. Vote: the attention mass that each other token receives from the window, averaged over its
       queries.
    3. Clustering: the votes are max-pooled along the cache, in order of position, `kernel` tokens
       wide and with stride 1, so that a token brings its neighbours. Window tokens do not vote for
       their neighbours.
    4. The tokens with the best pooled votes fill the rest; among equals the higher own vote, then
       the earlier token.

    Every head of every layer has the same capacity, floor(budget * F).

    Args:
      budget: fraction of the full cache.
      window: tokens of the observation window, whose queries vote. Next-scale models: 0 (default)
        takes 16, or a quarter of a head's capacity if that is less, so that small models keep some
        history. Token by token: at most the period; 0 (default) takes 16, or the period if that is
        less.
      kernel: width of the pooling, odd; 1 turns it off. By default 7 on next-scale models, 5 token
        by token.
      period: tokens between two decisions, on models that draw token by token; see
        `help(varjax.policies.token_rule.StagedPolicy)`.

    On models that draw token by token the window is the newest tokens, and the same is done after
    every `period` tokens of a picture (the paper does it once, after the prompt). A query's votes
    are normalised over everything that it saw, the window and the condition included. Votes are
    pooled in order of position; window tokens do not vote for their neighbours. Query heads that
    share keys vote together, by the mean of their weights (as kvpress does), which is then pooled.

    On next-scale models it differs from the paper, because scales replace tokens:
      - All tokens of a scale are equally recent, so the window is spread over it and not the end of
        the prompt. It votes anew after every scale; what was dropped stays dropped.
      - Tokens of the current scale outside the window compete with history on equal terms.
      - The authors' code has two poolings; we take the maximum. An average would need rules for the
        borders of the cache and beside window tokens, and no text gives any.
      - No sinks: HeatKV's comparison names them for other policies only.
    """

    budget: float = 0.25
    window: int = 0
    kernel: int | None = None

    rules = (SnapKVScales, SnapKVTokens)
    allocation_arguments = ()
    summary = "what a window of recent queries attends to, and its neighbours"

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window or WINDOW, window_mass=True)

    def select(self, obs: Observation):
        return masks.window_and_peaks(obs, obs.window_mass, self.kernel or KERNEL)
