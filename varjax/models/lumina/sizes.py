"""Sizes of pictures that Lumina-mGPT was trained on: all that have at most as many units (32 x 32
pixels) as the square of its resolution, and are at most 4 times as long as wide."""

import re

from varjax.errors import UserError, show, some

LONGEST = 4  # times the other side


def units_of(area: int) -> list[tuple[int, int]]:
    """(height, width) in units of all sizes for an area: of every width the tallest that fits, and
    those down to the tallest of the next width. Training pictures were cropped to these."""
    found = [
        (height, width)
        for width in range(1, area + 1)
        for height in range(max(1, area // (width + 1)), area // width + 1)
    ]
    return sorted((h, w) for h, w in found if max(h, w) <= LONGEST * min(h, w))


def resolve(
    aspect: float | str | None, size: str | None, units: tuple[int, int], unit: int
) -> tuple[int, int]:
    """Height and width in units of a size in pixels, "768x512" or "512" for a square.

    units: those of the model as it is; their product is its area.
    unit: pixels of a side of one; 32 in released models.

    Raises:
      UserError: `aspect` is given, or the size is none of the model's; the message lists these.
    """
    if aspect is not None:
        raise UserError(f"aspect={show(aspect)}: Lumina-mGPT takes size=HEIGHTxWIDTH in pixels")
    known = units_of(units[0] * units[1])
    listed = some((f"{unit * h}x{unit * w}" for h, w in known), 60)
    found = re.fullmatch(r"([0-9]{1,6})(?:x([0-9]{1,6}))?", str(size))
    pixels = (int(found[1]), int(found[2] or found[1])) if found else (1, 1)
    wanted = pixels[0] // unit, pixels[1] // unit
    if pixels != (unit * wanted[0], unit * wanted[1]) or wanted not in known:
        raise UserError(f"size={show(size)}: HEIGHTxWIDTH in pixels is one of {listed}")
    return wanted
