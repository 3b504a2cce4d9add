"""HeadKV: head-aware compression with stratified token eviction, as published for models that draw
token by token, and adapted to next-scale prediction."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from varjax.cache.allocation import Geometry, RegionAllocation
from varjax.cache.observation import Needs, Observation
from varjax.cache.stages import StageAllocation
from varjax.errors import choose
from varjax.policies import building_blocks as blocks
from varjax.policies import capacities, stage_blocks
from varjax.policies.base import per_layer, within
from varjax.policies.registry import register
from varjax.policies.staged import SCORES, WindowedTokenPolicy
from varjax.policies.windows import SinkPolicy
from varjax.sequence import SCALES, TOKENS

QUERIES = 16  # of a scale, by default
LOCAL_ONE_IN = 8  # heads, at least one: papers' tables imply 6 to 19 % (docs/lab/demo_policies.md)
GROUPINGS = ("budget", "paper")


@register("headkv")
@dataclass(frozen=True, kw_only=True)
class HeadKV(WindowedTokenPolicy, SinkPolicy):
    """HeadKV ("Head-Aware Key-Value Compression for Efficient Autoregressive Image Generation",
    arXiv 2605.20600).

    Idea: some heads look at their neighbourhood, others at the whole image, and which is which
    shows early in every image. So local heads get a small cache and global heads a large one,
    decided per image.

    On models that draw token by token, the paper's own:

    1. The cache is the condition, history and the newest `window` tokens (w; Eq. 2). Nothing is
       dropped until it holds more than `group_after` tokens.
    2. After the first stage at which it does, once per image, each head is measured by the newest
       token's attention: it is local if fewer than w newest tokens gather `threshold` of it, else
       global. That holds to the end.
    3. Local heads see the condition and the newest w tokens (Eq. 3), global heads history too, as
       far as there is room (Eq. 4).
    4. Stratified eviction: after every `period` tokens (P) M tokens of history have to go. History
       is split by rank in the list of what is held, oldest first: the newer `ratio` is near, the
       rest far (Eq. 5). The M / 2 of each part with the lowest scores go. S of a token is
       q . k / sqrt(H), averaged over the stage's P queries (Eq. 6, `score=logit`).

    Readings of what the paper leaves open, on these models:
      - The budget counts the condition, and the buffer of the newest P tokens: it is a peak. The
        paper counts image tokens after an update (`accounting=tokens` does that: rho = budget).
      - `group_after` counts everything that is held, the condition too. The newest query's softmax
        is over all of it, with the condition as the oldest tokens: a head with more than a tenth of
        its attention on the condition is global.
      - The window that decides a head's type is w: "typically two rows" of the image.
      - Types belong to a layer, head and row; unconditional rows have their own.
      - If the budget holds more than `group_after`, types are found there, local heads are cut at
        once, and global heads go on growing. If it holds less, types are found when it is full
        (`grouping=budget`); `grouping=paper` goes on to `group_after` and drops down to the budget
        then, so the peak is `group_after`, which needs a budget of that size or accounting=tokens.
      - P has no published value; here it is 8, or 16 if a head has room for 128 image tokens.
      - The queries of Eq. 6 are the newest P (printed are P + 1 over P), with no softmax, as
        printed; Eq. 1 of the same text shows one, so `score=attention` averages attention instead.
      - Of an odd M the near part gives one more; what one part cannot give the other does.
      - Local heads have as much room as global ones and are masked: exact windows between updates,
        for 3 to 8 % of the memory. A quota (`global_heads`) gives the others no more room either.
      - Keys keep the rotation of their true place. Heads that share keys are not supported.

    On next-scale models:

    1. Prefill (step 1 of the paper): until the cache holds `group_after` tokens per head nothing is
       dropped.
    2. Grouping (step 2): at that scale, once per image and row, each head is measured by how many
       tokens, counted backwards from the newest (own scale first, then earlier scales), gather
       `threshold` of the attention mass averaged over that scale's queries. The heads that need
       least are local, the others global.
    3. Compression (step 3, Eqs. 2-4): every head keeps the sink scales and the newest tokens, and
       fills the rest of its room with history. Local heads have less room.
    4. Stratified eviction (Eqs. 5-6): history is split by age into a near and a far part, the
       nearer `ratio` of it and the rest; each keeps its best by attention from a window of queries,
       `ratio` of the tokens kept being near ones.

    Args:
      budget: mean fraction over heads. Of the mean capacity A = budget * F a local head gets
        local_share * A (at least the sinks), the global heads of the layer share what is left.
      group_after: tokens per head before grouping (the paper's 100 for Janus-Pro and LlamaGen).
      threshold: attention mass that decides a head's type (0.9).
      global_heads: global heads per layer; 0 takes all but one in eight, and all but one where
        that is none. Token by token: 0 is the paper's rule, whoever needs w tokens or more; G is a
        quota, the G heads of a layer and row that need most, of equals the lower head number.
      local_share: capacity of a local head relative to the mean. Next-scale models only.
      recent_share: newest tokens that every head keeps, relative to the mean capacity, as far as
        it has room for them. Next-scale models only.
      sinks: scales never dropped; 0 takes up to 3, as many as fit half of the mean capacity. Token
        by token: image tokens that stay from the first on (0).
      window: queries of the current scale that score the history, spread evenly over it (16). Token
        by token: the newest tokens w, by default two lines of the image, halved until a sixth of
        what stays is left for history.
      ratio: near part of the history (the paper's r_s is the far part, 1 - ratio); on next-scale
        models also of what is kept of it.
      period: tokens between two decisions, token by token; see
        `help(varjax.policies.staged.TokenPolicy)`.
      score: "logit" or "attention", token by token.
      grouping: "budget" or "paper", token by token.

    On next-scale models it differs from the paper, because scales replace tokens and because a
    budget here is a promise:
      - The paper's number of local heads varies per input (need below the window size). Capacities
        must be static here, so the *number* of global heads is fixed and heads are ranked by need;
        of equals, the lower head number counts as global.
      - If the budget cannot hold `group_after` tokens in every head, grouping happens at the first
        scale that would not fit whole, before anything of it is kept: not even early is the budget
        exceeded.
      - The mean over all queries of the grouping scale decides, not one query per head: a scale is
        generated at once. So "recent queries" are spread over the scale, all being equally recent.
      - Recent means newest in raster order. The paper's two image rows become `recent_share`: the
        scale at hand, which every head sees whole, is the nearest neighbourhood. Its update every
        few tokens is one after every scale.
      - Local heads have less room, and keep history where sinks and newest tokens leave some: what
        a quota calls local need not be so for every image.
    """

    budget: float = 0.25
    group_after: int = within(100, 0, 2**31 - 1)
    threshold: float = within(0.9, 0, 1, above=True)
    global_heads: int = 0
    local_share: float = within(0.75, 0, 1, above=True)
    recent_share: float = within(0.1, 0, 1)
    window: int | None = None
    ratio: float = within(0.5, 0, 1, above=True)
    score: str = "logit"
    grouping: str = "budget"

    only_for: ClassVar[dict[str, tuple[str, ...]]] = {
        SCALES: ("local_share", "recent_share"),
        TOKENS: ("period", "score", "grouping"),
    }
    selection_arguments = ("sinks", "recent_share", "window", "ratio", "score")
    summary = "local and global heads found per image, stratified eviction"

    @property
    def needs(self) -> Needs:
        return Needs(window=self._queries, window_mass=True, regroup_mass=True)

    @property
    def _queries(self) -> int:
        """Queries of a scale that score the history."""
        return QUERIES if self.window is None else self.window

    # --- host -------------------------------------------------------------------------------------

    def prepare(self, geometry: Geometry, calibration: Any) -> "HeadKV":
        return replace(self, window=self._queries)

    def check(self, geometry: Geometry) -> None:
        most = max(*geometry.schedule.tokens, 16)
        self.require("window", 1 <= self._queries <= most, f" must be 1 to {most}")
        self._check_quota(geometry)
        super().check(geometry)

    def _check_quota(self, geometry: Geometry) -> None:
        fits, heads = 0 <= self.global_heads <= geometry.num_heads, geometry.num_heads
        self.require("global_heads", fits, f", but a layer has {heads} heads")

    def _num_global(self, geometry: Geometry) -> int:
        heads = geometry.num_heads
        local = max(1, round(heads / LOCAL_ONE_IN)) if heads > 1 else 0
        return self.global_heads or heads - local

    def region_sizes(self, geometry: Geometry, budget: float) -> np.ndarray:
        """int [N]: tokens of the regions of a layer, the global ones first. What does not divide
        evenly goes to the first of them, whose heads need most."""
        full, wide = geometry.schedule.persistent_tokens, self._num_global(geometry)
        narrow, total = geometry.num_heads - wide, capacities.of_layer(geometry, budget)
        share = int(self.local_share * total / geometry.num_heads + 1e-6)
        local = max(self.protected(geometry, budget), share)
        if narrow and total - narrow * local >= wide * full:
            local = min(full, (total - wide * full) // narrow)
        regions = np.full(geometry.num_heads, local)
        left = min(wide * full, total - narrow * local)
        regions[:wide] = (left + np.arange(wide)[::-1]) // wide
        return regions

    def _recent(self, geometry: Geometry, budget: float) -> int:
        """Newest tokens that a head keeps, where it has room for them beside the sinks."""
        mean = capacities.of_layer(geometry, budget) / geometry.num_heads
        return int(self.recent_share * mean + 1e-6)

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> RegionAllocation:
        schedule, heads = geometry.schedule, geometry.num_heads
        mean = capacities.of_layer(geometry, budget) / heads
        reached = (end >= self.group_after or end > mean for end in schedule.ends)
        grouping = list(reached).index(True)
        before = np.array(schedule.starts)[:, None, None]
        after = np.arange(schedule.num_scales)[:, None, None] > grouping
        regions = self.region_sizes(geometry, budget)
        capacity = np.where(after, np.minimum(regions, before), before)
        protected = self.protected(geometry, budget)
        return RegionAllocation(
            np.repeat(capacity, geometry.num_layers, axis=1).astype(np.int32),
            regroup_scale=grouping if grouping < schedule.num_scales - 1 else None,
            protected=protected,
            recent=min(self._recent(geometry, budget), int(regions.min()) - protected),
        )

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> RegionAllocation:
        protected, recent = self.protected(geometry, budget), self._recent(geometry, budget)
        return RegionAllocation(capacity, protected=protected, recent=recent)

    # --- device -----------------------------------------------------------------------------------

    def inputs(self, geometry: Geometry, allocation: RegionAllocation, image_index: np.ndarray):
        """int32 [K, L, 2]: protected tokens and recent tokens, both static."""
        return per_layer(geometry, np.int32([allocation.protected, allocation.recent]))

    def regroup(self, obs: Observation):
        """Regions 0..G-1 are global. Heads are ranked by need, the neediest first; ties: lower head
        number first."""
        order = jnp.argsort(-self.tokens_needed(obs), axis=-1, stable=True)
        return jnp.argsort(order, axis=-1).astype(jnp.int32)

    def tokens_needed(self, obs: Observation):
        """int32 [R, N]: newest tokens that gather `threshold` of the scale's mean attention."""
        order = jnp.argsort(jnp.where(obs.live, -obs.position, 1), axis=-1)
        mass = jnp.take_along_axis(obs.scale_mass, order, axis=-1)
        return (jnp.cumsum(mass, axis=-1) < self.threshold).sum(-1) + 1

    def select(self, obs: Observation):
        protected, recent = obs.inputs[0], obs.inputs[1]
        kept = blocks.protect(obs.position, obs.live, protected)
        count = jnp.minimum(obs.capacity - kept.sum(-1), recent)
        newest = blocks.recent(obs.position, obs.live & ~kept, count)
        history = obs.live & ~kept & ~newest
        kept = kept | newest
        count = jnp.minimum(obs.capacity - kept.sum(-1), history.sum(-1))
        return kept | blocks.stratified(obs.window_mass, obs.position, history, count, self.ratio)

    # --- models that draw token by token ----------------------------------------------------------

    @property
    def stage_needs(self) -> Needs:
        if self.score == "logit":
            return Needs(window=self.period, window_logits=True, newest_mass=True)
        return Needs(scale_mass=True, newest_mass=True)

    @property
    def local_window(self) -> int:
        return self.window

    def check_stage_arguments(self, geometry: Geometry) -> None:
        super().check_stage_arguments(geometry)
        self._check_quota(geometry)
        choose("score", self.score, SCORES)
        choose("grouping", self.grouping, GROUPINGS)

    def check_stages(self, geometry: Geometry) -> None:
        super().check_stages(geometry)
        sequence = geometry.schedule
        peak = sequence.condition + self._paper_slots(geometry)
        share = min(1.0, peak / sequence.persistent_tokens)
        if self.accounting == "bytes" and self.grouping == "paper" and self.budget < share - 1e-9:
            self.refuse(
                f"grouping=paper holds {peak} tokens per head before it groups heads, {share:.4f} "
                f"of the full cache, more than budget={self.budget:g}: raise the budget, or give "
                f"accounting=tokens or grouping=budget"
            )

    def _paper_slots(self, geometry: Geometry) -> int:
        """Image slots that are in use when more than `group_after` tokens are held for the first
        time after a stage."""
        sequence = geometry.schedule
        return min(self._drawn_until_grouping(sequence.condition), sequence.steps)

    def _drawn_until_grouping(self, condition: int) -> int:
        more = max(0, self.group_after - condition) + 1
        return -(-more // self.period) * self.period

    def plan_lines(self, geometry: Geometry, calibration: Any = None) -> list[str]:
        lines = super().plan_lines(geometry, calibration)
        if geometry.kind != TOKENS:
            return lines
        slots = min(self.wanted_slots(geometry), geometry.schedule.steps)
        group = self.allocate_stages(geometry, slots).group_stage
        when = "never" if group is None else f"after {(group + 1) * self.period} image tokens"
        return [*lines, f"grouping  {when}; local heads see the newest {self.window}"]

    def allocate_stages(self, geometry: Geometry, slots: int) -> StageAllocation:
        kept, drawn = slots - self.period, self._drawn_until_grouping(geometry.schedule.condition)
        if self.grouping == "budget":
            # what no longer fits is drawn in the stage after `kept` tokens are held
            drawn = min(drawn, (kept // self.period + 1) * self.period)
        group = drawn // self.period - 1
        if group >= geometry.schedule.stages(self.period)[0]:
            return StageAllocation.uniform(geometry, slots, self.period)
        more = {"group_stage": group}
        if drawn > slots:
            more["kept"] = np.full(geometry.num_layers, kept)
        return StageAllocation.uniform(geometry, max(slots, drawn), self.period, **more)

    def local_heads(self, mass, position):
        need = stage_blocks.tokens_needed(mass, position, self.threshold)
        if not self.global_heads:
            return need < self.window
        number = jnp.broadcast_to(-jnp.arange(need.shape[1], dtype=jnp.int32), need.shape)
        # needs and head numbers stand for scores and places of tokens
        return stage_blocks.lowest(
            need[:, None],
            number[:, None],
            jnp.ones_like(need, bool)[:, None],
            jnp.full((len(need), 1), need.shape[1] - self.global_heads, jnp.int32),
        )[:, 0]

    def select_stage(self, obs: Observation):
        """All tokens are compared twice only, with those of all of the cache by age and with those
        of their part by score: that is what a decision costs."""
        score = obs.window_logits if self.score == "logit" else obs.scale_mass
        age, total = stage_blocks.age_rank(obs.position, obs.live), obs.live.sum(-1)
        newest = obs.live & (age >= total[..., None] - self.window)
        first = obs.live & (obs.position < self.sinks)
        history, surplus = obs.live & ~newest & ~first, total - obs.capacity
        age = age - first.sum(-1, keepdims=True)  # in history, of which all sinks are older
        arguments = (obs.position, history, age, surplus)
        gone = stage_blocks.stratum_lowest(score, *arguments, self.ratio)
        if obs.local is not None:  # local heads see no history: the oldest go first
            oldest = history & (age < surplus[..., None])
            gone = jnp.where(obs.local[..., None], oldest, gone)
        return obs.live & ~gone
