"""Drawing tokens with a dense cache that grows: one compiled prefill, one compiled step. It asks of
a model what the engine asks, in the same order, and keeps everything; so it is also what the engine
is compared with."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from varjax.models.next_token import NextTokenTransformer
from varjax.nn import stacked
from varjax.sampling import Sampling


@dataclass
class Drawn:
    """tokens [B, L]; plain logits [R, L, V] and guided ones [B, L, V] before temperature; keys,
    values [layers, R, N, slots, H] of all that was stored: the condition, tokens 0 to L - 2."""

    tokens: np.ndarray
    plain: np.ndarray
    guided: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def draw(
    transformer: NextTokenTransformer,
    condition,
    sampling: Sampling,
    *,
    keys=None,
    given: np.ndarray | None = None,
    one_slot: bool = False,
) -> Drawn:
    """All tokens of some images. keys: one per image, unless greedy; given: tokens [B, L] to take
    instead of the drawn ones; one_slot: the condition takes one slot of the cache."""
    guided = transformer.config.is_guided(sampling)
    transformer = nnx.merge(*nnx.split(transformer))
    stacked.separate(transformer.blocks, transformer.once)
    graph, weights = nnx.split(transformer)
    prefill, step = _programs(graph, sampling, guided, one_slot)
    context, cache, scores, found = prefill(weights, condition, keys)
    tokens, kept = [], []
    places = transformer.sequence().places
    for index in range(transformer.config.image_tokens):
        tokens.append(np.asarray(found) if given is None else given[:, index : index + 1])
        if index not in places:  # a new line
            tokens[-1] = np.full_like(tokens[-1], transformer.config.vocab_size)
        kept.append(jax.device_get(scores))
        if index + 1 < transformer.config.image_tokens:
            cache, scores, found = step(weights, context, cache, tokens[-1], index, keys)
    plain, mixed = (np.concatenate(part, axis=1) for part in zip(*kept, strict=True))
    stored = tuple(np.stack([c[i] for c in cache["layers"]]) for i in range(2))
    return Drawn(np.concatenate(tokens, axis=1), plain, mixed, *stored)


@functools.lru_cache(maxsize=1)
def _programs(graph, sampling: Sampling, guided: bool, one_slot: bool) -> tuple[Callable, Callable]:
    def prefill(weights, condition, keys):
        model = nnx.merge(graph, weights)
        context = model.encode_condition(condition, guided=guided)
        x, visible = context["condition"], context["visible"]
        rotation = model.rotation(context, jnp.arange(-x.shape[1], 0))
        mask, layers = model.condition_mask(visible), []
        for number in range(model.config.depth):
            block = stacked.layer(model.blocks, number)
            p = model.project(block, rotation, x)
            k, v = p.keys(), p.values()
            x = model.post_attention(
                block, x, attend(p.queries(), k, v, jnp.where(mask, 0, -jnp.inf))
            )
            layers.append(model.condition_slot(v, visible)[:2] if one_slot else (k, v))
        bias = jnp.where(visible, 0.0, -jnp.inf)
        if one_slot:
            bias = model.condition_slot(v, visible)[2][:, None]
        room = model.config.image_tokens - 1
        layers = [tuple(_padded(a, 2, room) for a in pair) for pair in layers]
        cache = {"layers": layers, "bias": _padded(bias, 1, room, -jnp.inf)}
        return context, cache, *choose(model, x[:, -1:], jnp.int32(0), keys)

    def step(weights, context, cache, token, index, keys):
        model = nnx.merge(graph, weights)
        x = model.embed(context, token)
        rotation = model.rotation(context, index[None])
        slot = cache["bias"].shape[1] - (model.config.image_tokens - 1) + index
        bias, layers = cache["bias"].at[:, slot].set(0), []
        for number, (k, v) in enumerate(cache["layers"]):
            block = stacked.layer(model.blocks, number)
            p = model.project(block, rotation, x)
            k, v = (
                k.at[:, :, slot].set(p.keys()[:, :, 0]),
                v.at[:, :, slot].set(p.values()[:, :, 0]),
            )
            x = model.post_attention(block, x, attend(p.queries(), k, v, bias[:, None, None]))
            layers.append((k, v))
        return {"layers": layers, "bias": bias}, *choose(model, x, index + 1, keys)

    def choose(model, x, index, keys):
        scores = model.logits(x, index, sampling)
        own = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, index))(keys)
        token, _ = model.sample(scores, own, sampling)
        return (scores.plain, scores.untempered().guided()), token

    return jax.jit(prefill), jax.jit(step, donate_argnums=2)


def attend(q, k, v, bias):
    """Softmax attention [R, T, N, H]; bias [R, 1, T, K] is added to the scores."""
    chex.assert_equal_shape([k, v])
    groups = q.shape[1] // k.shape[1]  # query heads that share a head of keys
    k, v = (jnp.repeat(a, groups, axis=1) for a in (k, v))
    scores = jnp.einsum("rnth,rnkh->rntk", q, k, preferred_element_type=jnp.float32) + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("rntk,rnkh->rnth", weights, v).transpose(0, 2, 1, 3)


def _padded(array, axis: int, count: int, value: float = 0.0):
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, count)
    return jnp.pad(array, widths, constant_values=value)
