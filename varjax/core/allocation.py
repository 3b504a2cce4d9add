"""The sizes of a model that its cache depends on (`Geometry`), and the answers of policies to the
planner: who may hold how much, and, for static policies, exactly which tokens.

Time runs in scales. "At scale s" means while scale s is generated. A token of scale j is stored
right after its layer has run at scale j and is visible from scale j + 1 on. What is dropped never
returns, so one number per token, its last use, says everything.
"""

from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.core.sequence import Schedule, TokenSequence

LARGEST = 10**6  # size of a head
NUMBERS = ("num_layers", "num_heads", "head_dim", "rows_per_image", "queries_per_head")
# The largest published models have a third and a fifth of these.
LARGEST_HEADS = 2**12  # layers times heads
LARGEST_PAIRS = 2**20  # heads of all layers times the square of the number of scales
LARGEST_TOKENS = 2**25  # heads of all layers times the tokens of an image


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes of a model that decide its cache.

    schedule: what is drawn in which order: scales, or single tokens.
    num_layers, num_heads, head_dim: L layers with N key/value heads of size H.
    rows_per_image: cache rows that an image needs: two with guidance.
    queries_per_head: G query heads share each head of keys and values (token by token only).
    """

    schedule: Schedule | TokenSequence
    num_layers: int
    num_heads: int
    head_dim: int
    rows_per_image: int = 2
    queries_per_head: int = 1

    def __post_init__(self):
        kinds = (Schedule, TokenSequence)
        arguments.instance("schedule", self.schedule, kinds, "a Schedule or a TokenSequence")
        for name in NUMBERS:
            value = arguments.integer(f"geometry: {name}", getattr(self, name), 1, LARGEST)
            # As Python numbers, whatever was given: the text of a geometry is part of the digest
            # that identifies plans.
            object.__setattr__(self, name, value)
        # Tables and searches grow with these numbers: refused before anything is made.
        heads, tokens = self.num_layers * self.num_heads, self.schedule.total_tokens
        scales = self.schedule.num_scales
        for size, most, words in (
            (heads, LARGEST_HEADS, "heads in all"),
            (heads * scales**2, LARGEST_PAIRS, f"heads times the square of {scales} scales"),
            (heads * tokens, LARGEST_TOKENS, f"heads times the {tokens} tokens of an image"),
        ):
            if size > most:
                raise UserError(
                    f"geometry: {self.num_layers} layers of {self.num_heads} heads are {size} "
                    f"{words}, at most {most} can be planned"
                )

    kind = property(attrgetter("schedule.kind"))  # what is drawn at a time: "scales" or "tokens"

    @property
    def query_heads(self) -> int:
        """Query heads of a layer: G * N."""
        return self.num_heads * self.queries_per_head

    @property
    def heads(self) -> str:
        """The heads of a layer in words."""
        shared = f", each of {self.queries_per_head} query heads" * (self.queries_per_head > 1)
        return f"{self.num_heads} heads of {self.head_dim}{shared}"

    @property
    def dense_tokens(self) -> int:
        """Tokens of a full cache over all layers and heads of one row: F * L * N."""
        return self.schedule.persistent_tokens * self.num_layers * self.num_heads


@dataclass(frozen=True, eq=False)
class StaticAllocation:
    """Contents known before the program starts.

    last_use: int16 [L, N, tokens]: the last scale that sees the token. j for a token of scale j
      that is never stored, K - 1 for one that stays to the end.
    """

    last_use: np.ndarray

    def __repr__(self) -> str:
        layers, heads, tokens = self.last_use.shape
        return f"StaticAllocation of {tokens} tokens in {layers} layers of {heads} heads"

    @classmethod
    def from_visibility(cls, geometry: Geometry, visible: np.ndarray) -> "StaticAllocation":
        """Makes an allocation from bool [K, L, N, tokens] (or broadcastable): visible[s, l, n, p]
        says whether scale s may see token p. `UserError` if a token is visible before it exists, or
        comes back after it was dropped."""
        scale = geometry.schedule.scale_of_token
        num_scales = geometry.schedule.num_scales
        shape = (num_scales, geometry.num_layers, geometry.num_heads, scale.size)
        # a token is cached after its own scale
        later = (np.arange(num_scales)[:, None] > scale)[:, None, None]
        # Visibility may be broadcast over layers and heads: it is compared as it was given, and
        # expanded only to name the first mistake.
        early, returns = visible & ~later, visible[1:] & ~visible[:-1] & later[:-1]
        if early.any():
            s, layer, head, token = np.argwhere(np.broadcast_to(early, shape))[0]
            raise UserError(
                f"scale {s} is said to see token {token} (layer {layer}, head {head}), which "
                f"belongs to scale {scale[token]} and does not exist yet: entries for the current "
                f"and later scales must be False"
            )
        if returns.any():
            returns = np.broadcast_to(returns, (num_scales - 1, *shape[1:]))
            s, layer, head, token = np.argwhere(returns)[0]
            raise UserError(
                f"token {token} (layer {layer}, head {head}) is dropped before scale {s} and "
                f"visible again at scale {s + 1}: what is dropped cannot return"
            )
        # what is dropped never returns, so counting the scales that see a token is enough
        last_use = scale + visible.sum(0)
        return cls(np.broadcast_to(last_use.astype(np.int16), shape[1:]))

    def visible(self, geometry: Geometry, scale: int) -> np.ndarray:
        """bool [L, N, tokens]: which tokens scale `scale` may see."""
        return (self.last_use >= scale) & (geometry.schedule.scale_of_token < scale)

    def capacity(self, geometry: Geometry) -> np.ndarray:
        """int32 [K, L, N]: tokens held when each scale starts."""
        schedule, num_scales = geometry.schedule, geometry.schedule.num_scales
        # Layers or heads that share their contents were broadcast from one, which is counted once.
        # NumPy gives axes that it broadcasts a stride of 0: no number is compared here.
        sizes, strides = self.last_use.shape[:2], self.last_use.strides
        layers, heads = (1 if n > 1 and not strides[axis] else n for axis, n in enumerate(sizes))
        heads = self.last_use[:layers, :heads]
        # how many tokens of each scale are last used at each scale
        counts = np.zeros((*heads.shape[:2], num_scales, num_scales), np.int32)
        # scale by scale, which takes no array of all pairs of tokens and scales
        for j, (start, end) in enumerate(zip(schedule.starts, schedule.ends, strict=True)):
            # a last use of j means never stored, so counting starts behind it
            for scale in range(j + 1, num_scales):
                counts[:, :, j, scale] = (heads[:, :, start:end] == scale).sum(-1)
        # stored by scales before s, less what was used for the last time before s
        change = counts.sum(-1, dtype=np.int32) - counts.sum(-2, dtype=np.int32)
        held = np.cumsum(change, -1, dtype=np.int32) - change
        shape = (*self.last_use.shape[:2], num_scales)
        return np.ascontiguousarray(np.moveaxis(np.broadcast_to(held, shape), -1, 0))


@dataclass(frozen=True, eq=False)
class RegionAllocation:
    """Sizes known before the program starts, contents decided on the device.

    region_capacity: int32 [K, L, N]: tokens that region n of layer l holds when scale s starts.
      Head n uses region n until `regroup_scale`; during that scale the policy assigns heads to
      regions anew, per row.
    ragged: rows may hold fewer tokens than the capacity, so that stored tokens may have to move.
    protected, recent: numbers of tokens that the policy's selection always keeps: the first
      `protected` and the newest `recent`. They belong here because they depend on the budget that
      the planner settled on.
    """

    region_capacity: np.ndarray
    regroup_scale: int | None = None
    ragged: bool = False
    protected: int = 0
    recent: int = 0

    def __repr__(self) -> str:
        scales, layers, heads = self.region_capacity.shape
        held = int(self.region_capacity[-1].sum())
        return (
            f"RegionAllocation of {layers} layers of {heads} regions, which hold {held} tokens "
            f"when the last of {scales} scales starts"
        )

    def capacity(self, geometry: Geometry) -> np.ndarray:
        """int32 [K, L, N], as `StaticAllocation.capacity`. `UserError` for what cannot be one."""
        shape = geometry.schedule.num_scales, geometry.num_layers, geometry.num_heads
        capacity = np.asarray(self.region_capacity).astype(np.int32)
        if capacity.shape != shape or capacity[0].any():
            raise UserError(
                f"region_capacity of shape {capacity.shape}: give int [K, L, N] = {shape}, 0 at "
                f"scale 0, which finds an empty cache"
            )
        return capacity


Allocation = StaticAllocation | RegionAllocation


@dataclass(frozen=True, eq=False)
class StageAllocation:
    """Numbers of image tokens that every head of a layer may hold, and when.

    slots: int64 [L]: image slots of a head (B), the buffer among them.
    period: tokens of a stage (P). For known contents it only says after how many tokens reports
      look at the cache.
    decides: whether a policy decides after every stage; else contents are known.
    kept: int64 [L]: tokens that stay after a stage, at most B - P. None: B - P.
    protected: image tokens from the first on that a ring leaves alone (known contents).
    reads: int64 [L]: tokens of the ring that a query reads, fewer than the ring holds (known
      contents, `OffsetStep`); None: all of them.
    group_stage: the stage after which heads are grouped; before it B - P tokens may stay, whatever
      `kept` says.
    """

    slots: np.ndarray
    period: int
    decides: bool = True
    kept: np.ndarray | None = None
    protected: int = 0
    group_stage: int | None = None
    reads: np.ndarray | None = None

    @classmethod
    def uniform(
        cls,
        geometry: Geometry,
        slots: int,
        period: int,
        *,
        kept: int | None = None,
        group_stage: int | None = None,
    ) -> "StageAllocation":
        """Gives all layers the same. With room for all tokens nothing has to be decided."""
        steps = geometry.schedule.steps
        # A buffer would only cost slots here: what never leaves can go straight to its place.
        if slots >= steps:
            return cls.known(geometry, steps)
        layers = geometry.num_layers
        return cls(
            np.full(layers, slots),
            min(period, steps),
            kept=None if kept is None else np.full(layers, kept),
            group_stage=group_stage,
        )

    @classmethod
    def known(
        cls, geometry: Geometry, slots: int, protected: int = 0, reads: int | None = None
    ) -> "StageAllocation":
        """A ring of slots behind the first `protected` tokens; the full cache if there is room.
        reads: tokens of the ring that a query reads; None: all."""
        slots = min(slots, geometry.schedule.steps)
        # where a query reads the whole ring no offset has to be chosen
        some = reads is not None and reads < slots - protected
        read = np.full(geometry.num_layers, reads) if some else None
        period = min(geometry.schedule.line, geometry.schedule.steps)
        rings = np.full(geometry.num_layers, slots)
        return cls(rings, period, decides=False, protected=protected, reads=read)

    def decisions(self, geometry: Geometry) -> tuple[int, int] | None:
        """The tokens between two decisions, and how many decisions there are; None where nothing is
        decided."""
        if self.decides:
            return self.period, geometry.schedule.stages(self.period)[0]
        if self.reads is None:
            return None
        # offsets are chosen after every token until the ring has one slot left (`OffsetStep`)
        return 1, int(self.slots.max()) - 1

    def held(self, geometry: Geometry) -> np.ndarray:
        """int64 [K, L]: image tokens of a head when each stage starts."""
        decided, _ = geometry.schedule.stages(self.period)
        stage = np.arange(1, decided + 2)[:, None]
        drawn = (stage - 1) * self.period
        limit = self.slots[None]
        # When a stage starts its buffer is empty, so a cache that decides holds P tokens less than
        # it has slots. Known contents have no buffer.
        if self.decides:
            main = self.slots - self.period
            kept = main if self.kept is None else self.kept
            # Until heads are grouped nothing has to leave but what does not fit.
            first = 0 if self.group_stage is None else self.group_stage
            limit = np.where(stage - 1 > first, kept, main)
        held = np.minimum(drawn, limit)
        return np.concatenate([np.zeros((1, held.shape[1]), np.int64), held])
