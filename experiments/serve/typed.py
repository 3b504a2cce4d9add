"""What a visitor of the page typed, uploaded and painted, checked."""

import secrets

import numpy as np

from experiments.serve.requests import LARGEST_SEED
from experiments.serve.studio import Choice
from varjax.errors import UserError
from varjax.io import pictures
from varjax.sampling import Sampling

FULL = "full"
PAINTED, LOWER, MIDDLE = WAYS = ("what I paint", "the lower half", "the middle")
HALF = 127  # of full opacity: more of it is painted


def seed(text: str | None) -> int:
    """The seed; nothing is any."""
    text = (text or "").strip()
    if not text:
        return secrets.randbelow(LARGEST_SEED)
    if not text.isdecimal() or len(text) > 10 or int(text) > LARGEST_SEED:
        raise UserError(f"seed {text[:20]!r}: a whole number, 0 to {LARGEST_SEED}, or nothing")
    return int(text)


def whole(name: str, value: float | None) -> int:
    """A whole number."""
    if value is None or not float(value).is_integer():
        raise UserError(f"{name}={value}: a whole number")
    return int(value)


def choice(policy: str, budget: float | None, sampling: Sampling) -> Choice:
    """How to draw. The full cache has one budget only."""
    return Choice(policy, None if policy == FULL else budget, sampling)


def canvas(
    found: dict | None, way: str, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, str]:
    """The picture of an editor, uint8 [H, W, 3], what is drawn anew of it, bool [H, W], both in the
    model's `size`, and what was done to it. way: of `WAYS`."""
    background = (found or {}).get("background")
    if background is None:
        raise UserError("upload a picture first")
    picture = np.asarray(background.convert("RGB"))
    drawn = _drawn(found, way, picture.shape[:2], size)
    if not drawn.any() or drawn.all():
        raise UserError("paint over a part of the picture: that part is drawn anew")
    return pictures.fit_picture(picture, size), drawn, _fitted(picture.shape[:2], size)


def _drawn(found: dict, way: str, given: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    (height, width), drawn = size, np.zeros(size, bool)
    if way == LOWER:
        drawn[height // 2 :] = True
    elif way == MIDDLE:
        h, w = height // 4, width // 4
        drawn[h : height - h, w : width - w] = True
    else:
        painted = np.zeros(given, bool)
        for layer in found.get("layers") or ():
            layer = layer.convert("RGBA").resize(given[::-1])
            painted |= np.asarray(layer)[..., 3] > HALF
        drawn = pictures.fit_mask(painted, size)
    return drawn


def _fitted(given: tuple[int, int], size: tuple[int, int]) -> str:
    """What `fit_picture` did, in words; nothing if nothing."""
    if given == size:
        return ""
    shapes = [f"{w} x {h}" for h, w in (given, size)]
    cut = given[0] * size[1] != given[1] * size[0]
    how = "its middle was cut out and resized" if cut else "it was resized"
    return f"; the picture has {shapes[0]} pixels, {how} to {shapes[1]}"
