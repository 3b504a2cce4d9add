"""Where a command writes: one file, or a folder that may be continued."""

import pathlib

from experiments.run.batch_store import BatchStore
from varjax.cli.flags import CommandFlags
from varjax.errors import UserError
from varjax.storage.atomic import check_new_file


class FileFlags:
    """--NAME=FILE and --overwrite."""

    def __init__(
        self,
        flags: CommandFlags,
        name: str,
        help: str,
        *,
        default: str | None = None,
        required: bool = False,
    ):
        self._file = flags.string(name, default, help)
        self._overwrite = flags.boolean(
            "overwrite", False, f"Replace the --{name} file if it exists."
        )
        if required:
            flags.require(name)

    @property
    def path(self) -> pathlib.Path | None:
        """The file; None if none is wanted."""
        return pathlib.Path(self._file.value) if self._file.value else None

    def check(self) -> pathlib.Path | None:
        """Likewise. `UserError` unless it may be written there now."""
        if self.path is not None:
            overwrite = self._overwrite.value
            if self.path.is_file() and not overwrite:
                raise UserError(
                    f"{self.path} exists already: choose another file or add --overwrite"
                )
            check_new_file(self._file.value, overwrite=overwrite, flag=f"--{self._file.name}")
        return self.path


class FolderFlags:
    """--out and --overwrite of a command whose interrupted runs continue."""

    def __init__(self, flags: CommandFlags):
        self._overwrite = flags.boolean("overwrite", False, "Replace --out if it exists.")
        self._out = flags.string("out", None, "Output folder; default: a new one under results/.")

    def open(self, stem: str, description: dict) -> BatchStore:
        """The folder and its finished batches. stem: of the name under results/. description: what
        decides the results."""
        if self._out.value is None:
            return BatchStore.fresh(stem, description)
        out, overwrite = pathlib.Path(self._out.value), self._overwrite.value
        if out.exists() and not overwrite:
            raise UserError(f"{out} exists already: choose another folder or add --overwrite")
        return BatchStore(out, description, overwrite=overwrite)
