"""Pictures as bytes: drawn ones are rounded; those that people hand in are read without trusting
them, as are masks and folders of pictures.

A picture's size is read from its head and checked before a pixel is decoded, so that a small file
cannot ask for gigabytes. What a file names or says beside its pixels is not looked at.

Letters: N images of H x W pixels.
"""

import contextlib
import io
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from jaxtyping import Array, Bool, Float, UInt8

from varjax.core.errors import UserError
from varjax.storage import ordinary
from varjax.storage.atomic import new_file
from varjax.storage.values import require

HEADS = {"PNG": rb"\x89PNG\r\n\x1a\n", "JPEG": rb"\xff\xd8\xff", "WEBP": rb"RIFF(?s:....)WEBP"}
STORED = HEADS | {"BMP": rb"BM"}  # in sets of pictures, by class or packed
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
OTHERS = ".tif .tiff .ppm .gif .avif .heic .heif .jfif .jp2 .jxl .tga".split()
MOST_PIXELS = 2**26  # 8192 x 8192
MOST_BYTES = 2**28  # of a file
BLACK, WHITE = 0, 255
_QUIET = threading.Lock()  # filters of warnings belong to all threads


def to_uint8(images: Float[Array | np.ndarray, "N H W 3"]) -> UInt8[np.ndarray, "N H W 3"]:
    """Turns images in [0, 1] into bytes 0..255: 255 x rounded to the nearest, halves up, clipped.

    `UserError` for values that are not finite, which would become arbitrary colours.
    """
    images = np.asarray(images, np.float32)
    check_finite(images)
    return np.floor(np.clip(images, 0, 1) * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def check_finite(images: np.ndarray) -> None:
    """`UserError` if a pixel is NaN or infinite."""
    if not np.isfinite(images).all():
        raise UserError(
            "images hold values that are not finite: the numbers of this model leave the range of "
            "their type, or its weights are damaged; try float32"
        )


def picture_files(folders: Iterable[Path], endings: Sequence[str] = ENDINGS) -> Iterator[Path]:
    """Gives the pictures below folders whose names end like that; what is hidden is left out.
    `UserError`: there are pictures of other kinds. None is left out in silence."""
    others, first = Counter(), None
    for path in (path for folder in folders for path in _below(folder)):
        ending = path.suffix.lower()
        if ending in endings:
            yield path
        elif ending in OTHERS:
            others[ending] += 1
            first = first or path
    if others:
        counts = ", ".join(f"{count} {ending}" for ending, count in sorted(others.items()))
        raise UserError(
            f"{first} is of a kind that is not read: convert it to PNG, or move it away"
            f" ({counts} in all)"
        )


def _below(folder: Path) -> Iterator[Path]:
    """Gives all files, of linked folders too, each folder once. `OSError`: one cannot be listed."""
    known = {os.path.realpath(folder)}
    for place, folders, names in os.walk(folder, onerror=ordinary.refuse, followlinks=True):
        seen = {name: os.path.realpath(Path(place, name)) for name in folders}
        folders[:] = [n for n in folders if not ordinary.is_hidden(n) and seen[n] not in known]
        known.update(seen[name] for name in folders)
        yield from (Path(place, name) for name in names if not ordinary.is_hidden(name))


def read_picture(
    source: str | os.PathLike | bytes, name: str, heads: Mapping[str, bytes] = HEADS
) -> UInt8[np.ndarray, "H W 3"]:
    """Reads a picture as it is looked at: turned upright, transparency on white. `UserError`: no
    such file, no picture, or one that is too large.

    source: a file, or its content. name: what messages call it. heads: of formats that are read.
    """
    with opened(source, name, heads) as picture:
        clear = picture.info.get("transparency")  # lost with the lower bits of 16
        upright = pillow("ImageOps").exif_transpose(picture)
        picture = _of_bytes(upright)
        if picture is not upright and clear is not None:
            grey = np.where(np.asarray(upright) == clear, WHITE, np.asarray(picture))
            picture = pillow().fromarray(grey.astype(np.uint8))
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            white = pillow().new("RGBA", picture.size, "white")
            picture = pillow().alpha_composite(white, picture)
        return np.asarray(picture.convert("RGB"))


def read_mask(source: str | os.PathLike | bytes, name: str) -> Bool[np.ndarray, "H W"]:
    """Reads a mask: True where it is white, or where it is transparent if anything of it is. It is
    turned upright by what its own file says, as pictures are. `UserError`: as `read_picture`; or
    something is neither black nor white."""
    with opened(source, name) as picture:
        picture = pillow("ImageOps").exif_transpose(picture)
        if picture.has_transparency_data:
            alpha = np.asarray(picture.convert("RGBA"))[..., 3]
            if (alpha != WHITE).any():
                return _two_levels(alpha, name) == BLACK
        values = np.asarray(_of_bytes(picture).convert("RGB"))
    if (values != values[..., :1]).any():
        raise UserError(f"{name} has colours: a mask is white (to be drawn) and black (kept)")
    return _two_levels(values[..., 0], name) == WHITE


def size(source: str | os.PathLike | bytes, name: str) -> tuple[int, int]:
    """Height and width of a picture as it is stored, from its head: no pixel is decoded. Raises as
    `read_picture`."""
    with opened(source, name, decode=False) as picture:
        return picture.size[::-1]


def _of_bytes(picture):
    """The picture; of 16 bits per grey value the upper 8. pillow would cut them off at 255."""
    if not picture.mode.startswith("I"):
        return picture
    return pillow().fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))


def _two_levels(values: UInt8[np.ndarray, "H W"], name: str) -> UInt8[np.ndarray, "H W"]:
    grey = (values != BLACK) & (values != WHITE)
    if grey.any():
        raise UserError(
            f"{name} is grey in {int(grey.sum())} of {grey.size} pixels: a mask is white (to be "
            f"drawn) and black (kept), without levels between; store it as PNG, not JPEG"
        )
    return values


def fit_picture(
    picture: UInt8[np.ndarray, "H W ..."], size: tuple[int, int], how: str = "BICUBIC"
) -> UInt8[np.ndarray, "h w ..."]:
    """Cuts the largest middle part of the shape of `size` (height, width) and resizes it. how: one
    of pillow's filters."""
    (height, width), (h, w) = picture.shape[:2], size
    part = min(height / h, width / w)
    cut = max(1, round(part * h)), max(1, round(part * w))
    top, left = (height - cut[0]) // 2, (width - cut[1]) // 2
    # resize(box=...) would look at pixels outside the part
    middle = pillow().fromarray(picture[top : top + cut[0], left : left + cut[1]])
    return np.asarray(middle.resize((w, h), pillow().Resampling[how]))


def png(picture: UInt8[np.ndarray, "H W ..."], level: int = 6) -> bytes:
    """A picture, or a mask of bytes, as a PNG file. level: of its compression, 0 to 9."""
    file = io.BytesIO()
    pillow().fromarray(picture).save(file, format="PNG", compress_level=level)
    return file.getvalue()


def save_png(path: str | os.PathLike, picture: UInt8[np.ndarray, "H W ..."]) -> None:
    """Writes a picture as PNG. An `OSError` leaves an older file in place."""
    with new_file(path) as file:
        file.write(png(picture))


def content(path: str | os.PathLike, name: str) -> bytes:
    """The bytes of a file. `UserError` if they cannot be read, or are too many."""
    try:
        return ordinary.read_file(path, MOST_BYTES)
    except OSError as error:
        where = "" if str(path) in name else f" {path}"
        raise UserError(f"cannot read {name}{where}: {error.strerror or error}") from error


@contextlib.contextmanager
def opened(
    source: str | os.PathLike | bytes,
    name: str,
    heads: Mapping[str, bytes] = HEADS,
    decode: bool = True,
) -> Iterator:
    """Gives a pillow picture; errors inside become `UserError`s that name it. Arguments are those
    of `read_picture`."""
    data = source if isinstance(source, bytes) else content(source, name)
    kind = next((kind for kind, head in heads.items() if re.match(head, data)), None)
    try:
        if kind is None:
            raise ValueError(f"it begins like none of {', '.join(heads)}")
        with _QUIET, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pillow, about sizes: ours come first
            found = pillow().open(io.BytesIO(data), formats=(kind,))
        with found as picture:
            width, height = picture.size
            if width * height > MOST_PIXELS:
                raise UserError(f"{name} has {width} x {height} pixels: at most {MOST_PIXELS} work")
            if decode:
                picture.load()
            yield picture
    except UserError:
        raise
    except Exception as error:  # pillow raises many kinds over damaged files
        if type(error).__name__ == "DecompressionBombError":  # of pillow, while opening
            raise UserError(f"{name} has too many pixels: at most {MOST_PIXELS} work") from None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{name} is no picture, damaged or cut short: {reason:.120}") from None


def to_pil(images: Float[Array | np.ndarray, "N H W 3"]) -> list:
    """Pictures of pillow from images in [0, 1], rounded as `to_uint8` does."""
    return [pillow().fromarray(picture) for picture in to_uint8(images)]


def pillow(module: str = "Image") -> ModuleType:
    """A module of pillow. `MissingExtra` where it is not installed."""
    return require(f"PIL.{module}", extra="eval", purpose="reading and writing pictures")
