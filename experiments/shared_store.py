"""A folder that several processes work in: each writes the files of its own images, and the first
one writes the results when all are there.

Files do not depend on how images are shared, so that a run continues with another number of
processes.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping

from experiments.batch_files import Series
from experiments.output import BatchStore, FolderFlags
from experiments.work_folder import SETTINGS
from varjax.parallel import processes, shared_folder


class SharedStore(BatchStore):
    """The store of all processes together. Every method is called by all of them."""

    def __init__(
        self,
        out: pathlib.Path,
        description: dict,
        *,
        overwrite: bool,
        series: Mapping[str, Series] | None = None,
    ):
        with processes.together():
            super().__init__(out, description, overwrite=overwrite, series=series)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Hold the work folder in the first process, and see in all which images are missing.
        `UserError` in all of them if it is held already, or is not the same folder."""
        first = super().working() if processes.is_first() else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            with processes.together():
                stack.enter_context(first)
            # named as files that are not complete yet, which the next run removes
            shared_folder.check(self.work.path, f".{SETTINGS}.", self._advice())
            if not processes.is_first():
                self.scan()
                self.resumed = any(self.finished(name) for name in self.series)
            processes.wait()  # nobody writes before all have looked
            yield

    def _advice(self) -> str:
        return (
            f"--out={self.out} has to be on a file system that all processes share (or use "
            "--shard, and copy the parts together)"
        )

    def gather(self) -> None:
        """Wait for all processes, and see their files. `LostProcess` if one is gone."""
        processes.wait()
        if processes.is_first():
            self.scan()


def open_store(
    folder: FolderFlags,
    stem: str,
    description: dict,
    series: Mapping[str, Series] | None = None,
) -> BatchStore:
    """Return the store of this process alone, or of all processes (`FolderFlags.open`)."""
    if processes.count() == 1:
        return folder.open(stem, description, series)
    return SharedStore(folder.path, description, overwrite=folder.overwrite, series=series)
