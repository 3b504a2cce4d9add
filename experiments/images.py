"""Pictures that commands write: grids with captions, and the `.npz` layout of the ADM evaluator.

Letters: N images, H and W pixels. Colours are RGB, last axis 3.
"""

import bisect
import math
import os
import zipfile
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import UInt8

from varjax.storage.atomic import new_file
from varjax.storage.values import require

GAP = 2  # white pixels between the tiles of a grid
LINE_HEIGHT = 12  # pixels of a line of caption
CAPTION_LINES = 2
CAPTION_CHARACTERS = 16  # for each pixel of width, so many characters of a text are looked at
CAPTION_HEIGHT = CAPTION_LINES * LINE_HEIGHT + 2
MARGIN = 4  # pixels of white after a caption, before that of the next tile


def grid(
    images: UInt8[np.ndarray, "N H W 3"], columns: int | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """Lays the images row by row on white, `GAP` pixels apart. columns: None: the smallest number
    that makes the grid at least as wide as high, in tiles."""
    count, height, width, _ = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    shape = (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3)
    canvas = np.full(shape, 255, np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + GAP), i % columns * (width + GAP)
        canvas[top : top + height, left : left + width] = image
    return canvas


def save_grid(
    path: str | os.PathLike,
    images: UInt8[np.ndarray, "N H W 3"],
    labels: Sequence[str] | None = None,
    title: str = "",
    columns: int | None = None,
) -> None:
    """Writes the grid of `images` as PNG, each with its label (class name, prompt) below if given.

    `MissingExtra` without pillow. An `OSError` leaves an older file in place.
    """
    pillow = require("PIL.Image", extra="eval", purpose="writing PNG files")
    if labels is not None:
        strips = np.stack([_caption(str(text), images.shape[2]) for text in labels])
        images = np.concatenate([images, strips], axis=1)
    made = grid(images, columns)
    if title:
        made = np.concatenate([_caption(title, made.shape[1]), made])
    with new_file(path) as file:
        pillow.fromarray(made).save(file, format="PNG")


def save_samples_npz(
    path: str | os.PathLike,
    images: UInt8[np.ndarray, "N H W 3"],
    labels: Sequence[int] | np.ndarray,
    order: Sequence[int] | np.ndarray | None = None,
) -> None:
    """Writes `arr_0` (images) and `arr_1` (int64 [N] class labels) as `.npz`.

    The ADM evaluation code reads this layout. Its Inception score depends on the order of images.

    order: a permutation: image `order[i]` becomes the i-th. The file then holds it as `numbers`
      (int64 [N]), and images are read one by one.
    """
    numbers = np.asarray(range(len(images)) if order is None else order, np.int64)
    arrays = {"arr_1": np.asarray(labels, np.int64)[numbers]}
    if order is not None:
        arrays["numbers"] = numbers
    with new_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as member:
            header = {"descr": "|u1", "fortran_order": False, "shape": images.shape}
            np.lib.format.write_array_header_1_0(member, header)
            for number in numbers:
                member.write(np.ascontiguousarray(images[number]).data)
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)


def _caption(text: str, width: int) -> UInt8[np.ndarray, "height width 3"]:
    """Draws black text on white in pillow's own font, as much as fits `CAPTION_LINES`."""
    pillow = require("PIL.Image", extra="eval", purpose="writing captions")
    strip = pillow.new("RGB", (width, CAPTION_HEIGHT), "white")
    draw = require("PIL.ImageDraw", extra="eval", purpose="writing captions").Draw(strip)
    text = text[: CAPTION_CHARACTERS * width]
    shown = text.encode("latin-1", "replace").decode("latin-1")  # every font of pillow has these
    for i, line in enumerate(_lines(shown, lambda part: draw.textlength(part) <= width - MARGIN)):
        draw.text((0, i * LINE_HEIGHT), line, fill="black")
    return np.asarray(strip)


def _lines(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Breaks a text into up to `CAPTION_LINES` lines of whole words; words too long are cut."""
    lines: list[str] = []
    for word in text.split():
        if lines and fits(f"{lines[-1]} {word}"):
            lines[-1] = f"{lines[-1]} {word}"
            continue
        if len(lines) == CAPTION_LINES:
            break
        if not fits(word):  # longer beginnings are wider, so bisection finds the longest that fits
            most = bisect.bisect(range(1, len(word) + 1), False, key=lambda n: not fits(word[:n]))
            word = word[:most]
        lines.append(word)
    return lines
