"""HeadKV: head-aware compression with stratified token eviction, as published for models that draw
token by token, and adapted to next-scale prediction."""

from dataclasses import dataclass

from varjax.core.allocation import Geometry
from varjax.core.arguments import within
from varjax.core.sequence import SCALES, TOKENS
from varjax.policies.headkv_rules import HeadKVScales, HeadKVTokens
from varjax.policies.registry import register
from varjax.policies.token_rule import StagedPolicy, only_for
from varjax.policies.windows import SinkPolicy


@register("headkv")
@dataclass(frozen=True, kw_only=True)
class HeadKV(StagedPolicy, SinkPolicy):
    """HeadKV ("Head-Aware Key-Value Compression for Efficient Autoregressive Image Generation",
    arXiv 2605.20600).

    Idea: some heads look at their neighbourhood, others at the whole image, and which is which
    shows early in every image. So local heads get a small cache and global heads a large one,
    decided per image.

    On models that draw token by token, as in the paper:

    1. The cache is the condition, history and the newest `window` tokens (w; Eq. 2). Nothing is
       dropped until it holds more than `group_after` tokens.
    2. After the first stage at which it does, once per image, each head is measured by the newest
       token's attention: it is local if fewer than w newest tokens gather `threshold` of it, else
       global. That holds to the end.
    3. Local heads see the condition and the newest w tokens (Eq. 3). Global heads also see history,
       as far as there is room for it (Eq. 4).
    4. Stratified eviction: after every `period` tokens (P) M tokens of history have to go. History
       is split by rank in the list of what is held, oldest first: the newer `ratio` is near, the
       rest is far (Eq. 5). In each part the M / 2 tokens with the lowest scores S go. S is
       q . k / sqrt(H), averaged over the stage's P queries (Eq. 6, `score=logit`).

    What the paper leaves open is read as follows on these models:
      - The budget counts the condition and the buffer of the newest P tokens: it is a peak. The
        paper counts image tokens after an update. `accounting=tokens` does that: rho = budget.
      - `group_after` counts everything that is held, the condition included. The newest query's
        softmax is over all of it, with the condition as the oldest tokens: a head with more than a
        tenth of its attention on the condition is global.
      - The window that decides a head's type is w: "typically two rows" of the image.
      - A type belongs to a layer, a head and a row. Unconditional rows have types of their own.
      - If the budget holds more than `group_after`, types are found there, local heads are cut at
        once, and global heads go on growing. If it holds less, types are found when it is full
        (`grouping=budget`); `grouping=paper` goes on to `group_after` and drops down to the budget
        then, so the peak is `group_after`, which needs a budget of that size or accounting=tokens.
      - P has no published value; here it is 8, or 16 if a head has room for 128 image tokens.
      - The queries of Eq. 6 are the newest P; the print sums P + 1 and divides by P. There is no
        softmax, as printed. Eq. 1 of the same text shows one, so `score=attention` averages
        attention instead.
      - If M is odd, the near part gives one token more. What one part cannot give, the other gives.
      - Local heads have as much room as global ones and are masked: exact windows between updates,
        for 3 to 8 % of the memory. A quota (`global_heads`) gives the others no more room either.
      - Keys keep the rotation of their true place.
      - Query heads that share keys decide together. Each of them is measured; if one is global, all
        are, and a quota counts the neediest of them. S is the mean over them (`score=logit`: of
        their queries; `score=attention`: of their weights).

    On next-scale models:

    1. Prefill (step 1 of the paper): until the cache holds `group_after` tokens per head nothing is
       dropped.
    2. Grouping (step 2): at that scale, once per image and row, each head is measured by how many
       tokens, counted backwards from the newest (own scale first, then earlier scales), gather
       `threshold` of the attention mass, averaged over that scale's queries. The heads that need
       the fewest are local, the others are global.
    3. Compression (step 3, Eqs. 2-4): every head keeps the sink scales and the newest tokens, and
       fills the rest of its room with history. Local heads have less room.
    4. Stratified eviction (Eqs. 5-6): history is split by age into a near and a far part, the
       nearer `ratio` of it and the rest; each keeps its best by attention from a window of queries,
       `ratio` of the tokens kept being near ones.

    Args:
      budget: mean fraction over heads. On next-scale models a local head gets local_share * A (at
        least the sinks) of the mean capacity A = budget * F, and the global heads of the layer
        share what is left.
      group_after: tokens per head before grouping (the paper's 100 for Janus-Pro and LlamaGen).
      threshold: attention mass that decides a head's type (0.9).
      global_heads: global heads per layer. Next-scale models: 0 makes all heads but one in eight
        global; if that leaves no local head, all but one. Token by token: 0 is the paper's rule,
        every head that needs w tokens or more; G is a quota, the G heads of a layer and row that
        need most, among equals the lower head number.
      local_share: capacity of a local head relative to the mean. Next-scale models only.
      recent_share: newest tokens that every head keeps, relative to the mean capacity, as far as
        it has room for them. Next-scale models only.
      sinks: first steps that are never dropped. Next-scale models: scales; 0 takes up to 3, as many
        as fit half of the mean capacity. Token by token: image tokens (0).
      window: tokens w of the observation window. Next-scale models: tokens of the current scale,
        spread evenly over it, whose queries score the history (16). Token by token: the newest
        tokens, which stay; by default two lines of the image, halved until a sixth of what stays is
        left for history.
      ratio: near part of the history (the paper's r_s is the far part, 1 - ratio). On next-scale
        models it is also the near part of the history that is kept.
      period: tokens between two decisions. Token by token only; see
        `help(varjax.policies.token_rule.StagedPolicy)`.
      score: "logit" or "attention". Token by token only.
      grouping: "budget" or "paper". Token by token only.

    On next-scale models it differs from the paper, because scales replace tokens and because a
    budget here is a promise:
      - The paper's number of local heads varies per input (need below the window size). Capacities
        must be static here, so the *number* of global heads is fixed and heads are ranked by need;
        among equals the lower head number counts as global.
      - If the budget cannot hold `group_after` tokens in every head, grouping happens at the first
        scale that would not fit whole, before anything of that scale is kept. So the budget is not
        exceeded early on either.
      - The mean over all queries of the grouping scale decides, not one query per head, because a
        scale is generated at once. For the same reason "recent queries" are spread over the scale:
        all of them are equally recent.
      - Recent means newest in raster order. The paper's two image rows become `recent_share`: the
        scale at hand, which every head sees whole, is the nearest neighbourhood. The paper's update
        every few tokens becomes one after every scale.
      - Local heads have less room, and keep history where sinks and newest tokens leave some: what
        a quota calls local need not be local in every image.
    """

    budget: float = 0.25
    window: int | None = None
    group_after: int = within(100, 0, 2**31 - 1)
    threshold: float = within(0.9, 0, 1, above=True)
    global_heads: int = 0
    local_share: float = only_for(SCALES, within(0.75, 0, 1, above=True))
    recent_share: float = only_for(SCALES, within(0.1, 0, 1))
    ratio: float = within(0.5, 0, 1, above=True)
    score: str = only_for(TOKENS, "logit")
    grouping: str = only_for(TOKENS, "budget")

    rules = (HeadKVScales, HeadKVTokens)
    unfit_roles = {
        "allocate": "how much a head gets is decided for every image, by its own grouping"
    }
    selection_arguments = ("sinks", "recent_share", "window", "ratio", "score")
    summary = "local and global heads found per image, stratified eviction"

    def check_quota(self, geometry: Geometry) -> None:
        """Refuses more global heads than a layer has, on any model."""
        fits, heads = 0 <= self.global_heads <= geometry.num_heads, geometry.num_heads
        self.require("global_heads", fits, f", but a layer has {heads} heads")
