"""What the page says and shows about a picture: a line while it is drawn, what it cost, how near it
is to that of the full cache."""

import html

import gradio as gr
import numpy as np

from experiments.serve.batcher import Closed, QueueFull
from experiments.serve.studio import Choice, Drawn, Preview, Waiting
from varjax import metrics
from varjax.engine.memory import show_bytes
from varjax.errors import UserError

SHOWN = 384  # pixels of a picture on the page: small ones are enlarged without smoothing


def large(picture: np.ndarray) -> np.ndarray:
    """A small picture enlarged without smoothing, so that its pixels can be compared."""
    times = max(1, SHOWN // max(picture.shape[:2]))
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def line(choice: Choice, seed: int, seen: Waiting | Preview | Drawn) -> str:
    """What is going on."""
    words = "drawn" if isinstance(seen, Drawn) else seen.words
    part = f" ({seen.part:.0%})" if isinstance(seen, Preview) else ""
    return f"Seed {seed}, {html.escape(choice.policy)}: {words}{part}"


def shown(seen: Waiting | Preview | Drawn) -> tuple:
    """A picture and the words under it."""
    if isinstance(seen, Waiting):
        return gr.skip(), gr.skip()
    return large(seen.picture), seen.words if isinstance(seen, Preview) else cost(seen)


def cost(drawn: Drawn) -> str:
    """What a picture took."""
    part = drawn.num_bytes / max(1, drawn.dense_bytes)
    size = show_bytes(drawn.num_bytes)
    return f"**{size}** of keys and values ({part:.0%}), **{drawn.seconds:.2f} s**"


def compared(mine: Drawn, full: Drawn) -> str:
    """What a picture took, and how near it is to that of the full cache."""
    decibels = float(metrics.psnr(full.pixels[None], mine.pixels[None])[0])
    equal = float(metrics.token_agreement(full.tokens, mine.tokens)[0])
    near = f"{decibels:.1f} dB" if np.isfinite(decibels) else "the same picture"
    return f"{cost(mine)}; beside the full cache: PSNR **{near}**, **{equal:.0%}** equal tokens"


def pair(found: dict[str, Drawn], subject: str, seed: int, policy: str) -> list[tuple]:
    """Both pictures for the gallery, with their captions, in their own size."""
    what = f"{subject[:40]}, seed {seed}"
    names = (("mine", policy), ("full", "full"))
    return [(found[name].picture, f"{what}, {words}") for name, words in names]


class told:
    """Turns what a visitor can help into a message on the page, escaped."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, (UserError, QueueFull, Closed)):
            raise gr.Error(html.escape(str(error)), print_exception=False) from None
