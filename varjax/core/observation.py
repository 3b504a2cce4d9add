"""Observations of a policy on the device. It names its wishes in `Needs` and is shown an
`Observation`."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The wishes of a policy; the engine computes nothing else.

    window: number of queries of the current scale that are looked at more closely, those that
      `Rule.window_tokens` names.
    raw_queries: `window_logits` use plain projections as queries.
    regroup_mass: `scale_mass`, but only for `regroup`.
    key_similarity: costs a copy of one scale's keys of all layers.
    newest_mass: attention of the newest query, for `regroup` of models that draw token by token.
    window_scores, keys: for models that draw token by token only.
    Every other field asks for the field of `Observation` with its name; `newest_mass` brings
      `group_mass`.
    """

    # `generation.memory` and `generation.cost` read these, too: what is asked for is predicted.

    window: int = 0
    window_mass: bool = False
    window_logits: bool = False
    raw_queries: bool = False
    scale_mass: bool = False
    total_mass: bool = False
    regroup_mass: bool = False
    query_variance: bool = False
    key_similarity: bool = False
    newest_mass: bool = False
    window_scores: bool = False
    keys: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Observation:
    """The facts on the device when a layer decides what to keep.

    The last axis K lists the candidates: the stored slots of the head in table order, then the
    tokens of the current scale (padded). What a policy does not ask for in `Needs` is None: all
    fields from `window` on, but for the static ones.

    live: nothing outside it may be kept.
    own: the token belongs to the current scale (True on its padding too).
    position: in the whole image (0 where not live).
    capacity: tokens that may stay (of the head's region, after this scale).
    regions: the region each head uses.
    inputs: slice of `Rule.inputs` for this scale and layer.
    state: what `Rule.update_state` returned for this layer, in `select` the newest value.

    window: the token is one of the window queries.
    window_mass, scale_mass: attention mass (rows of the attention matrix averaged over the window,
      over the scale); 0 outside `live`.
    window_logits: attention scores before the softmax averaged over the window; -inf outside
      `live`. With `Needs.raw_queries` the queries are x W_q / sqrt(H), without bias, normalisation,
      learned multiplier or rotation.
    total_mass: attention mass summed over all queries that saw the token, own scale included.
    query_variance: sum over keys of the variance over queries of their attention.
    key_similarity: -mean over heads and tokens of ||k - resized previous k||_2; -inf at scale 0.

    Models that draw token by token decide after each stage of P tokens. `scale` is then the stage
    (from 0), the last axis lists a head's image slots (P of the newest stage last); the condition
    always stays and is no candidate. `position` counts image tokens. Queries are the stage's: the
    window is its newest W, `scale_mass` the mean over all. Sums are taken as the tokens are drawn,
    so weights are normalised over what each query saw, the condition included.
    Where query heads share keys and values, N counts heads of keys and values, which are what stays
    or goes. Their G query heads have been joined: masses and `window_logits` are means over the
    group, `window_scores` the largest of the group's scores. So a `select` need not know of groups.
    local: heads that `Rule.regroup` found to be local; none before it has been asked, None where
      heads are not grouped.
    newest_mass: attention of the newest query, in `regroup` only, where K lists the slots of the
      condition too and `position` counts from its first token.
    group_mass: with `newest_mass`, the same for every query head of a group; None where heads have
      one query head.
    window_scores: attention scores of each window query before the softmax, in no order of queries.
    keys: as they are stored, rotated.
    implementation: static, the kernel that the user chose for operations of policies (`masks`), one
      of `pallas_kernels.implementations.NAMES`; None: each takes its best.
    by_position: static; of candidates with equal scores the newer stays, as slots hold tokens in no
      order. False, scale by scale: the earlier candidate stays.
    """

    # Plain facts, which cost nothing beyond what the cache step computes anyway.
    scale: Int[Array, ""]
    live: Bool[Array, "R N K"]
    position: Int[Array, "R N K"]
    capacity: Int[Array, "R N"]
    regions: Int[Array, "R N"]
    own: Bool[Array, " K"] | None = None
    inputs: PyTree[Array] = None
    state: PyTree[Array] = None

    # What policies ask for. A field that nobody asks for stays None, so that a policy which forgot
    # to ask fails while it is traced.
    window: Bool[Array, "R N K"] | None = None
    window_mass: Float[Array, "R N K"] | None = None
    window_logits: Float[Array, "R N K"] | None = None
    scale_mass: Float[Array, "R N K"] | None = None
    total_mass: Float[Array, "R N K"] | None = None
    query_variance: Float[Array, "R N"] | None = None
    key_similarity: Float[Array, " R"] | None = None
    local: Bool[Array, "R N"] | None = None
    window_scores: Float[Array, "R N W K"] | None = None
    keys: Float[Array, "R N K H"] | None = None
    newest_mass: Float[Array, "R N K"] | None = None
    group_mass: Float[Array, "R N G K"] | None = None
    implementation: str | None = field(default=None, metadata=dict(static=True))
    by_position: bool = field(default=False, metadata=dict(static=True))

    @property
    def precedence(self) -> Int[Array, "R N K"]:
        """Of candidates with equal scores the one with the higher number stays."""
        if self.by_position:
            return self.position
        return jnp.broadcast_to(-jnp.arange(self.live.shape[-1], dtype=jnp.int32), self.live.shape)
