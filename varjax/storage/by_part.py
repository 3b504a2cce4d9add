"""Arrays of a checkpoint that are read by part, once their places are known.

TensorStore, which is what Orbax reads with, gives ranges of an array: only chunks that a range
touches are read and unpacked. Orbax itself gives whole arrays, or equal shares of contiguous
indices; queries, keys and values side by side are shared section by section.
"""

from pathlib import Path

import numpy as np

from varjax.nn.stored import WHOLE, Ranges, Stored
from varjax.storage.orbax_errors import failed_reading


def stored(folder: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Stored:
    """An array of the tree in `folder` (`arrays.write`), floating numbers cast to `dtype` as they
    are read. `UserError` then if files are damaged."""

    def read(axis: int | None, ranges: Ranges) -> np.ndarray:
        with failed_reading(folder):
            return _read(folder, name, dtype, axis, ranges)

    return Stored(shape, np.dtype(dtype), read)


def _read(folder: Path, name: str, dtype, axis: int | None, ranges: Ranges) -> np.ndarray:
    store = _opened(folder, name, dtype)
    if axis is WHOLE:
        return store.read().result()
    before = (slice(None),) * axis
    if len(ranges) == 1:
        return store[(*before, slice(*ranges[0]))].read().result()
    shape = list(store.shape)
    shape[axis] = sum(end - first for first, end in ranges)
    # filled section by section: beside the result only one of them is in memory
    found, start = np.empty(shape, dtype), 0
    for first, end in ranges:
        section = store[(*before, slice(first, end))].read().result()
        found[(*before, slice(start, start := start + end - first))] = section
    return found


def _opened(folder: Path, name: str, dtype):
    import tensorstore as ts  # here: commands without weights do not wait for it

    key, base = name.replace("/", "."), folder.absolute().as_posix()
    place = {"driver": "ocdbt", "base": f"file://{base}/", "path": f"{key}/"}
    if not (folder / "manifest.ocdbt").is_file():  # a folder for each array
        place = {"driver": "file", "path": f"{base}/{key}/"}
    store = ts.open({"driver": "auto", "kvstore": place}, open=True, read=True).result()
    return store if store.dtype.numpy_dtype == dtype else ts.cast(store, dtype)
