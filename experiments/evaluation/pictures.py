"""Sets of pictures that are compared: a folder of files, or the array `arr_0` of a file.

They are checked as a whole before anything else is done, and read a few at a time; a set never lies
in memory. Pictures are uint8 RGB of one size; float32 where pictures of several sizes were resized.
All sets have

    where, count     what the user called them; how many
    size             (height, width)
    remarks          what a reader of results has to know
    sha256           digest of the file, or of the list of files with their digests
    labels           class of every picture, or None
    keys             distinct numbers or texts; pictures of two sets with the same key are a pair
    read(first, end) the pictures from one number to before another
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from varjax.core.errors import UserError, some
from varjax.generation.progress import Progress
from varjax.storage import npz, ordinary, pictures
from varjax.storage.values import require

ARRAY = "arr_0"
PACKED = ("data", "offsets", "labels")
LABELS, NUMBERS = "arr_1", "numbers"  # class of every picture; its number, if they are shuffled
ENDINGS = (*pictures.ENDINGS, ".tif", ".tiff", ".ppm")
HEADS = pictures.STORED | {"TIFF": rb"II[*+]\0|MM\0[*+]", "PPM": rb"P[1-6]\s"}
END_OF_JPEG = b"\xff\xd9"
MODES = ("RGB", "L", "1", "CMYK")  # the others than RGB become it, as in the protocols' programs
Fit = Callable[[np.ndarray], np.ndarray]


class PictureArray:
    """The pictures in `arr_0` of an npz file, as ADM's evaluator takes them, with labels in
    `arr_1`. `UserError` if the file cannot be read, `arr_0` is no array of uint8 RGB pictures, or
    the arrays of labels or numbers have another length."""

    remarks = ()

    def __init__(self, path: Path):
        self.where = str(path)
        rows = npz.Rows(path, ARRAY)
        self.read, shape, dtype = rows.read, rows.shape, rows.dtype
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or 0 in shape:
            raise UserError(
                f"{path}: array `{ARRAY}` is {dtype} {list(shape)}: pictures are uint8"
                " [N, H, W, 3] (RGB), at least one"
            )
        self.count, self.size = shape[0], shape[1:3]
        self.sha256 = file_digest(path)
        # what is no list of whole numbers means something else
        lists = {
            name: array
            for name, array in npz.load(path, (LABELS, NUMBERS)).items()
            if array.ndim == 1 and array.dtype.kind in "iu"
        }
        for name, array in lists.items():
            if len(array) != self.count:
                raise UserError(
                    f"{self.where}: array `{name}` has {len(array)} entries for {self.count}"
                    f" pictures (`{ARRAY}`): one of each is needed, or none"
                )
        self.labels = lists.get(LABELS)
        # numbers survive shuffling; without them their places
        numbers = lists[NUMBERS].tolist() if NUMBERS in lists else []
        distinct = len(set(numbers)) == self.count
        self.keys: Sequence[int] = numbers if distinct else range(self.count)


class _Encoded:
    """Pictures that are encoded one by one, and decoded when they are read. A set is checked as its
    object is made. Subclasses know a picture's name and bytes by its number: `_name`, `_bytes`.
    `UserError` if a picture is damaged, has transparency, is of a kind that is not read, or has
    another size than the first and `fit` is None: no picture is left out in silence.

    names: of the pictures, for the digest. fit: makes an array of the one size that a network takes
      of a picture of any size, if a set has several; None: it may not have.
    """

    where: str
    _map = map

    def __init__(self, names: Sequence, fit: Fit | None):
        require("PIL.Image", extra="eval", purpose="reading pictures")
        digest, self._sizes, other = hashlib.sha256(), [], 0
        self.count = len(names)
        progress = Progress(f"{self.where}: checked picture", self.count, every=5.0)
        for number, name in enumerate(names):
            data = self._bytes(number)
            size, mode = _checked(self._name(number), data)
            self._sizes.append(size)
            if fit is None and size != self._sizes[0]:
                pixels = [f"{h}x{w}" for h, w in (size, self._sizes[0])]
                raise UserError(
                    f"{self._name(number)} has {pixels[0]} pixels, {self._name(0)} has {pixels[1]}:"
                    " pictures of a set need one size, unless they are compared as by clean-fid"
                    " alone; cut and resize them (docs/howto/evaluate.md), or leave out others"
                )
            other += mode != "RGB"
            digest.update(f"{hashlib.sha256(data).hexdigest()}  {name}\n".encode(errors="replace"))
            if self.count > 1000:
                progress.update(number + 1)
        self._fit = fit if len(set(self._sizes)) > 1 else None
        self.size, self.sha256 = self._decoded(0).shape[:2], digest.hexdigest()
        self.remarks = []
        if other:
            self.remarks.append(
                f"{self.where}: {other} pictures are grey or of inks, and taken as RGB"
            )
        if self._fit:
            many = f"pictures of {len(set(self._sizes))} sizes"
            self.remarks.append(f"{self.where}: {many}, each resized on its own")

    def read(self, first: int, end: int) -> np.ndarray:
        return np.stack(list(self._map(self._decoded, range(first, end))))

    def _decoded(self, number: int) -> np.ndarray:
        # not `read_picture`: the protocols' programs turn no picture by its EXIF
        with pictures.opened(self._bytes(number), self._name(number), HEADS) as picture:
            found = np.asarray(picture.convert("RGB"))
        if found.shape[:2] != self._sizes[number]:
            raise UserError(f"{self._name(number)} has changed since it was checked: start again")
        return self._fit(found) if self._fit else found


class PictureFolder(_Encoded):
    """All pictures below a folder, in the order of their paths; `UserError` also without any."""

    labels = None

    def __init__(self, folder: Path, fit: Fit | None = None):
        found = pictures.picture_files([folder], ENDINGS)
        self.files = sorted(path.relative_to(folder).as_posix() for path in found)
        self.where, self._folder = str(folder), folder
        if not self.files:
            raise UserError(
                f"{folder} holds no pictures: files that end in {', '.join(ENDINGS)} are needed"
            )
        self._map = ThreadPoolExecutor(os.cpu_count()).map
        super().__init__(self.files, fit)
        # the names as numbers, if all of them are numbers that differ; else without their endings
        stems = [re.sub(r"\.[^./]+$", "", name) for name in self.files]
        last = [stem.rpartition("/")[2] for stem in stems]
        digits = all(text.isascii() and text.isdigit() and len(text) < 19 for text in last)
        numbers = list(map(int, last)) if digits else []
        self.keys = numbers if len(set(numbers)) == len(stems) else stems

    def _name(self, number: int) -> str:
        return str(self._folder / self.files[number])

    def _bytes(self, number: int) -> bytes:
        return pictures.content(self._folder / self.files[number], self._name(number))


class PackedPictures(_Encoded):
    """`data` (picture files one after another), `offsets` [N + 1] and `labels` [N] of an npz file,
    as `experiments.train` takes them; `UserError` also for arrays that do not fit each other."""

    def __init__(self, path: Path, fit: Fit | None = None):
        self.where, self._rows = str(path), npz.Rows(path, PACKED[0])
        found = npz.load(path, PACKED[1:])
        for name in PACKED[1:]:
            if name not in found or found[name].ndim != 1 or found[name].dtype.kind not in "iu":
                raise UserError(f"{path}: array `{name}` is missing, or no list of whole numbers")
        self._offsets, self.labels = (found[name].astype(np.int64) for name in PACKED[1:])
        ends, count = self._offsets, len(self.labels)
        rising = len(ends) == count + 1 > 1 and ends[0] >= 0 and (np.diff(ends) > 0).all()
        if self._rows.dtype != np.uint8 or not rising or ends[-1] > self._rows.shape[0]:
            raise UserError(
                f"{path}: `offsets` {list(ends.shape)} do not cut `data` into {count} pictures"
            )
        super().__init__(range(count), fit)
        self.keys, self.sha256 = range(count), file_digest(path)

    def _name(self, number: int) -> str:
        return f"{self.where}, picture {number}"

    def _bytes(self, number: int) -> bytes:
        first, end = self._offsets[number : number + 2].tolist()
        return self._rows.read(first, end).tobytes()


Pictures = PictureArray | PictureFolder | PackedPictures


def _checked(path: str, data: bytes) -> tuple[tuple[int, int], str]:
    """((height, width), mode) of a picture; `UserError` unless it is whole, and of `MODES`. PNG and
    JPEG are not decoded for this."""
    with pictures.opened(data, path, HEADS, decode=False) as picture:
        mode, kind, (width, height) = picture.mode, picture.format, picture.size
        if mode in MODES and picture.has_transparency_data:
            mode = f"{mode} with transparency"
        if kind == "PNG":
            picture.verify()  # checksums of all its parts
        elif kind != "JPEG" or not data.rstrip(b"\0").endswith(END_OF_JPEG):
            picture.load()
    if mode not in MODES:
        names = {"P": "a palette", "RGBA": "transparency", "I;16": "16 bits of grey"}
        names |= {"LA": "grey with transparency"}
        raise UserError(
            f"{path} is no RGB picture: it has {names.get(mode, mode)} (mode {mode}); convert it"
        )
    return (height, width), mode


def file_digest(path: Path) -> str:
    with ordinary.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def paired(first: Pictures, second: Pictures) -> list[int]:
    """Places of the first set's pictures in the second one, in the order of the first. `UserError`
    if the sets differ in their number, their size or their keys."""
    if first.count != second.count:
        raise UserError(
            f"{first.where} has {first.count} pictures, {second.where} has {second.count}: pictures"
            " are compared one by one, so give the same ones in both"
        )
    if first.size != second.size:
        sizes = (f"{s.size[0]}x{s.size[1]} pixels in {s.where}" for s in (first, second))
        raise UserError(f"pictures that are compared need one size: {', '.join(sizes)}")
    theirs = {key: i for i, key in enumerate(second.keys)}
    if missing := [str(key) for key in first.keys if key not in theirs]:
        extra = [str(key) for key in theirs if key not in set(first.keys)]
        raise UserError(
            f"pictures are paired by number or name, and these of {first.where} are not in"
            f" {second.where}: {some(missing, 5)}; there instead: {some(extra, 5)}"
        )
    return [theirs[key] for key in first.keys]
