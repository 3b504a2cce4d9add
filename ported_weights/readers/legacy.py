"""Reader of torch's format before 1.6, in which LPIPS publishes its weights.

Such a file is no zip. It holds five pickles, then the storages one after another, each as its
number of elements and its bytes. The pickles are interpreted as in newer files, with the same
refusals. There are no checksums, so lengths have to fit to the byte.
"""

import struct
from collections import Counter
from pathlib import Path

import numpy as np

from ported_weights.readers.archive import damaged
from ported_weights.readers.files import MAX_PICKLE, Storage, TorchFile
from varjax.core.errors import UserError
from varjax.storage import ordinary

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first pickle: a number
VERSION = 1001
COUNT = struct.Struct("<q")


class LegacyTorchFile(TorchFile):
    """A `TorchFile` of the old format, which begins with `MAGIC`."""

    def __init__(self, path: Path):
        self.path, self._used, self._start = path, Counter(), {}
        self._mentioned: dict[str, Storage] = {}
        with ordinary.opened(path) as file:
            data = file.read(MAX_PICKLE)
        version, at = self._next(data, len(MAGIC))
        system, at = self._next(data, at)
        if version != VERSION or not isinstance(system, dict):
            raise damaged(path, "its head is not that of torch.save")
        if system.get("little_endian") is not True:
            raise UserError(f"{path} is stored big-endian: save it on a little-endian machine")
        self.content, at = self._next(data, at)
        self._find(*self._next(data, at))

    def _next(self, data: bytes, at: int):
        """Return the object of the pickle at this byte, and the byte where the next one begins."""
        program = self._program()
        found = program.run(data[at:])
        return found, at + program.length

    def _find(self, keys: object, at: int) -> None:
        """Note where every storage begins. keys: of the storages, in the order of the file. at: the
        byte where the first one begins."""
        texts = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        if not texts or sorted(keys) != sorted(self._mentioned):
            raise damaged(self.path, "its list of storages is not that of its tensors")
        with ordinary.opened(self.path) as file:
            end = file.seek(0, 2)
            for key in keys:
                file.seek(at)
                storage, head = self._mentioned[key], file.read(COUNT.size)
                if len(head) < COUNT.size or COUNT.unpack(head)[0] != storage.count:
                    raise damaged(self.path, f"storage {key:.80} has not {storage.count} elements")
                self._start[key] = at + COUNT.size
                at = self._start[key] + storage.num_bytes
        if at != end:
            raise damaged(self.path, f"its storages end at byte {at}, the file at {end}")

    def _storage(self, identity: object) -> Storage:
        """Read the persistent id, which may end with the storage that this one is a view of."""
        key, dtype, count = self._identity(identity, 6)
        if identity[5] is not None:
            raise UserError(
                f"{self.path}: storage {key:.80} is a view of another one, as only PyTorch before"
                " 0.4 has them: save it again with a newer PyTorch"
            )
        found = Storage(key, dtype, count)
        if self._mentioned.setdefault(key, found) != found:
            raise UserError(f"{self.path}: storage {key:.80} has two types or sizes")
        return found

    def _elements(self, key: str, dtype: np.dtype, first: int, end: int) -> np.ndarray:
        size = dtype.itemsize
        with ordinary.opened(self.path) as file:
            file.seek(self._start[key] + first * size)
            data = file.read((end - first) * size)
        if len(data) != (end - first) * size:
            raise damaged(self.path, "it ends too early")
        return np.frombuffer(data, dtype)
