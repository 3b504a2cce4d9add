"""Sets of pictures that are compared: a folder of files, or the array `arr_0` of a file.

They are checked as a whole before anything else is done, and read a few at a time; a set never lies
in memory.
"""

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import UInt8

from varjax.errors import UserError, require, some
from varjax.storage import npz, ordinary

ARRAY = "arr_0"
PACKED = ("data", "offsets", "labels")
LABELS, NUMBERS = "arr_1", "numbers"  # class of every picture; its number, if they are shuffled
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
NOT_READ = (".gif", ".avif", ".heic", ".heif", ".jfif", ".jp2", ".jxl", ".tga")
LARGEST_FILE = 2**28  # bytes of a picture
END_OF_JPEG = b"\xff\xd9"
CHUNK = 2**24


class Pictures(Protocol):
    """uint8 RGB pictures of one size.

    where: what the user called them.
    sha256: digest of the file, or of the list of files with their digests.
    keys: distinct numbers or texts; pictures of two sets with the same key are a pair.
    """

    where: str
    count: int
    size: tuple[int, int]
    sha256: str

    @property
    def keys(self) -> Sequence[int] | Sequence[str]: ...

    def read(self, first: int, end: int) -> UInt8[np.ndarray, "n H W 3"]: ...


class PictureArray:
    """The pictures in `arr_0` of an npz file, as ADM's evaluator takes them. labels: `arr_1`, if it
    is there.

    Raises:
      UserError: the file cannot be read, or `arr_0` is no array of uint8 RGB pictures; the arrays
        of labels or numbers have another length.
    """

    def __init__(self, path: Path):
        self.where = str(path)
        self._rows = npz.Rows(path, ARRAY)
        shape, dtype = self._rows.shape, self._rows.dtype
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or 0 in shape:
            raise UserError(
                f"{path}: array `{ARRAY}` is {dtype} {list(shape)}: pictures are uint8"
                " [N, H, W, 3] (RGB), at least one"
            )
        self.count, self.size = shape[0], shape[1:3]
        self.sha256 = file_digest(path)
        found = npz.load(path, (LABELS, NUMBERS))
        self.labels = self._per_picture(found, LABELS)
        self._numbers = self._per_picture(found, NUMBERS)

    def _per_picture(self, found: dict[str, np.ndarray], name: str) -> np.ndarray | None:
        """An array of whole numbers, one for each picture. None: there is no array of this name,
        or it is no list of whole numbers and means something else."""
        array = found.get(name)
        if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
            return None
        if len(array) != self.count:
            raise UserError(
                f"{self.where}: array `{name}` has {len(array)} entries for {self.count} pictures"
                f" (`{ARRAY}`): one of each is needed, or none"
            )
        return array

    @property
    def keys(self) -> Sequence[int]:
        """The numbers of the pictures, which survive shuffling; without them their places."""
        if self._numbers is not None and len(set(self._numbers.tolist())) == self.count:
            return self._numbers.tolist()
        return range(self.count)

    def read(self, first: int, end: int) -> UInt8[np.ndarray, "n H W 3"]:
        return self._rows.read(first, end)


class PictureFolder:
    """All pictures below a folder, in the order of their paths.

    Raises:
      UserError: there are no pictures, or one is damaged, grey, has transparency, has another size
        than the first, or is of a kind that is not read. No picture is left out in silence.
    """

    def __init__(self, folder: Path, report=lambda done, total: None):
        require("PIL.Image", extra="eval", purpose="reading pictures")
        self.where, self.labels = str(folder), None
        self._folder, self.files = folder, sorted(_files(folder))
        self.count = len(self.files)
        if not self.files:
            raise UserError(
                f"{folder} holds no pictures: files that end in {', '.join(ENDINGS)} are needed"
            )
        digest, self.size = hashlib.sha256(), (0, 0)
        for done, name in enumerate(self.files, 1):
            data = _bytes(folder / name)
            self._check(folder / name, data)
            digest.update(f"{hashlib.sha256(data).hexdigest()}  {name}\n".encode(errors="replace"))
            report(done, self.count)
        self.sha256 = digest.hexdigest()
        self._pool = ThreadPoolExecutor(os.cpu_count())

    def _check(self, path: Path, data: bytes) -> None:
        height, width = _checked(path, data)
        if self.size == (0, 0):
            self.size = (height, width)
        if self.size != (height, width):
            raise UserError(
                f"{path} has {height}x{width} pixels, {self.files[0]} has {self.size[0]}x"
                f"{self.size[1]}: pictures of a set need one size; resize them, or leave out others"
            )

    @property
    def keys(self) -> Sequence[int] | Sequence[str]:
        """The names as numbers, if all of them are numbers that differ; else the paths without
        their endings."""
        stems = [re.sub(r"\.[^./]+$", "", name) for name in self.files]
        last = [stem.rpartition("/")[2] for stem in stems]
        if all(text.isascii() and text.isdigit() and len(text) < 19 for text in last):
            numbers = [int(text) for text in last]
            if len(set(numbers)) == len(numbers):
                return numbers
        return stems

    def read(self, first: int, end: int) -> UInt8[np.ndarray, "n H W 3"]:
        return np.stack(list(self._pool.map(self._decoded, self.files[first:end])))

    def _decoded(self, name: str) -> UInt8[np.ndarray, "H W 3"]:
        path = self._folder / name
        with _picture_errors(path), _opened(_bytes(path)) as picture:
            found = np.asarray(picture)
        if found.shape != (*self.size, 3):
            raise UserError(f"{path} has changed since it was checked: start again")
        return found


class PackedPictures:
    """`data` (picture files one after another), `offsets` [N + 1] and `labels` [N] of an npz file,
    as `experiments.train` takes them.

    Raises:
      UserError: for pictures that `PictureFolder` refuses, and for arrays that do not fit each
        other.
    """

    def __init__(self, path: Path, report=lambda done, total: None):
        require("PIL.Image", extra="eval", purpose="reading pictures")
        self.where, self._rows = str(path), npz.Rows(path, PACKED[0])
        found = npz.load(path, PACKED[1:])
        self._offsets, self.labels = (self._integers(found.get(name), name) for name in PACKED[1:])
        self.count = len(self.labels)
        ends = self._offsets
        rising = len(ends) == self.count + 1 > 1 and ends[0] >= 0 and (np.diff(ends) > 0).all()
        if self._rows.dtype != np.uint8 or not rising or ends[-1] > self._rows.shape[0]:
            raise UserError(
                f"{path}: `offsets` {list(ends.shape)} do not cut `data` into {self.count} pictures"
            )
        self.size, self.sha256 = (0, 0), file_digest(path)
        for number in range(self.count):
            size = _checked(self._name(number), self._bytes(number))
            if number and size != self.size:
                raise UserError(f"{self._name(number)} has another size than picture 0")
            self.size = size
            report(number + 1, self.count)

    def _integers(self, array: np.ndarray | None, name: str) -> np.ndarray:
        if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
            raise UserError(f"{self.where}: array `{name}` is missing, or no list of whole numbers")
        return array.astype(np.int64)

    def _name(self, number: int) -> str:
        return f"{self.where}, picture {number}"

    def _bytes(self, number: int) -> bytes:
        first, end = self._offsets[number : number + 2].tolist()
        return self._rows.read(first, end).tobytes()

    @property
    def keys(self) -> Sequence[int]:
        return range(self.count)

    def read(self, first: int, end: int) -> UInt8[np.ndarray, "n H W 3"]:
        found = []
        for number in range(first, end):
            with _picture_errors(self._name(number)), _opened(self._bytes(number)) as picture:
                found.append(np.asarray(picture))
        return np.stack(found)


def _files(folder: Path) -> Iterator[str]:
    """Paths of pictures below a folder, '/' between their parts; hidden ones are left out."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if name.startswith("."):
                continue
            if name.lower().endswith(NOT_READ):
                raise UserError(
                    f"{Path(place, name)} is of a kind that is not read: convert it to PNG, or move"
                    " it away"
                )
            if name.lower().endswith(ENDINGS):
                yield Path(place, name).relative_to(folder).as_posix()


def _bytes(path: Path) -> bytes:
    try:
        return ordinary.read(path, LARGEST_FILE)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _checked(path: Path | str, data: bytes) -> tuple[int, int]:
    """(height, width) of a picture; `UserError` unless it is whole and RGB. PNG and JPEG are not
    decoded for this."""
    with _picture_errors(path):
        with _opened(data) as picture:
            mode, kind, (width, height) = picture.mode, picture.format, picture.size
            if kind == "PNG":
                picture.verify()  # checksums of all its parts
        is_whole_jpeg = kind == "JPEG" and data.rstrip(b"\0").endswith(END_OF_JPEG)
        if kind != "PNG" and not is_whole_jpeg:
            with _opened(data) as picture:
                picture.load()
    if mode != "RGB":
        names = {"L": "grey", "1": "black and white", "P": "a palette", "RGBA": "transparency"}
        names |= {"I;16": "16 bits of grey", "LA": "grey with transparency", "CMYK": "inks"}
        raise UserError(
            f"{path} is no RGB picture: it has {names.get(mode, mode)} (mode {mode}); convert it"
        )
    return height, width


def _opened(data: bytes):
    return require("PIL.Image", extra="eval", purpose="reading pictures").open(io.BytesIO(data))


@contextlib.contextmanager
def _picture_errors(path: Path | str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Pillow raises many kinds over damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        if type(error).__name__ == "UnidentifiedImageError":  # names an object in memory
            reason = "no kind of picture begins like that"
        raise UserError(f"{path} is no picture, damaged or cut short: {reason:.120}") from None


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with ordinary.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- pairs ----------------------------------------------------------------------------------------


def paired(first: Pictures, second: Pictures) -> tuple[list[int], list[int]]:
    """Places of the same pictures in two sets, in the order of the first.

    Raises:
      UserError: the sets differ in their number, their size or their keys.
    """
    if first.count != second.count:
        raise UserError(
            f"{first.where} has {first.count} pictures, {second.where} has {second.count}: pictures"
            " are compared one by one, so give the same ones in both"
        )
    if first.size != second.size:
        sizes = (f"{s.size[0]}x{s.size[1]} pixels in {s.where}" for s in (first, second))
        raise UserError(f"pictures that are compared need one size: {', '.join(sizes)}")
    ours, theirs = list(first.keys), {key: i for i, key in enumerate(second.keys)}
    if missing := [str(key) for key in ours if key not in theirs]:
        extra = [str(key) for key in theirs if key not in set(ours)]
        raise UserError(
            f"pictures are paired by number or name, and these of {first.where} are not in"
            f" {second.where}: {some(missing, 5)}; there instead: {some(extra, 5)}"
        )
    return list(range(len(ours))), [theirs[key] for key in ours]
