"""Pictures for training: files become uint8 arrays of one size.

There are three layouts.

Pictures packed as WebP, PNG or JPEG bytes:

    DIR/train.npz       `data` uint8, the files one after another; `offsets` [N + 1]; `labels` [N]
    DIR/val.npz         the same arrays; may be missing
    DIR/classes.json    {"classes": [names]}; may be missing

Arrays:

    FILE.npz            `images` (or `arr_0`) uint8 [N, H, W, 3]; `labels` (or `arr_1`) integers [N]

One folder of pictures per class:

    DIR/CLASS/*.png     also .jpg, .jpeg, .webp, .bmp; other kinds of pictures are refused

Pictures are read as everywhere (`varjax.storage.pictures`), and what is hidden is left out.

The pictures of class folders can stay in their files (`decoding.InFiles`), which are then decoded
when they are trained on.

Where there is no validation set, the last part of the shuffled pictures is held out. Pictures of
another size are cropped to the square in the middle and resized.
"""

import hashlib
import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from experiments.training import decoding
from varjax.core.errors import UserError, choose, some
from varjax.storage import npz
from varjax.storage.manifest import read_class_names
from varjax.storage.pictures import fit_picture

# arrays of an .npz file, labels last
NPZ_ARRAYS = (("data", "offsets", "labels"), ("images", "labels"), ("arr_0", "arr_1"))
LARGEST_LABEL = 10**6
LOADERS = ("auto", "memory", "grain")
MEMORY = 0.5  # part of this machine's that `auto` fills with pictures


@dataclass(frozen=True)
class Dataset:
    """Pictures and their labels, for training and validation.

    Attributes:
      train: uint8 [N, S, S, 3], or tokens of pictures (`var_trainer.read_tokens`).
      val: likewise, always in memory.
      train_labels, val_labels: int32 [N].
      num_classes: one more than the largest label, or the number of names.
      class_names: empty where classes have only numbers.
    """

    train: np.ndarray | decoding.InFiles
    train_labels: np.ndarray
    val: np.ndarray
    val_labels: np.ndarray
    num_classes: int
    class_names: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return a checksum of labels, names and the pictures for validation, in their order."""
        found = hashlib.sha256(repr((self.val.shape, self.class_names)).encode())
        for array in (self.train_labels, self.val, self.val_labels):
            found.update(np.ascontiguousarray(array))
        return found.hexdigest()


def load(
    path: str | os.PathLike,
    image_size: int,
    val_fraction: float = 0.05,
    max_images: int = 0,
    loader: str = "memory",
    copies: int = 0,
    max_validation: int = 0,
) -> Dataset:
    """Read the pictures at `path`, in one of the layouts above.

    Args:
      path: a folder or an .npz file.
      image_size: side of the pictures in pixels.
      val_fraction: the part that is held out where the data has no validation set.
      max_images: use so many training pictures, and as many for validation; 0: all.
      loader: one of `LOADERS`. "grain" leaves training pictures in their files, "auto" if they
        would take more than `MEMORY` of this machine's.
      copies: that will be made of every picture (`with_shifts`).
      max_validation: so many are enough where the others stay in their files; 0: all.

    Raises:
      UserError: the files are unreadable, or contradict each other, or the loader cannot have them.
      MissingExtra: grain is needed and not installed.
    """
    path = Path(path)
    if choose("loader", loader, LOADERS) == "grain":
        decoding.library()
        if path.is_file() or (path / "train.npz").is_file():
            raise UserError(f"loader=grain reads folders of pictures, {path} is .npz: leave it out")
    parts, names = _parts(path, image_size, max_images)
    if len(parts) == 1:
        parts = _hold_out(*parts[0], val_fraction, path)
    (train, train_labels), (val, val_labels) = parts
    if train.dtype == object:  # names of files
        stay = loader == "grain" or (loader == "auto" and _fill(len(train), image_size, copies))
        if stay:
            decoding.library()
            val, val_labels = (a[: max_validation or None] for a in (val, val_labels))
        train, val = (decoding.InFiles(path, names, image_size) for names in (train, val))
        train, val = train if stay else train[:], val[:]
    top = int(max(train_labels.max(), val_labels.max())) + 1
    if names and top > len(names):
        raise UserError(f"{path}: label {top - 1} has no name, classes.json names {len(names)}")
    return Dataset(train, train_labels, val, val_labels, len(names) or top, names)


def count(path: str | os.PathLike, limit: int = 0) -> int:
    """Count the pictures to train on, before any are held out, at most `limit`; 0: all. None is
    decoded. Raises as `load` does."""
    path = Path(path)
    file = path / "train.npz" if path.is_dir() else path
    labels = npz.load(file, ("labels", "arr_1")) if file.is_file() else {}
    found = next(iter(labels.values())) if labels else _parts(path, 1, limit)[0][0][1]
    return min(found.size, limit or found.size)


def _parts(path: Path, image_size: int, limit: int) -> tuple[list[tuple], tuple[str, ...]]:
    """Return [(pictures, labels)], for training and for validation if there is such a set, and the
    names of classes. Pictures of class folders are names of files."""
    if path.is_file():
        return [_read_npz(path, image_size, limit)], ()
    if (path / "train.npz").is_file():
        files = [path / "train.npz", path / "val.npz"]
        found = [_read_npz(file, image_size, limit) for file in files if file.is_file()]
        names = path / "classes.json"
        return found, tuple(read_class_names(names)) if names.is_file() else ()
    if path.is_dir():
        files, labels, names = decoding.list_folders(path, limit)
        return [(files, labels)], names
    raise UserError(f"there is no file or folder {path}")


def with_shifts(pictures: Dataset, count: int, seed: int) -> Dataset:
    """Add `count` copies of every training picture, each moved by up to two pixels.

    No two copies of a picture have the same move, and none has no move. Edges are repeated.
    """
    if not count:
        return pictures
    labels = np.tile(pictures.train_labels, 1 + count)
    # for each copy of each picture an index into `MOVES`
    rng = np.random.default_rng((seed, count))
    moves = np.empty((len(pictures.train), count), np.int8)
    for i in range(len(moves)):
        moves[i] = rng.choice(len(decoding.MOVES), count, replace=False)
    if isinstance(pictures.train, decoding.InFiles):
        return replace(pictures, train=replace(pictures.train, moves=moves), train_labels=labels)
    train = np.empty((1 + count, *pictures.train.shape), np.uint8)
    train[0] = pictures.train
    for i, copy in np.ndindex(moves.shape):
        train[1 + copy, i] = decoding.moved(train[0, i], *decoding.MOVES[moves[i, copy]])
    return replace(pictures, train=train.reshape(-1, *train.shape[2:]), train_labels=labels)


def _read_npz(path: Path, image_size: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `limit` pictures in the wanted size, and their labels."""
    held = npz.names(path)
    names = next((names for names in NPZ_ARRAYS if set(names) <= set(held)), None)
    if names is None:
        raise UserError(
            f"{path} holds {some(sorted(held)) or 'nothing'}: it must hold data, offsets and"
            " labels, or images and labels, or arr_0 and arr_1"
        )
    found = npz.load(path, names)
    *pictures, labels = (found[name] for name in names)
    _check(path, "labels", labels, labels.ndim == 1 and labels.dtype.kind in "iu", "integers [N]")
    count = max(0, len(pictures[-1]) - (len(pictures) > 1)) if pictures[-1].ndim else 0
    if count != len(labels) or not count:
        raise UserError(
            f"{path}: {count} pictures but {len(labels)} labels: one for each is needed"
        )
    if labels.min() < 0 or labels.max() > LARGEST_LABEL:
        raise UserError(
            f"{path}: labels are {labels.min()} to {labels.max()}: 0 to {LARGEST_LABEL} work"
        )
    read = _unpack if len(pictures) > 1 else _resize_all
    images = read(*pictures, path, image_size, limit or None)
    return images, labels[: limit or None].astype(np.int32)


def _check(path: Path, name: str, array: np.ndarray, fits: bool, needed: str) -> None:
    if not fits:
        raise UserError(f"{path}: {name}: {array.dtype} {array.shape} given, needed is {needed}")


def _unpack(
    data: np.ndarray, offsets: np.ndarray, path: Path, image_size: int, limit: int | None
) -> np.ndarray:
    """Decode pictures that are stored one after another as files."""
    _check(path, "data", data, data.dtype == np.uint8 and data.ndim == 1, "uint8 [bytes]")
    is_list = offsets.ndim == 1 and offsets.dtype.kind in "iu"
    _check(path, "offsets", offsets, is_list, "integers [N + 1]")
    outside = offsets.min() < 0 or offsets.max() > data.size
    offsets = offsets.astype(np.int64)
    if outside or (np.diff(offsets) <= 0).any():
        raise UserError(
            f"{path}: offsets do not cut data into pictures: they must increase from 0 to"
            f" {data.size}"
        )
    raw, files = data.tobytes(), list(pairwise(offsets))[:limit]
    named = ((raw[a:b], f"{path}, picture {i}") for i, (a, b) in enumerate(files))
    found = (decoding.read_square(*one, image_size) for one in named)
    return decoding.together(found, len(files), image_size)


def _resize_all(images: np.ndarray, path: Path, image_size: int, limit: int | None) -> np.ndarray:
    fits = images.dtype == np.uint8 and images.ndim == 4 and images.shape[-1] == 3
    _check(path, "images", images, fits and images.size > 0, "uint8 [N, height, width, 3]")
    images, size = images[:limit], (image_size, image_size)
    if images.shape[1:3] == size:
        return images
    return decoding.together((fit_picture(x, size) for x in images), len(images), image_size)


def _fill(pictures: int, image_size: int, copies: int) -> bool:
    """Whether so many pictures and their copies would take more than `MEMORY` of this machine's."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # not a system that says it
        return False
    return pictures * (1 + copies) * 3 * image_size**2 > MEMORY * whole


def _hold_out(images: np.ndarray, labels: np.ndarray, fraction: float, path: Path) -> list[tuple]:
    """Split into (pictures, labels) for training and for validation, which gets at least one."""
    count = max(1, round(len(images) * fraction))
    if count >= len(images):
        raise UserError(f"{path} holds {len(images)} pictures, too few to hold out {count}")
    order = np.random.default_rng(decoding.SHUFFLE_SEED).permutation(len(images))
    return [(images[part], labels[part]) for part in (order[:-count], order[-count:])]


def to_float(images: np.ndarray) -> np.ndarray:
    """Turn uint8 pixels into float32 in [-1, 1]."""
    return images.astype(np.float32) / np.float32(127.5) - 1
