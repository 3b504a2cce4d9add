"""Pictures for training: what is on disk, turned into uint8 arrays of one size.

Three layouts are read.

Pictures packed as WebP, PNG or JPEG bytes:

    DIR/train.npz       `data` uint8, the files one after another; `offsets` [N + 1]; `labels` [N]
    DIR/val.npz         likewise; may be missing
    DIR/classes.json    {"classes": [names]}; may be missing

Arrays:

    FILE.npz            `images` (or `arr_0`) uint8 [N, H, W, 3]; `labels` (or `arr_1`) integers [N]

One folder of pictures per class:

    DIR/CLASS/*.png     also .jpg, .jpeg, .webp, .bmp

Where there is no validation set, the last part of the shuffled pictures is held out. Pictures of
another size are cropped to a centred square and resized.
"""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from varjax.errors import UserError
from varjax.io import extras

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
LARGEST_LABEL = 10**6
SHUFFLE_SEED = 0  # which pictures of a folder are held out must not depend on the run


@dataclass(frozen=True)
class Pictures:
    """`images` uint8 [N, S, S, 3] and `labels` int32 [N]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Splits:
    """Training and validation pictures; without `class_names` classes have numbers only."""

    train: Pictures
    val: Pictures
    num_classes: int
    class_names: tuple[str, ...] = ()


def load(path, image_size: int, val_fraction: float = 0.05, max_images: int = 0) -> Splits:
    """Read the pictures at `path`.

    Args:
      path: a folder or an .npz file, see the module.
      image_size: side S in pixels.
      val_fraction: part held out where the data has no validation set.
      max_images: use the first so many training pictures (and as many for validation); 0 = all.

    Raises:
      UserError: nothing readable there, or data that contradicts itself.
    """
    path = Path(path)
    if path.is_file():
        train, names = _read_npz(path, image_size, max_images), ()
        train, val = _hold_out(train, val_fraction, path)
    elif (path / "train.npz").is_file():
        train = _read_npz(path / "train.npz", image_size, max_images)
        names = _class_names(path / "classes.json")
        if (path / "val.npz").is_file():
            val = _read_npz(path / "val.npz", image_size, max_images)
        else:
            train, val = _hold_out(train, val_fraction, path)
    elif path.is_dir():
        train, names = _read_folders(path, image_size, max_images)
        train, val = _hold_out(train, val_fraction, path)
    else:
        raise UserError(f"there is no file or folder {path}")
    top = int(max(train.labels.max(), val.labels.max())) + 1
    if names and top > len(names):
        raise UserError(f"{path}: label {top - 1} has no name, classes.json names {len(names)}")
    return Splits(train, val, len(names) or top, tuple(names))


# --- .npz ---


LAYOUTS = (("data", "offsets", "labels"), ("images", "labels"), ("arr_0", "arr_1"))


def _read_npz(path: Path, image_size: int, limit: int) -> Pictures:
    *found, labels = _arrays(path)
    if len(found) == 2:
        images = _unpack(*found, path, image_size, limit)
    else:
        images = _resize_all(*found, path, image_size, limit)
    return Pictures(images, _check_labels(labels, len(images), path, limit))


def _arrays(path: Path) -> list[np.ndarray]:
    """The arrays of the first of `LAYOUTS` that the file holds."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for names in LAYOUTS:
                if set(names) <= set(arrays.files):
                    return [arrays[name] for name in names]
            held = ", ".join(sorted(arrays.files)) or "nothing"
    except Exception as error:  # NumPy raises many kinds over damaged files
        raise UserError(f"cannot read {path} as an .npz file of plain arrays: {error}") from error
    raise UserError(
        f"{path} holds {held}: it must hold data, offsets and labels, or images and labels, or"
        " arr_0 and arr_1"
    )


def _check_labels(labels: np.ndarray, count: int, path: Path, limit: int) -> np.ndarray:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{path}: labels are {labels.dtype} {labels.shape}, integers [N] are needed"
        )
    labels = labels[:limit] if limit else labels
    if len(labels) != count:
        raise UserError(f"{path}: {count} pictures but {len(labels)} labels")
    if not count:
        raise UserError(f"{path} holds no pictures")
    if labels.min() < 0:
        raise UserError(f"{path}: label {labels.min()} is negative; labels count from 0")
    if labels.max() > LARGEST_LABEL:
        raise UserError(f"{path}: label {labels.max()} is given, at most {LARGEST_LABEL} works")
    return labels.astype(np.int32)


def _unpack(data, offsets, path: Path, image_size: int, limit: int) -> np.ndarray:
    """Pictures stored one after another as encoded files."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise UserError(f"{path}: data is {data.dtype} {data.shape}, uint8 [bytes] is needed")
    if offsets.ndim != 1 or not np.issubdtype(offsets.dtype, np.integer) or not offsets.size:
        raise UserError(
            f"{path}: offsets are {offsets.dtype} {offsets.shape}, integers [N + 1] are needed"
        )
    outside = offsets.min() < 0 or offsets.max() > data.size
    offsets = offsets.astype(np.int64)
    if outside or (np.diff(offsets) <= 0).any():
        raise UserError(
            f"{path}: offsets do not cut data into pictures: they must increase from 0 to"
            f" {data.size}"
        )
    ends = offsets[1 : limit + 1] if limit else offsets[1:]
    raw = data.tobytes()
    pieces = (io.BytesIO(raw[a:b]) for a, b in zip(offsets[: len(ends)], ends, strict=True))
    return _decode_all(pieces, [f"{path}, picture {i}" for i in range(len(ends))], image_size)


def _resize_all(images: np.ndarray, path: Path, image_size: int, limit: int) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise UserError(
            f"{path}: images are {images.dtype} {images.shape}, uint8 [N, height, width, 3] is"
            " needed"
        )
    if 0 in images.shape[1:3]:
        raise UserError(f"{path}: images are {images.shape}, pictures without pixels")
    images = images[:limit] if limit else images
    if images.shape[1:3] == (image_size, image_size):
        return images
    fit = _fitter(image_size)
    empty = np.zeros((0, image_size, image_size, 3), np.uint8)
    return np.stack([fit(_pillow().fromarray(image)) for image in images]) if len(images) else empty


def _class_names(path: Path) -> tuple[str, ...]:
    """Names from `{"classes": [...]}`; none where the file is missing."""
    if not path.is_file():
        return ()
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["classes"]
    except (ValueError, KeyError, TypeError, RecursionError, OSError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{path} must be JSON like {{"classes": ["apple", ...]}}')
    return tuple(names)


# --- folders ---


def _read_folders(path: Path, image_size: int, limit: int) -> tuple[Pictures, tuple[str, ...]]:
    """Pictures in class folders, shuffled; classes are the folders in alphabetical order."""
    classes = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    files = [(f, i) for i, c in enumerate(classes) for f in sorted(c.rglob("*"))]
    files = [(f, i) for f, i in files if f.suffix.lower() in SUFFIXES]
    if not files:
        raise UserError(
            f"{path} holds neither train.npz nor class folders with pictures"
            f" ({', '.join(SUFFIXES)})"
        )
    empty = sorted({c.name for c in classes} - {classes[i].name for _, i in files})
    if empty:
        raise UserError(f"{path}: no pictures in class folder {', '.join(empty)}")
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(files))[: limit or None]
    chosen = [files[i] for i in order]
    images = _decode_all((f for f, _ in chosen), [str(f) for f, _ in chosen], image_size)
    labels = np.array([label for _, label in chosen], np.int32)
    return Pictures(images, labels), tuple(c.name for c in classes)


def _hold_out(pictures: Pictures, fraction: float, path: Path) -> tuple[Pictures, Pictures]:
    """The last `fraction` of the pictures, at least one, is for validation."""
    count = max(1, round(len(pictures) * fraction))
    if count >= len(pictures):
        raise UserError(f"{path} holds {len(pictures)} pictures, too few to hold out {count}")
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(pictures))
    parts = order[:-count], order[-count:]
    train, val = (Pictures(pictures.images[part], pictures.labels[part]) for part in parts)
    return train, val


# --- decoding ---


def _decode_all(sources, names: Sequence[str], image_size: int) -> np.ndarray:
    """uint8 [N, S, S, 3] of encoded files; `names` are used in errors."""
    fit, library = _fitter(image_size), _pillow()
    images = np.empty((len(names), image_size, image_size, 3), np.uint8)
    for i, source in enumerate(sources):
        try:
            images[i] = fit(library.open(source))
        except Exception as error:  # pillow raises many kinds over damaged files
            raise UserError(f"cannot read {names[i]} as a picture: {error}") from error
    return images


def _fitter(image_size: int) -> Callable:
    """Function from a pillow picture to uint8 [S, S, 3]: RGB, centred square, resized if needed."""

    def fit(picture) -> np.ndarray:
        picture = picture.convert("RGB")
        side = min(picture.size)
        left, top = ((length - side) // 2 for length in picture.size)
        if picture.size != (image_size, image_size):
            box = (left, top, left + side, top + side)
            square = picture.crop(box)  # resize(box=...) would look at pixels outside
            picture = square.resize((image_size, image_size), _pillow().Resampling.BICUBIC)
        return np.asarray(picture)

    return fit


def _pillow():
    return extras.require("PIL.Image", extra="eval", purpose="reading picture files")


def to_float(images: np.ndarray) -> np.ndarray:
    """uint8 pixels to float32 in [-1, 1]."""
    return images.astype(np.float32) / np.float32(127.5) - 1
