"""Logits of all tokens of an image at once, given the tokens: for training, and for comparing with
the originals. The layers are the steps of the transformers, the attention is dense.

Letters: as in `varjax.core.next_scale` and `varjax.core.next_token`; L tokens of all scales.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from varjax.core import layers, stacked
from varjax.core.next_scale import NextScaleTransformer
from varjax.core.next_token import NextTokenTransformer


def of_scales(
    transformer: NextScaleTransformer, context: dict, shared: PyTree, x: Float[Array, "B L D"]
) -> Float[Array, "B L V"]:
    """Logits of all scales at once under the block-causal mask."""
    scale = transformer.config.schedule.scale_of_token
    mask = jnp.asarray(scale[:, None] >= scale[None, :])

    def layer(x, inputs):
        block, layer_context = inputs
        projection, x = transformer.project(block, layer_context, shared, x)
        q, k, v = projection.queries(), projection.keys(), projection.values()
        attended = layers.dense_attention(q, k, v, mask)
        return transformer.post_attention(block, layer_context, shared, x, attended)

    layer = transformer.differentiated(layer) if transformer.differentiated else layer
    x = stacked.scan(layer, transformer.stream(x), (transformer.blocks, context["layers"]))
    return transformer.plain_logits(context["head"], x.settled())


def of_tokens(
    transformer: NextTokenTransformer,
    context: dict,
    tokens: Int[Array, "B T"],
    dropout: float = 0.0,
    key: Array | None = None,
) -> Float[Array, "R image_tokens V"]:
    """Plain logits of image tokens 0 to T, all at once, given tokens 0 to T - 1. dropout: the share
    of inputs, and of what branches add, that is set to zero."""
    condition, visible = context["condition"], context["visible"]
    count, length = tokens.shape[1], visible.shape[1]
    mask = transformer.condition_mask(visible, count)
    rotation = transformer.rotation(context, jnp.arange(-length, count))

    def layer(x, inputs):
        block, key = inputs
        projection = transformer.project(block, rotation, x)
        q, k, v = projection.queries(), projection.keys(), projection.values()
        attended = layers.dense_attention(q, k, v, mask)
        drop = functools.partial(dropped_out, rate=dropout, key=key)
        return transformer.post_attention(block, x, attended, drop)

    x = jnp.concatenate([condition, transformer.embed(context, tokens)], axis=1)
    keys = jax.random.split(jax.random.key(0) if key is None else key, 1 + transformer.config.depth)
    x = dropped_out(x, 0, rate=dropout, key=keys[0])
    layer = transformer.differentiated(layer) if transformer.differentiated else layer
    x = stacked.scan(layer, x, (transformer.blocks, keys[1:]))
    return transformer.plain_logits(x[:, length - 1 :])


def dropped_out(
    x: Float[Array, "*shape"], number: int, *, rate: float, key: Array
) -> Float[Array, "*shape"]:
    """Sets a share `rate` of `x` to zero at random places and enlarges the rest, so that the
    expected value stays. number: tells uses of the same key apart."""
    if not rate:
        return x
    kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)
