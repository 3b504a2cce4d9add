"""Every metric of the reports: what it is called, how it is shown, how it is computed.

Tables, plots, CSV columns, definitions and `report.json` follow this list. To add a metric, add an
entry; if it compares two results of the same image array by array, that is all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from varjax.metrics import logits, pixel


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How close a result is to that of the full cache on the same seeds.

    key: in files. name, label, column, title: in definitions, in the table of a run, as header of
      the table of a sweep, above a plot.
    unit: of the axis of a plot. better: "higher" or "lower". shown: format of a value in tables.
    definition: a sentence without its end; metrics that share one are explained together.
    needs: the array of a result that is compared: images float [N, H, W, 3] in [0, 1], tokens
      [N, ...], or forced_logits [N, L, ..., V], of a run that was forced to the full cache's
      tokens.
    compare: (arrays of the full cache, arrays of the other) -> float [N], or one number of two
      whole sets if not `per_image`: `fidelity`, which sees a batch at a time, leaves those out.
    largest: values count as at most this, in means and in JSON.
    from_zero: whether the axis of a plot starts there.
    """

    key: str
    name: str
    label: str
    column: str
    title: str
    unit: str
    better: str
    shown: str
    definition: str
    needs: str
    compare: Callable[[np.ndarray, np.ndarray], np.ndarray]
    per_image: bool = True
    largest: float = float("inf")
    from_zero: bool = False

    def show(self, value: float | str) -> str:
        """A value as tables have it; JSON holds infinite ones as text."""
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
        needs="images",
        compare=pixel.psnr,
        largest=100.0,  # identical images have an infinite one
    ),
    Metric(
        key="ssim",
        name="SSIM",
        label="SSIM to full cache",
        column="SSIM",
        title="SSIM to the full cache",
        unit="",
        better="higher",
        shown="{:.4f}",
        definition=_DRAWN,
        needs="images",
        compare=pixel.ssim,
    ),
    Metric(
        key="token_agreement",
        name="equal tokens",
        label="token agreement",
        column="equal tokens",
        title="equal tokens",
        unit="fraction",
        better="higher",
        shown="{:.1%}",
        definition=_DRAWN,
        needs="tokens",
        compare=pixel.token_agreement,
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
        compare=logits.image_kl,
        from_zero=True,
    ),
)
METRICS = {metric.key: metric for metric in _METRICS}


def definitions() -> dict[str, str]:
    """{names of metrics: how they are defined}."""
    names: dict[str, list[str]] = {}
    for metric in METRICS.values():
        names.setdefault(metric.definition, []).append(metric.name)
    return {", ".join(group): text for text, group in names.items()}
