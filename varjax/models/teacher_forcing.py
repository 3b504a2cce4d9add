"""Logits of all tokens of an image at once, given the tokens: for training, for comparing with the
originals, and for learning what heads may forget. The layers are the steps of the transformers.

With gates, attention runs scale by scale: a gate in [0, 1] multiplies exp(score) of a key, for the
queries of one scale. Its logarithm is one more channel of the keys, beside a channel of ones of the
queries. So no mask of tokens by tokens exists, and any attention, also a fused one, gives gradients
with respect to gates. Where tokens are drawn one by one, keys have a channel for each stage, and
queries a one in that of their own.

Letters: as in `varjax.core.next_scale` and `varjax.core.next_token`; L tokens of all scales.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree

from varjax.core import layers, stacked
from varjax.core.next_scale import NextScaleTransformer
from varjax.core.next_token import NextTokenTransformer
from varjax.core.sampling import Sampling
from varjax.core.sequence import SCALES, TOKENS, Schedule
from varjax.core.step_inputs import StepInputs

# Of a layer with gates: products with weights are kept for its gradients, attention runs again.
again = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)
LEAST_GATE = 1e-30  # log 0 has no gradient; a key with this gate adds nothing to a float32 sum


@dataclass(frozen=True)
class Gates:
    """Gates of the attention of all scales; token by token, of all stages.

    values: [l, b, s, n, j] is for scale s and key j, at least for every key that is cached; B may
      be 1, for all images alike. Its own scale a query sees ungated. Token by token s is a stage,
      of which 0 is the condition, and j an image token; the condition is seen ungated. None: the
      full cache, which gates of one give, too, bit for bit; token by token but for rounding.
    attention: (queries, keys [R, N, T, H + 1], values [R, N, T, H], mask) -> [R, T, N, H].
    period: tokens of a stage.
    """

    values: Float[Array, "L B K N tokens"] | None = None
    attention: Callable[..., Array] = layers.dense_attention
    period: int = 1

    def attended(
        self,
        schedule: Schedule,
        gates: Float[Array, "B K N tokens"] | None,
        q: Float[Array, "R N T H"],
        k: Float[Array, "R N T H"],
        v: Float[Array, "R N T H"],
    ) -> Float[Array, "R T N H"]:
        """The attention of one layer, scale by scale. gates: its own."""
        q, parts = jnp.concatenate([q, jnp.ones_like(q[..., :1])], axis=-1), []
        for scale, (start, end) in enumerate(zip(schedule.starts, schedule.ends, strict=True)):
            logs = jnp.zeros((*k.shape[:2], end), jnp.float32)
            if gates is not None:
                older = jnp.log(jnp.maximum(gates[:, scale, :, :start], LEAST_GATE))
                # conditional rows come first, then the unconditional ones of the same images
                older = jnp.tile(older, (len(q) // len(gates), 1, 1))
                logs = logs.at[:, :, :start].set(older)
            keys = jnp.concatenate([k[:, :, :end], logs[..., None].astype(k.dtype)], axis=-1)
            parts.append(self.attention(q[:, :, start:end], keys, v[:, :, :end]))
        return jnp.concatenate(parts, axis=1)

    def attended_in_stages(
        self,
        condition: int,
        gates: Float[Array, "B K N tokens"] | None,
        q: Float[Array, "R Q T H"],
        k: Float[Array, "R N T H"],
        v: Float[Array, "R N T H"],
        mask: Bool[Array, "R 1 T T"],
    ) -> Float[Array, "R T Q H"]:
        """The attention of one layer where tokens are drawn one by one. condition: its tokens, the
        first ones. mask: of earlier tokens."""
        if gates is None:
            return self.attention(q, k, v, mask)
        count = q.shape[2] - condition
        stage = 1 + np.arange(count) // self.period
        later, before = np.arange(1, 1 + stage[-1]), ((condition, 0), (0, 0))
        older = jnp.log(jnp.maximum(jnp.moveaxis(gates[:, 1:, :, :count], 1, -1), LEAST_GATE))
        older = jnp.where(stage[:, None] < later, older, 0).astype(k.dtype)
        older = jnp.tile(jnp.pad(older, ((0, 0), (0, 0), *before)), (len(q) // len(gates), 1, 1, 1))
        own = jnp.pad(jnp.asarray(stage[:, None] == later, q.dtype), before)
        own = jnp.broadcast_to(own, (*q.shape[:3], later.size))
        q, k = jnp.concatenate([q, own], axis=-1), jnp.concatenate([k, older], axis=-1)
        return self.attention(q, k, v, mask)


def of_scales(
    transformer: NextScaleTransformer,
    context: dict,
    shared: PyTree,
    x: Float[Array, "R L D"],
) -> Float[Array, "R L V"]:
    """Logits of all scales at once under the block-causal mask."""
    x = through_layers(transformer, context, shared, x)
    return transformer.plain_logits(context["head"], x)


def through_layers(
    transformer: NextScaleTransformer,
    context: dict,
    shared: PyTree,
    x: Float[Array, "R L D"],
    gates: Gates | None = None,
) -> Float[Array, "R L D"]:
    """The residual stream of all scales after the last layer. With gates attention runs again for
    gradients."""
    schedule = transformer.config.schedule
    scale = schedule.scale_of_token
    mask = None if gates else jnp.asarray(scale[:, None] >= scale[None, :])

    def layer(x, inputs):
        block, (layer_context, values) = inputs
        projection, x = transformer.project(block, layer_context, shared, x)
        arrays = projection.queries(), projection.keys(), projection.values()
        if gates:
            attended = gates.attended(schedule, values, *arrays)
        else:
            attended = layers.dense_attention(*arrays, mask)
        return transformer.post_attention(block, layer_context, shared, x, attended)

    differentiated = again if gates else transformer.differentiated
    layer = differentiated(layer) if differentiated else layer
    inputs = (transformer.blocks, (context["layers"], gates and gates.values))
    return stacked.scan(layer, transformer.stream(x), inputs).settled()


# --- whole images, from tokens to guided logits --------------------------------------------------


def steps(transformer: NextScaleTransformer) -> list[StepInputs]:
    """The inputs of every scale, each without padding."""
    schedule, resampling = transformer.config.schedule, transformer.resampling
    found = [
        StepInputs.of(schedule, range(scale, scale + 1), tokens, resampling)
        for scale, tokens in enumerate(schedule.tokens)
    ]
    return [jax.tree.map(lambda a: jnp.asarray(a[0]), step) for step in found]


def seen_codes(networks: dict[str, nnx.Module], tokens: Integer[Array, "B L *bits"]) -> Array:
    """float32 [B, L, C]: the code map of earlier scales as every scale sees it, given the tokens of
    all."""
    transformer, codec = networks["transformer"], networks["codec"]
    code_map = jnp.zeros((len(tokens), *transformer.config.code_map), jnp.float32)
    seen, each = [], jnp.split(tokens, transformer.config.schedule.starts[1:], axis=1)
    for step, part in zip(steps(transformer), each, strict=True):
        seen.append(step.shrink(code_map))
        code_map = codec.accumulate(code_map, step.enlarge(codec.codes(part)), step.scale)
    return jnp.concatenate(seen, axis=1)


def guided_of_scales(
    transformer: NextScaleTransformer,
    condition: PyTree,
    codes: Float[Array, "B L C"],
    sampling: Sampling,
    gates: Gates | None = None,
) -> Float[Array, "B L *bits V"]:
    """Logits with temperature and guidance, before filters, of images whose tokens are given: what
    the engine draws from at every scale. codes: `seen_codes`. condition: of the images."""
    schedule, guided = transformer.config.schedule, transformer.config.is_guided(sampling)
    context = transformer.encode_condition(condition, guided=guided, implementation="reference")
    each, cut = steps(transformer), schedule.starts[1:]
    parts = zip(jnp.split(codes, cut, axis=1), each, strict=True)
    x = jnp.concatenate([transformer.embed(context, part, step) for part, step in parts], axis=1)
    # one step that stands for all: scales along an axis of tokens
    scale = jnp.asarray(schedule.scale_of_token[:, None], jnp.int32)
    index = jnp.arange(len(scale))
    every = replace(each[-1], scale=scale, token_index=index, cell=index)
    shared = transformer.scale_context(context, every, sampling)
    x = through_layers(transformer, context, shared, x, gates)
    parts = zip(jnp.split(x, cut, axis=1), each, strict=True)
    scores = [transformer.logits(context["head"], part, step, sampling) for part, step in parts]
    return jnp.concatenate([score.guided() for score in scores], axis=1)


def of_tokens(
    transformer: NextTokenTransformer,
    context: dict,
    tokens: Int[Array, "B T"],
    dropout: float = 0.0,
    key: Array | None = None,
) -> Float[Array, "R image_tokens V"]:
    """Plain logits of image tokens 0 to T, all at once, given tokens 0 to T - 1. dropout: the share
    of inputs, and of what branches add, that is set to zero."""
    x = through_token_layers(transformer, context, tokens, dropout, key)
    return transformer.plain_logits(x)


def through_token_layers(
    transformer: NextTokenTransformer,
    context: dict,
    tokens: Int[Array, "B T"],
    dropout: float = 0.0,
    key: Array | None = None,
    gates: Gates | None = None,
) -> Float[Array, "R image_tokens D"]:
    """The residual stream of `of_tokens` after the last layer. With gates attention runs again for
    gradients."""
    condition, visible = context["condition"], context["visible"]
    count, length = tokens.shape[1], visible.shape[1]
    mask = transformer.condition_mask(visible, count)
    rotation = transformer.rotation(context, jnp.arange(-length, count))

    def layer(x, inputs):
        block, key, values = inputs
        projection = transformer.project(block, rotation, x)
        arrays = projection.queries(), projection.keys(), projection.values()
        if gates:
            attended = gates.attended_in_stages(length, values, *arrays, mask)
        else:
            attended = layers.dense_attention(*arrays, mask)
        drop = functools.partial(dropped_out, rate=dropout, key=key)
        return transformer.post_attention(block, x, attended, drop)

    x = jnp.concatenate([condition, transformer.embed(context, tokens)], axis=1)
    keys = jax.random.split(jax.random.key(0) if key is None else key, 1 + transformer.config.depth)
    x = dropped_out(x, 0, rate=dropout, key=keys[0])
    differentiated = again if gates else transformer.differentiated
    layer = differentiated(layer) if differentiated else layer
    inputs = (transformer.blocks, keys[1:], gates and gates.values)
    return stacked.scan(layer, x, inputs)[:, length - 1 :]


def guided_of_tokens(
    transformer: NextTokenTransformer,
    condition: PyTree,
    tokens: Int[Array, "B L"],
    sampling: Sampling,
    gates: Gates | None = None,
) -> Float[Array, "B L V"]:
    """Logits with guidance, before temperature and filters, of images whose tokens are given: what
    the engine keeps of every token that it draws. condition: of the images."""
    guided, sequence = transformer.config.is_guided(sampling), transformer.sequence()
    context = transformer.encode_condition(condition, guided=guided)
    written = jnp.full((len(tokens), sequence.image_tokens), transformer.config.vocab_size)
    written = written.at[:, sequence.places].set(tokens)  # new lines between them
    x = through_token_layers(transformer, context, written[:, :-1], gates=gates)
    index = jnp.asarray(sequence.places)[:, None]
    scores = transformer.logits(x[:, sequence.places], index, sampling)
    return replace(scores, tau=None).guided()


def dropped_out(
    x: Float[Array, "*shape"], number: int, *, rate: float, key: Array
) -> Float[Array, "*shape"]:
    """Sets a share `rate` of `x` to zero at random places and enlarges the rest, so that the
    expected value stays. number: tells uses of the same key apart."""
    if not rate:
        return x
    kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)


def guided(
    transformer: NextScaleTransformer | NextTokenTransformer,
    condition: PyTree,
    given: Array,
    sampling: Sampling,
    gates: Gates | None = None,
) -> Float[Array, "B L *bits V"]:
    """`guided_of_scales` or `guided_of_tokens`, as the model draws. given: codes, or tokens."""
    of = {SCALES: guided_of_scales, TOKENS: guided_of_tokens}[transformer.sequence().kind]
    return of(transformer, condition, given, sampling, gates)
