"""Choosing tokens from logits: guidance, filters, sampling.

What is drawn for an image depends on its own key only, never on the batch.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.sample import sample as choose
from pallas_kernels.sample.reference import filter_logits, guided
from varjax.core import arguments
from varjax.core.errors import UserError, show

AnyArray = Array | np.ndarray
LARGEST_CFG = 1e6  # far beyond use; guided logits must stay float32 numbers
SMALLEST_TAU = 1e-4
LISTS = ("cfg", "tau", "cfg_insertion_layer")  # one number or several
KEYS = "threefry2x32"  # whatever JAX's default is
SMOOTH_KEY = 1  # folded into a scale's key for the noise of `more_smooth`


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The way in which tokens are drawn.

    cfg: guidance strength, one number or one per scale; what it multiplies is the model's own
      convention. VAR: scale k of K uses t = cfg * k / (K - 1) in (1 + t) * cond - t * uncond.
      All others: cfg * cond + (1 - cfg) * uncond; LlamaGen does not guide where cfg is at most 1.
    tau: temperature, one number or one per scale; logits are divided by it before guidance.
    cfg_insertion_layer: where the conditional and unconditional rows are mixed: 0 on the logits, -k
      after layer depth - k (Infinity).
    cfg_interval: n >= 0 ends guidance after image token n + 1, counted from 0; -1 guides all of
      them (LlamaGen).
    top_k: keep the k largest logits (ties at the k-th survive); 0 is off.
    top_p: nucleus; drop the smallest probabilities while their sum is at most 1 - p; 0 is off.
    greedy: take the largest guided logit; filters and keys do not matter.
    more_smooth: feed back a mixture of codes (Gumbel softmax) instead of the drawn code: smoother
      pictures, not for metrics (VAR).
    """

    cfg: float | tuple[float, ...] = 1.5
    tau: float | tuple[float, ...] = 1.0
    cfg_insertion_layer: tuple[int, ...] = (0,)
    cfg_interval: int = -1
    top_k: int = 0
    top_p: float = 0.0
    greedy: bool = False
    more_smooth: bool = False

    def __post_init__(self):
        for name in LISTS:
            value = getattr(self, name)
            if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim):
                # as JSON has it; hashable as a tuple
                object.__setattr__(self, name, tuple(value))

    def check(self, num_scales: int, vocab_size: int | None = None) -> "Sampling":
        """Returns self. `UserError` for values that cannot work, whatever type they have.

        vocab_size: the most that `top_k` may keep. None: `top_k` may be any number; one that is too
          large keeps everything.
        """
        for name, low, words in (
            ("cfg", 0, "guidance strength is a finite number"),
            ("tau", SMALLEST_TAU, "the temperature is a finite number (greedy: the largest logit)"),
        ):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != num_scales:
                raise UserError(
                    f"{name} lists {len(value)} numbers, the schedule has {num_scales} scales: "
                    f"give one number, or one for each scale"
                )
            for one in self.per_scale(name, num_scales):
                if not low <= arguments.real(name, one) <= LARGEST_CFG:
                    raise UserError(
                        f"{name}={one:g}: {words}, at least {low:g}, at most {LARGEST_CFG:g}"
                    )
        if not isinstance(self.cfg_insertion_layer, tuple) or not self.cfg_insertion_layer:
            raise UserError(
                f"cfg_insertion_layer={show(self.cfg_insertion_layer)}: give a list of places, as "
                f"0 (on the logits) or 0,-5"
            )
        for place in self.cfg_insertion_layer:
            arguments.integer("cfg_insertion_layer", place)
        arguments.integer("top_k", self.top_k, 0, 2**31 - 1 if vocab_size is None else vocab_size)
        arguments.number("top_p", self.top_p, 0, 1, note="; 0 switches it off")
        arguments.integer("cfg_interval", self.cfg_interval, -1, 2**31 - 2)
        for name in ("greedy", "more_smooth"):
            arguments.flag(name, getattr(self, name))
        return self

    def check_no_interval(self, model: str) -> None:
        """Raises `UserError` if guidance ends before the last token, which only models that draw
        token by token know."""
        if self.cfg_interval != -1:
            raise UserError(
                f"cfg_interval={show(self.cfg_interval)}: {model} draws whole scales, whose cfg may"
                " be listed one by one; leave it out"
            )

    def per_scale(self, name: str, num_scales: int) -> tuple[float, ...]:
        """`cfg` or `tau` of every scale."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * num_scales

    def at(self, name: str, scale: Int[Array, "..."], num_scales: int) -> Float[Array, "..."]:
        """`cfg` or `tau` of a scale, or of several, traced."""
        return jnp.asarray(self.per_scale(name, num_scales), jnp.float32)[scale]

    @property
    def guidance(self) -> float | str:
        """The guidance as records have it. A number if one strength acts on the logits of all
        tokens; else a text with the strengths, the places and the interval."""
        strengths = self.cfg if isinstance(self.cfg, tuple) else (self.cfg,)
        on_logits = self.cfg_insertion_layer == (0,)
        if on_logits and len(set(strengths)) == 1 and self.cfg_interval < 0:
            return float(strengths[0])
        places = "" if on_logits else f" at {','.join(map(str, self.cfg_insertion_layer))}"
        until = "" if self.cfg_interval < 0 else f" to token {self.cfg_interval + 1}"
        return ",".join(f"{strength:g}" for strength in strengths) + places + until


def check_seed(seed: int, runs: int = 1, *, name: str = "seed") -> int:
    """The seed of all random numbers. `UserError` unless it is 0 to 2**31 - 1: other numbers would
    wrap around. runs: how many seeds are used, this one and those that follow it."""
    return arguments.integer(name, seed, 0, 2**31 - runs)


def check_seeds(seed: int | np.ndarray, images: int) -> int | np.ndarray:
    """A seed for all images, or one for each, checked as `check_seed` does."""
    if not isinstance(seed, (np.ndarray, list, tuple)):
        return check_seed(seed)
    seeds = arguments.integers("seed", seed, "give one for each image, or one for all", images)
    if len(seeds) != images:
        raise UserError(f"{len(seeds)} seeds for a batch of {images} images: give one for each")
    return np.array([check_seed(value) for value in seeds], np.int32)


@dataclass(frozen=True)
class Scores:
    """Logits of all rows as a head gives them, before temperature and guidance.

    tau: the temperature; None: 1.
    strength: t in (1 + t) * cond - t * uncond; None: there are no unconditional rows.
    """

    plain: Float[Array, "R T ..."]
    tau: Float[Array, ""] | None = None
    strength: Float[Array, "..."] | None = None

    def guided(self) -> Float[Array, "B T ..."]:
        return guided(self.plain, self.tau, self.strength)


def gumbel(keys: Array, length: int, vocabulary: int) -> Float[Array, "B T V"]:
    """Gumbel noise per image. Entry (t, v) does not depend on the padded length of segments."""
    # the mode that JAX has by itself
    draw = partial(jax.random.gumbel, shape=(length, vocabulary), dtype=jnp.float32, mode="low")
    return jax.vmap(draw)(keys)


def sample(
    scores: Scores, keys: Array, sampling: Sampling, implementation: str | None = None
) -> tuple[Int[Array, "B T"], Float[Array, "B T V"] | None]:
    """Tokens drawn with one key per image, and the logits that they were drawn from. These exist
    only if `greedy` or `more_smooth`, else None: the kernel never writes them to memory.

    implementation: name of the kernel; None takes what the platform has.
    """
    if sampling.greedy:
        logits = scores.guided()
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits
    noise = gumbel(keys, *scores.plain.shape[1:])
    if sampling.more_smooth:
        logits = filter_logits(scores.guided(), sampling.top_k, sampling.top_p)
        return choose(logits, noise, implementation="reference"), logits
    options = dict(tau=scores.tau, strength=scores.strength, implementation=implementation)
    filters = dict(top_k=sampling.top_k, top_p=sampling.top_p)
    return choose(scores.plain, noise, **filters, **options), None


def smooth_codes(
    logits: Float[Array, "B T V"],
    keys: Array,
    ratio: Float[Array, ""],
    codebook: Float[Array, "V C"],
) -> Float[Array, "B T C"]:
    """Mixture of codes for `more_smooth`: Gumbel softmax of (1 + ratio) * logits. ratio: k / (K -
    1) of the scale; the temperature falls with it."""
    temperature = jnp.maximum(0.27 * (1 - 0.95 * ratio), 0.005)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, SMOOTH_KEY))(keys)
    noisy = logits * (1 + ratio) + gumbel(keys, *logits.shape[1:])
    weights = jax.nn.softmax(noisy / temperature, axis=-1)
    return jnp.einsum("btv,vc->btc", weights, codebook, precision=jax.lax.Precision.HIGHEST)


@jax.jit  # one small program, where calling the functions would compile one for each
def image_keys(seed: int | Int[AnyArray, "*images"], image_index: Int[Array, " B"]) -> Array:
    """One typed key per image: the image's index folded into the seed. seed: one for all images, or
    one for each."""
    seeds = jnp.broadcast_to(jnp.asarray(seed, jnp.int32), image_index.shape)
    return jax.vmap(lambda s, i: jax.random.fold_in(jax.random.key(s, impl=KEYS), i))(
        seeds, image_index
    )
