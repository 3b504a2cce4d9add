"""The generation program of models that draw token by token: `lax.scan` over stages, `lax.scan`
over their tokens inside, one layer after the other.

    condition     causal, all its tokens at once; fills the first slots, gives the first image token
    stages        of P tokens each, after which every layer decides what stays
    last stage    of what is left: nothing has to be decided after it

So a program holds the body of a token twice (once where contents are known beforehand: that is one
stage), however many tokens there are. Layers have caches of their own and are not scanned: a scan
would copy every layer's weights and cache for every token.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from varjax.cache.stages import TokenPlan
from varjax.cache.token_state import LayerCache
from varjax.cache.token_step import CurrentToken, Heads, TokenStep, token_step
from varjax.engine.given import Given
from varjax.nn import stacked
from varjax.nn.layers import dense_attention
from varjax.nn.published import TransformerConfig
from varjax.sampling import Sampling
from varjax.sequence import TokenSequence


@dataclass(frozen=True)
class TokenSpec:
    """The static side of a program that draws token by token.

    layers: how each layer uses its cache. period: tokens of a stage; None: there is one stage.
    rows_per_image: 2 with guidance, else 1. one_slot: one slot stands for the condition.
    attention: implementation of the kernels; None takes what the platform has. keep_logits: also
      return guided logits.
    """

    sequence: TokenSequence
    layers: tuple[TokenStep, ...]
    period: int | None
    sampling: Sampling
    rows_per_image: int
    one_slot: bool = False
    attention: str | None = None
    keep_logits: bool = False

    few_rows = True  # products have the rows of one token

    @classmethod
    def of(
        cls,
        plan: TokenPlan,
        sampling: Sampling,
        config: TransformerConfig,
        attention: str | None = None,
        *,
        one_slot: bool = False,
        keep_logits: bool = False,
    ) -> "TokenSpec":
        """Return the static side for a plan. config: of the transformer.

        Raises:
          UserError: sampling that the model cannot do, or a plan for another number of rows.
        """
        return cls(
            sequence=plan.sequence,
            layers=tuple(token_step(plan, i, attention) for i in range(plan.geometry.num_layers)),
            period=None if plan.static_content else plan.allocation.period,
            sampling=sampling,
            rows_per_image=plan.check_rows(config, sampling),
            one_slot=one_slot,
            attention=attention,
            keep_logits=keep_logits,
        )

    def generate(self, networks, state, condition, keys, inputs, given):
        """`generate_codes` of this spec."""
        return generate_codes(networks, state, condition, keys, inputs, given, spec=self)

    @property
    def stages(self) -> tuple[int, int]:
        """How many stages end with a decision, and the tokens of the last one."""
        return (
            (0, self.sequence.steps) if self.period is None else self.sequence.stages(self.period)
        )


def generate_tokens(
    networks: Mapping[str, Any],
    state: tuple[LayerCache, ...],
    condition: Any,
    keys: Array,
    given: Given | None,
    inputs: tuple = (),
    *,
    spec: TokenSpec,
) -> tuple[dict[str, Array], tuple[LayerCache, ...]]:
    """Draw all tokens of a batch of images.

    Args:
      networks: "transformer" has the traced steps of `varjax.models.next_token`.
      state: empty caches (`token_state.empty`); donate them.
      condition: what `encode_condition` takes, for B images.
      keys: one typed random key per image [B].
      given: tokens that replace the draw, or None.
      inputs: of every layer, what its policy wants to know (`Rule.inputs`), or none.
      spec: static.

    Returns:
      {"tokens": int32 [B, N], "logits": float32 [B, N, V] if asked for} and the caches as they are
      after the last token that is read.
    """
    run = _Run(networks["transformer"], keys, given, spec, inputs)
    with jax.named_scope("condition"):
        x, state, bias = run.condition(condition, state)
        first = run.draw(x, jnp.int32(0))
        state = run.opened(state)
    decided, last = spec.stages
    # The caches travel in the carry of both scans, where XLA updates them in place.
    carry, parts = (first["tokens"], state), [jax.tree.map(lambda a: a[None], first)]

    def stage(carry, number):
        def token(carry, place):
            return run.step(carry, number * spec.period + place, place, bias)

        (tokens, state), drawn = jax.lax.scan(token, carry, jnp.arange(spec.period))
        with jax.named_scope("decide"):
            state = run.decide(state, number, bias)
        return (tokens, state), drawn

    def last_token(carry, token):
        return run.step(carry, token, None, bias)

    if decided:
        carry, drawn = jax.lax.scan(stage, carry, jnp.arange(decided))
        parts.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), drawn))
    rest = jnp.arange(spec.sequence.steps - last, spec.sequence.steps)
    carry, drawn = jax.lax.scan(last_token, carry, rest)
    parts.append(drawn)
    results = jax.tree.map(lambda *a: jnp.concatenate(a).swapaxes(0, 1)[:, :, 0], *parts)
    return results, run.closed(carry[1])


def generate_codes(
    networks: Mapping[str, Any], state, condition, keys, inputs: tuple, given, *, spec: TokenSpec
) -> tuple[dict[str, Array], tuple[LayerCache, ...]]:
    """`generate_tokens` with the arguments and results of `scales.generate_codes`: the codec's map
    of the codes, too."""
    results, state = generate_tokens(networks, state, condition, keys, given, inputs, spec=spec)
    with jax.named_scope("codes"):
        grid = networks["transformer"].config.grid
        code_map = networks["codec"].code_map(results["tokens"], grid)
    return {**results, "code_map": code_map}, state


class _Run:
    """The parts of a program, with what all of them share."""

    def __init__(self, transformer, keys: Array, given, spec: TokenSpec, inputs: tuple):
        self.transformer, self.keys, self.given, self.spec = transformer, keys, given, spec
        self.inputs = inputs or (None,) * len(spec.layers)
        self.context: dict[str, Any] = {}
        # one trace for layers that use their caches alike
        self._attend = {step: jax.jit(self._layer(step)) for step in spec.layers}
        self._decide = {step: jax.jit(step.decide) for step in spec.layers}

    def _block(self, layer: int) -> Any:
        return stacked.layer(self.transformer.blocks, layer)

    def condition(
        self, condition: Any, state: tuple[LayerCache, ...]
    ) -> tuple[Float[Array, "R 1 D"], tuple[LayerCache, ...], Float[Array, " R"] | None]:
        """The last token's hidden state, caches that hold the condition, and the bias of its first
        slot."""
        transformer, spec = self.transformer, self.spec
        self.context = transformer.encode_condition(condition, guided=spec.rows_per_image == 2)
        x, visible = self.context["condition"], self.context["visible"]
        rotation = transformer.rotation(self.context, jnp.arange(-visible.shape[1], 0))
        mask = transformer.condition_mask(visible)

        def layer(block, x, cache: LayerCache):
            p = transformer.project(block, rotation, x)
            q, k, v, bias, seen = p.queries(), p.keys(), p.values(), None, visible
            x = transformer.post_attention(block, x, dense_attention(q, k, v, mask))
            if spec.one_slot:
                k, v, bias = transformer.condition_slot(v, visible)
                seen = jnp.ones((len(v), 1), bool)
            return x, cache.with_condition(k, v, seen), bias

        layer, caches, bias = jax.jit(layer), [], None
        for index, cache in enumerate(state):
            x, cache, bias = layer(self._block(index), x, cache)
            caches.append(cache)
        return x[:, -1:], tuple(caches), bias

    def step(self, carry, token, place, bias) -> tuple[Any, dict[str, Array]]:
        """One image token through all layers, and the one after it."""
        tokens, state = carry
        transformer = self.transformer
        with jax.named_scope("embed"):
            x = transformer.embed(self.context, tokens)
            rotation = transformer.rotation(self.context, token[None])
        of_step = dict(zip(self.spec.layers, state, strict=True))  # layers that share one, once
        current = {step: step.current(cache, token, place) for step, cache in of_step.items()}
        caches = []
        for index, (step, cache) in enumerate(zip(self.spec.layers, state, strict=True)):
            arguments = (rotation, x, cache, current[step], bias)
            x, cache = self._attend[step](self._block(index), *arguments)
            caches.append(cache)
        drawn = self.draw(x, token + 1)
        return (drawn["tokens"], tuple(caches)), drawn

    def _layer(self, step: TokenStep) -> Callable:
        transformer = self.transformer

        def body(block, rotation, x, cache: LayerCache, current: CurrentToken, bias):
            with jax.named_scope("project"):
                p = transformer.project(block, rotation, x)
                heads = (a[:, :, 0] for a in (p.queries(), p.keys(), p.values()))
            with jax.named_scope("attend"):
                out, cache = step.attend(cache, Heads(*heads, bias), current)
            with jax.named_scope("post_attention"):
                return transformer.post_attention(block, x, out[:, None]), cache

        return body

    def opened(self, state: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        return tuple(step.opened(c) for step, c in zip(self.spec.layers, state, strict=True))

    def closed(self, state: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        newest = jnp.int32(self.spec.sequence.steps - 1)
        layers = zip(self.spec.layers, state, strict=True)
        return tuple(step.closed(cache, newest) for step, cache in layers)

    def decide(self, state: tuple[LayerCache, ...], stage, bias) -> tuple[LayerCache, ...]:
        """Layers that use their caches alike decide together."""
        steps, decided = self.spec.layers, []
        while len(decided) < len(state):
            first = len(decided)
            step, inputs = steps[first], self.inputs[first]
            most = 1 if inputs is not None else step.at_once(state[first])
            alike = itertools.takewhile(lambda s, step=step: s == step, steps[first:])
            chunk = state[first : first + len(list(alike)[:most])]
            decided += self._decide[step](chunk, stage, bias, inputs)
        return tuple(decided)

    def draw(self, x: Float[Array, "R 1 D"], index: Int[Array, ""]) -> dict[str, Array]:
        """Image token `index` [B, 1], and the guided logits that lead to it if they are kept."""
        transformer, spec = self.transformer, self.spec
        scores = transformer.logits(x, index, spec.sampling)
        keys = jax.vmap(lambda key: jax.random.fold_in(key, index))(self.keys)
        with jax.named_scope("sample"):
            tokens, _ = transformer.sample(scores, keys, spec.sampling, spec.attention)
        if self.given is not None:
            tokens = self.given.replace(tokens, index[None])
        kept = {"logits": scores.untempered().guided()} if spec.keep_logits else {}
        return {"tokens": tokens, **kept}
