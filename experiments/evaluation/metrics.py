"""Every metric of the reports: how it is computed, what it is called, how it is shown.

Tables, plots, CSV columns, definitions and `report.json` follow the dictionary `METRICS`. To add a
metric, add an entry: nothing else, if it compares two results of an image array by array.

Letters: N or B images, H and W pixels, C channels, L tokens, V vocabulary. Images are in [0, 1].
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from varjax.core.errors import UserError, show
from varjax.storage import own_modules
from varjax.storage.values import require

AnyArray = Array | np.ndarray
Images = Float[AnyArray, "N H W C"]
Tokens = Integer[AnyArray, "..."]
WINDOW = 11  # side of the Gaussian window of SSIM in pixels (Wang et al. 2004), deviation 1.5


def psnr(a: Images, b: Images) -> Float[np.ndarray, " N"]:
    """Peak signal-to-noise ratio of each pair in dB, for a peak of 1; infinite if identical."""
    pix = require("dm_pix", extra="eval", purpose="PSNR")
    return np.asarray(pix.psnr(*(jnp.asarray(x, jnp.float32) for x in (a, b))))


def ssim(a: Images, b: Images) -> Float[np.ndarray, " N"]:
    """Structural similarity of each pair, mean over channels and all full 11 x 11 windows.

    Images smaller than the window are compared with a window as wide as their shorter side.
    """
    a, b = (jnp.asarray(x, jnp.float32) for x in (a, b))
    pix = require("dm_pix", extra="eval", purpose="SSIM")
    return np.asarray(pix.ssim(a, b, filter_size=min(WINDOW, *a.shape[1:3])))


def token_agreement(a: Tokens, b: Tokens) -> Float[np.ndarray, " N"]:
    """Fraction of positions of each pair with equal tokens (or bits)."""
    return (np.asarray(a) == np.asarray(b)).reshape(len(a), -1).mean(1)


@jax.jit
def kl_divergence(
    reference: Float[AnyArray, "*tokens V"], other: Float[AnyArray, "*tokens V"]
) -> Float[Array, "*tokens"]:
    """KL(softmax(reference) || softmax(other)) of every token, in nats; never negative.

    Values are comparable only where both runs saw the same tokens before, which forced tokens
    ensure. Outcomes that the reference rules out (logit -inf) contribute nothing.
    """
    p, q = (jax.nn.log_softmax(x.astype(jnp.float32), axis=-1) for x in (reference, other))
    terms = jnp.where(jnp.isneginf(p), 0.0, jnp.exp(p) * (p - q))
    return jnp.maximum(terms.sum(-1), 0.0)


def image_kl(
    reference: Float[AnyArray, "B L *bits V"], other: Float[AnyArray, "B L *bits V"]
) -> Float[np.ndarray, " B"]:
    """Mean KL per token of each image in nats. A token of several bits counts the sum over them.
    Images come one at a time, so that temporaries belong to one image."""
    images, tokens, *_, choices = other.shape
    flat = (a.reshape(images, -1, choices) for a in (reference, other))
    pairs = zip(*flat, strict=True)
    found = np.stack([kl_divergence(jnp.asarray(a), jnp.asarray(b)) for a, b in pairs])
    return found.reshape(images, tokens, -1).sum(-1).mean(1)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that says how close a result is to that of the full cache on the same seeds.

    Attributes:
      key: what files call it.
      name: what definitions call it.
      label, column, title: what a run's table, a sweep's and the plot call it; default: its name.
      unit: the unit on the axis of its plot.
      better: "higher" or "lower".
      shown: the format of a value in tables.
      definition: a sentence without its end; metrics that share one are explained together.
      needs: the array of a result that is compared: images float [N, H, W, 3] in [0, 1], tokens [N,
        ...], or forced_logits [N, L, ..., V] with the full cache's tokens forced.
      compare: (array of the full cache, array of the other) -> float [N], for each image. None: a
        network computes it (`is_judged`).
      largest: a greater value counts as this one, in means and in JSON.
      from_zero: whether the axis of its plot starts at zero.
    """

    key: str
    name: str
    label: str = ""
    column: str = ""
    title: str = ""
    unit: str = ""
    better: str
    shown: str
    definition: str
    needs: str = "images"
    compare: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    largest: float = float("inf")
    from_zero: bool = False

    def __post_init__(self) -> None:
        for words in ("label", "column", "title"):
            object.__setattr__(self, words, getattr(self, words) or self.name)

    @property
    def is_judged(self) -> bool:
        return self.compare is None

    def show(self, value: float | str) -> str:
        """Formats a value for a table. Infinite values may be texts, as JSON holds them."""
        return self.shown.format(float(value))


_DRAWN = (
    "against the full cache on the same seeds, both drawn freely; mean over images (PSNR of "
    "identical images counts as 100 dB)"
)
_METRICS = (
    Metric(
        key="psnr",
        name="PSNR",
        label="PSNR to full cache",
        column="PSNR to full",
        title="PSNR to the full cache",
        unit="dB",
        better="higher",
        shown="{:.2f} dB",
        definition=_DRAWN,
        compare=psnr,
        largest=100.0,  # the PSNR of identical images is infinite
    ),
    Metric(
        key="ssim",
        name="SSIM",
        label="SSIM to full cache",
        title="SSIM to the full cache",
        better="higher",
        shown="{:.4f}",
        definition=_DRAWN,
        compare=ssim,
    ),
    Metric(
        key="token_agreement",
        name="equal tokens",
        label="token agreement",
        unit="fraction",
        better="higher",
        shown="{:.1%}",
        definition=_DRAWN,
        needs="tokens",
        compare=token_agreement,
        from_zero=True,
    ),
    Metric(
        key="kl",
        name="KL",
        label="KL to full cache",
        column="KL (nats)",
        title="KL to the full cache",
        unit="nats per token",
        better="lower",
        shown="{:.4g}",
        definition="KL(full cache || policy) of the next-token distributions after guidance, "
        "before top-k and top-p, with the full cache's tokens forced on both; mean over tokens and "
        "images, in nats",
        needs="forced_logits",
        compare=image_kl,
        from_zero=True,
    ),
    Metric(
        key="lpips",
        name="LPIPS",
        label="LPIPS to full cache",
        title="LPIPS to the full cache",
        better="lower",
        shown="{:.4f}",
        definition="perceptual distance (Zhang et al. 2018, version 0.1) of the pictures as bytes "
        "to those of the full cache, by the network that was given",
        from_zero=True,
    ),
    Metric(
        key="class_agreement",
        name="class agreement",
        unit="fraction",
        better="higher",
        shown="{:.1%}",
        definition="part of the images that a small classifier of the model's classes takes for "
        "the class they were asked for; comparable with nothing else",
    ),
    Metric(
        key="feature_distance",
        name="feature distance",
        label="feature distance to full cache",
        title="feature distance to the full cache",
        better="lower",
        shown="{:.4f}",
        definition="1 - cosine of that classifier's features of an image and of the full cache's; "
        "mean over images (no FID)",
        from_zero=True,
    ),
)
METRICS = {metric.key: metric for metric in _METRICS}


def register(metric: Metric) -> None:
    """Makes a metric of your own known: tables and reports of runs and sweeps show it from now on.
    `UserError` if it is no metric that compares pictures, or its key is taken or not allowed."""
    if not isinstance(metric, Metric) or not callable(metric.compare):
        raise UserError(f"{show(metric)} is no Metric with a function `compare` for each image")
    if not re.fullmatch("[a-z][a-z0-9]{0,39}", metric.key):
        raise UserError(f"metric {show(metric.key)}: give a key of 1 to 40 letters a-z and digits")
    if metric.key in METRICS:
        raise UserError(f"metric {metric.key!r} is known already: rename yours")
    if metric.needs not in ("images", "tokens"):
        raise UserError(f"metric {metric.key!r} needs {show(metric.needs)}: images or tokens")
    METRICS[metric.key] = metric


OWN = own_modules.Kind(
    "metric",
    (METRICS,),
    lambda metric: getattr(metric.compare, "__module__", ""),
    "call experiments.evaluation.metrics.register(Metric(...))",
)


def definitions(metrics: Iterable[Metric] | None = None) -> dict[str, str]:
    """{names of metrics: how they are defined}; None: all metrics."""
    names: dict[str, list[str]] = {}
    for metric in METRICS.values() if metrics is None else metrics:
        names.setdefault(metric.definition, []).append(metric.name)
    return {", ".join(group): text for text, group in names.items()}


# --- images drawn with a policy against those of the full cache on the same seeds -----------------


def compare_images(
    full: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Computes {metric: float [N]}, for metrics whose array both hold (`Metric.needs`)."""
    return {
        key: np.asarray(metric.compare(full[metric.needs], other[metric.needs]))
        for key, metric in METRICS.items()
        if not metric.is_judged and metric.needs in full and metric.needs in other
    }


def joined(batches: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def capped(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Per-image numbers of which those above `Metric.largest` count as it."""
    return {key: np.minimum(values, METRICS[key].largest) for key, values in arrays.items()}


def summarize(arrays: Mapping[str, np.ndarray]) -> dict:
    """Returns means over images, standard deviations (`*_std`), and how many are identical.

    arrays: per-image numbers by metric, psnr among them.
    """
    identical = int(np.isinf(arrays["psnr"]).sum())
    arrays = capped(arrays)
    found: dict = {key: float(values.mean()) for key, values in arrays.items()}
    found |= {f"{key}_std": float(values.std()) for key, values in arrays.items()}
    return found | {"identical_images": identical}
