"""The program that draws token by token. It scans over stages, inside over the tokens of a stage,
and runs one layer after the other.

    condition     causal, all its tokens at once; fills the first slots, gives the first image token
    stages        of P tokens each, after which every layer decides what stays
    last stage    the tokens that are left; nothing has to be decided after it

A program therefore holds the body of a token twice, however many tokens there are. It holds it once
where contents are known beforehand, because all tokens are then one stage. Layers have caches of
their own and are not scanned: a scan would copy every layer's weights and cache for every token.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from varjax.core import stacked
from varjax.core.given import Given
from varjax.core.layers import dense_attention
from varjax.core.next_token import NextTokenTransformer
from varjax.core.sampling import Sampling
from varjax.core.segments import Segment
from varjax.core.stages import TokenPlan
from varjax.core.token_state import LayerCache
from varjax.core.token_step import CurrentToken, Heads, OffsetStep, RingStep, StageStep, TokenStep
from varjax.core.transformer import Transformer


@dataclass(frozen=True)
class TokenSpec:
    """The static side of a program that draws token by token, and the program itself. Every layer
    has a cache of its own, whose slots follow from a token's number: no tables are shared.

    plan: of the cache.
    layers: how each layer uses its cache.
    attention: implementation of the kernels; None takes what the platform has.
    keep_logits, keep_contents: whether guided logits, or "contents", are among the results.
    watch: called on the host with an image token's number and the tokens [B, 1].
    """

    plan: TokenPlan
    layers: tuple[TokenStep, ...]
    sampling: Sampling
    attention: str | None = None
    keep_logits: bool = False
    keep_contents: bool = False
    watch: Callable[[Array, Array], None] | None = None

    segments: ClassVar[tuple[Segment, ...]] = ()

    def shared_inputs(self, transformer: Transformer) -> tuple:
        """Host arrays that are the same for every batch: none."""
        return ()

    def for_images(self, shared: tuple, image_index: np.ndarray) -> tuple:
        """For each layer what its policy knows beforehand about a batch of images."""
        found = self.plan.policy_inputs(image_index)
        return () if found is None else tuple(found)

    def generate(
        self,
        networks: Mapping[str, nnx.Module],
        state: tuple[LayerCache, ...],
        condition: PyTree,
        keys: Array,
        inputs: tuple,
        given: Given | None,
    ) -> tuple[dict[str, Array], tuple[LayerCache, ...]]:
        """Draws a batch of images, as `ScaleSpec.generate` does. The codec gives the code map.

        state: empty caches (`token_state.empty`).
        inputs: for every layer what its policy knows beforehand (`Rule.inputs`), or nothing.

        The tokens are int32 [B, N] without new lines, the logits float32 [B, N, V]; the caches are
        as they are after the last token that is read. contents: for every layer
        `LayerCache.position` after every decision, an axis of decisions in front.
        """
        # without decisions there is one stage
        period, decided = self.plan.allocation.decisions(self.plan.geometry) or (0, 0)
        steps = _TokenSteps(networks["transformer"], keys, given, self, inputs)
        with jax.named_scope("condition"):
            x, state, bias = steps.condition(condition, state)
            first = steps.draw(x, jnp.int32(0))
            state = tuple(step.opened(c) for step, c in zip(self.layers, state, strict=True))
        # The caches travel in the carry of both scans, where XLA updates them in place. As inputs
        # and outputs of a scan they would exist twice.
        carry = (first["tokens"], state)
        # Image token 0 comes from the condition. It gets an axis of steps, as outputs of scans.
        parts = [jax.tree.map(lambda a: a[None], first)]

        def stage(carry, number):
            def token(carry, place):
                return steps.step(carry, number * period + place, place, bias)

            (tokens, state), drawn = jax.lax.scan(token, carry, jnp.arange(period))
            # Outside the scan over tokens, so that no token pays for it: deciding within it would
            # take a `cond`, and one that returns the caches may copy them.
            with jax.named_scope("decide"):
                state = steps.decide(state, number, bias)
            held = [cache.position for cache in state] if self.keep_contents else []
            return (tokens, state), (drawn, held)

        contents = []
        if decided:
            carry, (drawn, contents) = jax.lax.scan(stage, carry, jnp.arange(decided))
            # [stages, P, ...] -> [tokens, ...]
            parts.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), drawn))
        # The last stage is shorter than the others, so it is traced on its own.
        count = self.plan.sequence.steps
        rest = jnp.arange(decided * period, count)
        carry, drawn = jax.lax.scan(
            lambda carry, token: steps.step(carry, token, None, bias), carry, rest
        )
        parts.append(drawn)
        # steps come first in outputs of scans, images first in results
        results = jax.tree.map(lambda *a: jnp.concatenate(a).swapaxes(0, 1)[:, :, 0], *parts)
        layers, newest = zip(self.layers, carry[1], strict=True), jnp.int32(count - 1)
        state = tuple(step.closed(cache, newest) for step, cache in layers)
        if self.plan.sequence.new_lines:
            results = jax.tree.map(lambda a: a[:, self.plan.sequence.places], results)
        with jax.named_scope("codes"):
            grid = networks["transformer"].config.grid
            code_map = networks["codec"].code_map(results["tokens"], grid)
        told = {"contents": contents} if self.keep_contents else {}
        return results | told | {"code_map": code_map}, state


class _TokenSteps:
    """The traced steps of a program that draws tokens, with what all of them share.

    context: what `encode_condition` returns, from the step `condition` on.
    """

    def __init__(
        self,
        transformer: NextTokenTransformer,
        keys: Array,
        given: Given | None,
        spec: TokenSpec,
        inputs: tuple,
    ):
        self.transformer, self.keys, self.given, self.spec = transformer, keys, given, spec
        self.inputs = inputs or (None,) * len(spec.layers)
        self.context: dict[str, Array] = {}
        self.layers = transformer.token_layers(spec.attention)
        # Layers are unrolled, but those that use their caches alike share one trace: `jit` finds it
        # by the function and the shapes.
        self._attend = {step: jax.jit(self._layer(step)) for step in spec.layers}
        deciding = (step for step in spec.layers if hasattr(step, "decide"))
        self._decide = {step: jax.jit(step.decide) for step in deciding}

    def condition(
        self, condition: PyTree, state: tuple[LayerCache, ...]
    ) -> tuple[Float[Array, "R 1 D"], tuple[LayerCache, ...], Float[Array, " R"] | None]:
        """Runs the condition through all layers. Returns the last token's hidden state, caches that
        hold the condition, and what is added to the score of the first slot."""
        transformer, spec = self.transformer, self.spec
        guided = spec.plan.geometry.rows_per_image == 2
        self.context = transformer.encode_condition(condition, guided=guided)
        x, visible = self.context["condition"], self.context["visible"]
        # The condition counts from -M to -1, so that the rotation of an image token does not depend
        # on the condition's length.
        rotation = transformer.rotation(self.context, jnp.arange(-visible.shape[1], 0))
        mask = transformer.condition_mask(visible)

        def layer(block, x, cache: LayerCache):
            p = transformer.project(block, rotation, x)
            q, k, v, bias, seen = p.queries(), p.keys(), p.values(), None, visible
            x = transformer.post_attention(block, x, dense_attention(q, k, v, mask))
            # the plan was made for fewer slots than the condition has tokens: one stands for all
            if spec.plan.sequence.condition < transformer.config.condition_tokens:
                # every query scores all tokens of such a condition alike, so one slot is exact
                k, v, bias = transformer.condition_slot(v, visible)
                seen = jnp.ones((len(v), 1), bool)
            return x, cache.with_condition(k, v, seen), bias

        # one trace for all layers, which have equal shapes
        layer, caches, bias = jax.jit(layer), [], None
        for index, cache in enumerate(state):
            x, cache, bias = layer(stacked.layer(transformer.blocks, index), x, cache)
            # Keys and values of a layer are stored before the next one begins. XLA for GPUs would
            # store them all at the end, and hold those of every layer until then.
            x, cache = jax.lax.optimization_barrier((x, cache))
            caches.append(cache)
        # only the last token leads to an image token
        return x[:, -1:], tuple(caches), bias

    def step(
        self,
        carry: tuple[Int[Array, "B 1"], tuple[LayerCache, ...]],
        token: Int[Array, ""],
        place: Int[Array, ""] | None,
        bias: Float[Array, " R"] | None,
    ) -> tuple[tuple[Int[Array, "B 1"], tuple[LayerCache, ...]], dict[str, Array]]:
        """Runs one image token through all layers, and draws the next one.

        carry: the tokens drawn last, and the caches.
        token: number of the token in the image.
        place: number of the token in its stage; None in the last stage.
        """
        tokens, state = carry
        transformer, layers = self.transformer, self.layers
        with jax.named_scope("embed"):
            x = transformer.embed(self.context, tokens)
            rotation = transformer.rotation(self.context, token[None])
            x, rotation = layers.start(x, rotation)
        # What layers with equal strategies share about a token (its slot, who is seen) is computed
        # once, from the cache of any of them.
        any_cache = dict(zip(self.spec.layers, state, strict=True))
        current = {step: step.current(cache, token, place) for step, cache in any_cache.items()}
        caches = []
        for index, (step, cache) in enumerate(zip(self.spec.layers, state, strict=True)):
            weights = layers.weights(index)
            x, cache = self._attend[step](weights, rotation, x, cache, current[step], bias)
            caches.append(cache)
        x = layers.settled(x, len(state[0].pool))
        # the output for a token leads to the next one; the last token is drawn and never run
        drawn = self.draw(x, token + 1)
        return (drawn["tokens"], tuple(caches)), drawn

    def _layer(self, step: TokenStep) -> Callable[..., tuple[Array, LayerCache]]:
        """The function of a layer whose cache is used in this way."""
        layers = self.layers

        def body(weights, rotation, x, cache: LayerCache, current: CurrentToken, bias):
            with jax.named_scope("project"):
                total = partial(step.summed, cache, current)
                heads, total = layers.project(weights, rotation, x, len(cache.pool), total)
            with jax.named_scope("attend"):
                out, cache = step.attend(cache, Heads(*heads, bias, total), current)
            with jax.named_scope("post_attention"):
                return layers.rest(weights, x, out), cache

        return body

    def decide(
        self, state: tuple[LayerCache, ...], stage: Int[Array, ""], bias: Float[Array, " R"] | None
    ) -> tuple[LayerCache, ...]:
        """Lets the policy decide what every layer keeps after a stage. Consecutive layers that use
        their caches alike decide together, as far as memory allows."""
        steps, decided = self.spec.layers, []
        while len(decided) < len(state):
            first = len(decided)
            step, inputs = steps[first], self.inputs[first]
            # inputs differ from layer to layer, so such layers decide one by one
            most = 1 if inputs is not None else step.at_once(state[first])
            alike = len(list(itertools.takewhile(lambda s, step=step: s == step, steps[first:])))
            # in parts of about equal size, each of which starts as many kernels as a larger one
            size = -(-alike // -(-alike // most))
            decided += self._decide[step](state[first : first + size], stage, bias, inputs)
        return tuple(decided)

    def draw(self, x: Float[Array, "R 1 D"], index: Int[Array, ""]) -> dict[str, Array]:
        """Draws image token `index` [B, 1]; beside it the guided logits, if they are kept."""
        sequence = self.spec.plan.sequence

        def new_line(x):
            """The token at the end of every line, without the head. Its logits are 0."""
            shapes = jax.eval_shape(lambda x: self._drawn(x, jnp.int32(0), jnp.int32(0)), x)
            nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            token = self.transformer.config.vocab_size
            return nothing | {"tokens": jnp.full_like(nothing["tokens"], token)}

        if sequence.new_lines:
            lines, place = jnp.divmod(index, sequence.line)
            # of a `cond` one branch runs: the head costs only where there is something to draw
            drawn = jax.lax.cond(
                place == sequence.line - 1,
                new_line,
                lambda x: self._drawn(x, index, index - lines),
                x,
            )
        else:
            drawn = self._drawn(x, index, index)
        if self.spec.watch is not None:
            jax.debug.callback(self.spec.watch, index, drawn["tokens"])
        return drawn

    def _drawn(
        self, x: Float[Array, "R 1 D"], index: Int[Array, ""], place: Int[Array, ""]
    ) -> dict[str, Array]:
        """Draws image token `index`. place: its number among those that are drawn."""
        transformer, spec = self.transformer, self.spec
        scores = transformer.logits(x, index, spec.sampling)
        # folding in the token's number, not its place in a stage: stages do not change results
        keys = jax.vmap(lambda key: jax.random.fold_in(key, index))(self.keys)
        with jax.named_scope("sample"):
            tokens, _ = transformer.sample(scores, keys, spec.sampling, spec.attention)
        if self.given is not None:
            tokens = self.given.replace(tokens, place[None])
        # the temperature may as well be applied after guidance
        kept = {"logits": replace(scores, tau=None).guided()} if spec.keep_logits else {}
        return {"tokens": tokens} | kept


def token_step(plan: TokenPlan, layer: int, attention: str | None) -> TokenStep:
    """The strategy of a layer. attention: implementation of the kernel."""
    allocation, condition = plan.allocation, plan.sequence.condition
    # layers with equal numbers get equal strategies, and share one trace of the program
    slots = int(allocation.slots[layer])
    if plan.static_content:
        ring = condition, slots, allocation.protected, attention
        if allocation.reads is None:
            return RingStep(*ring)
        return OffsetStep(*ring, rule=plan.rule, reads=int(allocation.reads[layer]))
    # the period is the same in all layers, what they keep may differ
    main = slots - allocation.period  # the buffer is part of what the budget pays for
    return StageStep(
        rule=plan.rule,
        condition=condition,
        main=main,
        period=allocation.period,
        positions=condition + plan.sequence.steps + allocation.period,
        kept=main if allocation.kept is None else int(allocation.kept[layer]),
        group_stage=allocation.group_stage,
        queries_per_head=plan.geometry.queries_per_head,
        attention=attention,
    )
