"""Predicted and available memory, so that a batch that cannot fit is refused before anything is
compiled."""

import bisect
import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import implementations
from pallas_kernels.ragged_attention import reference
from varjax.cache import token_state
from varjax.cache.plan import CachePlan, item_size
from varjax.cache.state import KVState
from varjax.engine import program
from varjax.engine.segments import ARRAYS_PER_LOGIT, images_at_once
from varjax.errors import UserError
from varjax.model import Model
from varjax.nn import parameters
from varjax.parallel import sharding
from varjax.sequence import TOKENS

SCORE_ARRAYS = 3  # of attention without a kernel, at one time
SAFETY = 0.9  # share of the device's memory that predictions may fill


@dataclass(frozen=True)
class Prediction:
    """Bytes of one batch: weights, the cache (KV pool and what else it carries), what layers hold
    of the condition (keys and values of the text), and an estimate of activations (largest scale
    and image decoder)."""

    weights: int
    kv_pool: int
    activations: int
    condition: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_pool + self.activations + self.condition


def predict(
    model: Model,
    plan: CachePlan,
    batch_size: int,
    dtype,
    kv_dtype,
    *,
    kernels: bool | None = None,
    text_tokens: int | None = None,
    decode_batch: int | None = None,
    parts: int = 1,
) -> Prediction:
    """Predicted bytes of a batch. The pool is exact; activations are the live tensors of the widest
    step, counted from shapes. The codec is in float32.

    On a mesh: of one device, whose plan and images are given (`layout(...).groups[0]`).

    dtype, kv_dtype: of the transformer and of the pool.
    kernels: whether attention runs in a kernel, which has no scores and no gathered keys in memory;
      None: as on this machine by default.
    text_tokens: padded length of the text; None: the most that the model takes.
    decode_batch: images decoded at once; None: as `program.decode` chooses.
    parts: that heads and weights are divided into (`MeshSpec.model`).
    """
    if kernels is None:
        kernels = implementations.preferred() != "reference"
    config, rows = model.config, batch_size * plan.geometry.rows_per_image
    by_token = plan.geometry.kind == TOKENS
    # token by token the condition is the widest step, all its tokens at once
    tokens = config.condition_tokens if by_token else max(plan.geometry.schedule.tokens)
    layer = rows * tokens * (6 * config.embed_dim + 2 * config.hidden_dim) * item_size(dtype)
    layer += rows * tokens * config.embed_dim * (4 - item_size(dtype))  # a float32 residual stream
    keys = tokens + int(plan.capacity.max(initial=0))
    if by_token:
        layer += _token_attention(plan, rows, tokens, kv_dtype)
        logits = ARRAYS_PER_LOGIT * batch_size * config.logits_per_token * 4
    else:
        scores = 0 if kernels else _reference_attention(plan, rows, tokens, keys, kv_dtype)
        layer += max(scores, _window_scores(plan, rows, keys, kv_dtype))
        chosen = min(batch_size, images_at_once(tokens, config.logits_per_token))
        logits = ARRAYS_PER_LOGIT * chosen * tokens * config.logits_per_token * 4
        logits += rows * tokens * config.embed_dim * item_size(dtype)
    code_map = model.code_map[:2]
    decoded = decode_batch or program.decoder_batch(model.codec, code_map, batch_size)
    pixels = min(batch_size, decoded) * program.decoder_bytes(model.codec, code_map)
    empty = token_state.empty if by_token else KVState.empty
    cache = jax.eval_shape(lambda: empty(plan, batch_size, jnp.dtype(kv_dtype), dtype))
    weights = sharding.count({"transformer": model.transformer}, parts) * item_size(dtype)
    return Prediction(
        weights=weights + parameters.count(model.codec) * 4,
        kv_pool=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache)),
        activations=max(layer, logits, pixels),
        condition=config.condition_bytes(rows, item_size(dtype), text_tokens),
    )


def _reference_attention(plan: CachePlan, rows: int, tokens: int, keys: int, kv_dtype) -> int:
    """Bytes of the scores that exist at once, in three stages (XLA's CPU compiler keeps as many),
    and of keys and values gathered from the pool."""
    heads = plan.geometry.num_heads
    gathered = 2 * rows * heads * keys * 2 * plan.geometry.head_dim * item_size(kv_dtype)
    at_once = min(rows, reference.rows_at_once(heads, tokens, keys))
    return SCORE_ARRAYS * at_once * heads * tokens * keys * 4 + gathered


def _token_attention(plan: CachePlan, rows: int, condition: int, kv_dtype) -> int:
    """Bytes of scores of the condition with itself, or of one query of every head and those of the
    policy's window with the slots of a layer, whose keys the reference converts to float32."""
    heads, slots = plan.geometry.num_heads, max(plan.layer_slots)
    queries = 1 + plan.policy.stage_needs.window if plan.allocation.decides else 1
    whole = 4 * 2 * plan.geometry.head_dim if item_size(kv_dtype) < 4 else 0
    token = slots * (SCORE_ARRAYS * queries * 4 + whole)
    return rows * heads * max(SCORE_ARRAYS * condition * condition * 4, token)


def _window_scores(plan: CachePlan, rows: int, keys: int, kv_dtype) -> int:
    """Bytes of what a policy that looks through a window of queries is shown of a layer: the keys,
    gathered in the type of the pool, and float32 scores [R, N, W, K]. No kernel computes them
    (`pallas_kernels.ragged_attention.attention_scores`)."""
    window = plan.policy.needs.window
    per_key = plan.geometry.head_dim * item_size(kv_dtype) + 4 * window
    return rows * plan.geometry.num_heads * keys * per_key if window else 0


def available_bytes() -> int | None:
    """Memory that the default device can still give, or None if it does not say."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return _free_host_memory() if device.platform == "cpu" else None


def _free_host_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            entries = dict(line.split(":", 1) for line in file)
        return int(entries["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, AttributeError):
            return None


def largest_batch(predict_for, wanted: int, available: int | None) -> int:
    """The largest batch up to `wanted` whose prediction fits, found by bisection; 0 if not even one
    image fits."""
    if available is None:
        return wanted

    def too_large(size: int) -> bool:
        return predict_for(size).total > SAFETY * available

    return bisect.bisect_left(range(1, wanted + 1), True, key=too_large)


def choose_batch_size(predict_for, asked: int | None, num_images: int, usual: int) -> int:
    """The batch size of a run: as asked, or `usual` (at most the number of images), cut down to
    what fits.

    Raises:
      UserError: the batch asked for, or a single image, does not fit the device.
    """
    available = available_bytes()
    wanted = min(num_images, asked or usual)
    size = largest_batch(predict_for, wanted, available)
    if size >= wanted:
        return wanted
    if size and not asked:
        return size
    refused = wanted if asked else 1
    need, hint = predict_for(refused), "take a smaller budget or a device with more memory"
    if size:
        hint = f"the largest batch that fits is {size}"
    raise UserError(
        f"a batch of {refused} needs about {show_bytes(need.total)} (weights "
        f"{show_bytes(need.weights)}, KV pool {show_bytes(need.kv_pool)}, condition "
        f"{show_bytes(need.condition)}, activations {show_bytes(need.activations)}), but "
        f"{show_bytes(int(SAFETY * available))} are available: {hint}"
    )


def show_bytes(number: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"
