"""Predicted and available memory, so that a batch that cannot fit is refused at once."""

import bisect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatchmethod

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import implementations
from pallas_kernels.ragged_attention import reference
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.core.scale_plan import ScalePlan
from varjax.core.segments import ARRAYS_PER_LOGIT, images_at_once
from varjax.core.stages import TokenPlan
from varjax.generation import cost
from varjax.generation import weights as sharded_weights
from varjax.generation.build import AUTO, SCAN, UNROLL
from varjax.generation.pixels import Decoding
from varjax.models.model import Model
from varjax.storage import parameters
from varjax.storage.published import TransformerConfig

SCORE_ARRAYS = 3  # of attention without a kernel, at one time
# Arrays of a layer that compilers keep at once beside the residual stream: as wide as the hidden
# layer of the feed-forward, and as wide as the model (docs/lab/compiled_memory.md). Separate layers
# keep one more of these.
LAYER_ARRAYS = {"cpu": (2, 5), "gpu": (1, 3), "tpu": (1, 3)}
# What a TPU keeps besides where layers attend to a text, for which it has no kernel: as wide as the
# model (other layouts, and holes between them), and stacked square matrices in another layout.
TEXT_ARRAYS, TEXT_MATRICES = 9, 3
SAFETY = 0.9  # share of the device's memory that predictions may fill


@dataclass(frozen=True)
class Prediction:
    """Bytes of one batch.

    weights: transformer and codec.
    kv_pool: the cache: the KV pool and what else it carries.
    activations: estimate for the widest step, or for the image decoder if that takes more than the
      step, the cache and the condition, which are gone by then.
    condition: what layers hold of the condition (keys and values of a text).
    """

    weights: int
    kv_pool: int
    activations: int
    condition: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_pool + self.activations + self.condition

    def __str__(self) -> str:
        return (
            f"about {show_bytes(self.total)} (weights {show_bytes(self.weights)}, KV pool "
            f"{show_bytes(self.kv_pool)}, condition {show_bytes(self.condition)}, activations "
            f"{show_bytes(self.activations)})"
        )


def predict(
    model: Model,
    plan: CachePlan,
    batch_size: int,
    dtype,
    kv_dtype,
    *,
    kernels: bool | None = None,
    text_tokens: int | None = None,
    decoding: Decoding | None = None,
    platform: str | None = None,
    layers: str = AUTO,
) -> Prediction:
    """Predict the bytes of a batch. The pool is exact. Activations are the live tensors of the
    widest step, counted from shapes. The codec is in float32.

    On a mesh the prediction is for one device: give its plan (`CachePlan.divide`) and its images.

    dtype, kv_dtype: types of the transformer and of the pool.
    kernels: whether attention runs in a kernel, which has no scores and no gathered keys in memory;
      None: as on this machine by default.
    text_tokens: padded length of the text; None: the most that the model takes.
    decoding: how pixels are decoded; None: in float32, as many at once as it allows.
    platform: "cpu", "gpu" or "tpu", whose compilers differ; None: that of this machine.
    layers: as `build.arrange_layers` takes it. "auto" counts a scan, which it takes where
      separate layers do not fit (`layers_that_fit`).
    """
    platform = platform or jax.default_backend()
    if kernels is None:
        kernels = implementations.preferred() != "reference"
    types = jnp.dtype(dtype), jnp.dtype(kv_dtype)
    step = _WidestStep(plan, model.config, batch_size, *types, kernels, platform, layers == UNROLL)
    code_map = model.code_map[:2]
    decoding = decoding or Decoding()
    decoded = decoding.images_at_once(model.codec, code_map, batch_size)
    pixels = decoded * decoding.image_bytes(model.codec, code_map)
    # the shapes of the very arrays that a run makes: exact, and nothing is allocated
    cache = jax.eval_shape(lambda: plan.empty_state(batch_size, jnp.dtype(kv_dtype), dtype))
    # a divided plan has the heads of one device, which says how many devices share the weights
    parts = model.config.num_heads // plan.geometry.num_heads
    shapes = {"transformer": parameters.shapes(model.transformer, dtype)}
    held = cost.tree_bytes(cache)
    condition = model.config.condition_bytes(step.rows, types[0].itemsize, text_tokens)
    return Prediction(
        weights=sharded_weights.bytes_per_device(shapes, parts) + parameters.count(model.codec) * 4,
        kv_pool=held,
        # pixels are decoded after the last step, where the cache and the condition were
        activations=max(step.bytes(plan), pixels - held - condition),
        condition=condition,
    )


@dataclass(frozen=True)
class _WidestStep:
    """The tensors that are live in a program's widest step, from arguments of `predict`. separate:
    whether every layer is a body of its own."""

    plan: CachePlan
    config: TransformerConfig
    batch_size: int
    dtype: np.dtype
    kv_dtype: np.dtype
    kernels: bool
    platform: str
    separate: bool

    @property
    def rows(self) -> int:
        return self.batch_size * self.plan.geometry.rows_per_image

    def layer(self, tokens: int) -> int:
        """Bytes of a layer's tensors without attention: what products read and write, and the
        residual stream, which is float32."""
        hidden, wide = LAYER_ARRAYS[self.platform]
        width, item, matrices = self.config.embed_dim, self.dtype.itemsize, 0
        if self.platform == "tpu" and self.config.condition == "text":
            wide, matrices = wide + TEXT_ARRAYS, TEXT_MATRICES * self.config.depth * width**2
        products = hidden * self.config.hidden_dim + (wide + self.separate) * width
        return self.rows * tokens * (products * item + width * 4) + matrices * item

    def logits(self, images: int, tokens: int) -> int:
        """Bytes of logits and of what sampling makes of them."""
        return ARRAYS_PER_LOGIT * images * tokens * self.config.logits_per_token * 4

    @singledispatchmethod
    def bytes(self, plan: ScalePlan) -> int:
        """Bytes of the scale with most tokens."""
        config, tokens = self.config, max(plan.geometry.schedule.tokens)
        attention = self._scale_attention(plan, tokens)
        # images whose logits exist at one time: sampling takes a batch in chunks
        chosen = min(self.batch_size, images_at_once(tokens, config.logits_per_token))
        # All rows of the head's input stay alive while logits are made for a few images at a time.
        last = self.rows * tokens * config.embed_dim * self.dtype.itemsize
        return max(self.layer(tokens) + attention, self.logits(chosen, tokens) + last)

    @bytes.register
    def _(self, plan: TokenPlan) -> int:
        """Bytes of the wider of two steps: the condition, all its tokens at once; or a query of
        every head, and the policy's window, with all slots of a layer."""
        condition, g = self.config.condition_tokens, plan.geometry
        queries = 1 + plan.rule.needs.window if plan.allocation.decides else 1
        # the reference converts keys and values to float32
        whole = 4 * 2 * g.head_dim if self.kv_dtype.itemsize < 4 else 0
        scores = SCORE_ARRAYS * g.queries_per_head * 4  # of a query of every head with one slot
        # one query of the token and the window's queries score all slots of a layer
        token = max(plan.layer_slots) * (scores * queries + whole)
        attention = self.rows * g.num_heads * max(scores * condition**2, token)
        return max(self.layer(condition) + attention, self.logits(self.batch_size, 1))

    def _scale_attention(self, plan: ScalePlan, tokens: int) -> int:
        keys = tokens + int(plan.capacity.max(initial=0))
        heads, size = plan.geometry.num_heads, plan.geometry.head_dim * self.kv_dtype.itemsize
        scores = 0
        if not self.kernels:
            # Scores exist in several stages at once: XLA's CPU compiler keeps `SCORE_ARRAYS` of
            # them. The reference takes so many rows at a time that they stay small.
            at_once = min(self.rows, reference.rows_at_once(heads, tokens, keys))
            scores = SCORE_ARRAYS * at_once * heads * tokens * keys * 4
            scores += 2 * self.rows * heads * keys * 2 * size  # gathered from the pool
        # What a policy with a window of queries is shown: a layer's keys, gathered in the type of
        # the pool, and float32 scores [R, N, W, K]. No kernel computes them
        # (`pallas_kernels.ragged_attention.attention_scores`).
        window = plan.rule.needs.window
        shown = self.rows * heads * keys * (size + 4 * window) if window else 0
        # The policy looks after the attention is done, so the two do not add up.
        return max(scores, shown)


def layers_that_fit(how: str, predict_for: Callable[..., Prediction], memory: int | None) -> str:
    """Arrangement of the layers: the one asked for, but with "auto" a scan where separate layers
    are predicted not to fit and a scan is.

    how: as `build.arrange_layers` takes it. predict_for: takes `layers`. memory: bytes of the
      device; None: it does not say.
    """
    if how != AUTO or memory is None:
        return how
    separate, scan = (predict_for(layers=layers).total for layers in (UNROLL, SCAN))
    return SCAN if scan <= SAFETY * memory < separate else AUTO


def device_bytes() -> int | None:
    """Bytes of the default device that programs may fill, or None if it does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def available_bytes() -> int | None:
    """Return how much memory the default device can still give, or None if it does not say."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}  # None on a CPU
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if device.platform != "cpu" or not os.path.exists("/proc/meminfo"):
        return None
    # what Linux could give after dropping caches
    with open("/proc/meminfo", encoding="ascii") as file:
        entries = dict(line.split(":", 1) for line in file)
    return int(entries["MemAvailable"].split()[0]) * 1024


def largest_batch(
    predict_for: Callable[[int], Prediction], wanted: int, available: int | None
) -> int:
    """Find the largest batch up to `wanted` whose prediction fits, by bisection; 0 if not even one
    image fits. predict_for: from a number of images."""
    if available is None:
        return wanted
    # predictions grow with the batch, so the sizes that fit come first
    sizes, room = range(1, wanted + 1), SAFETY * available
    return bisect.bisect_left(sizes, True, key=lambda size: predict_for(size).total > room)


def choose_batch_size(
    predict_for: Callable[[int], Prediction], asked: int | None, num_images: int, usual: int
) -> int:
    """Choose the batch size of a run: as asked, else `usual` cut down to what fits, and never more
    than the number of images. `UserError` if the batch asked for, or a single image, does not fit
    the device."""
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
        f"a batch of {refused} needs {need}, but {show_bytes(int(SAFETY * available))} are "
        f"available: {hint}"
    )


def show_bytes(number: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"
