"""Curves of a training stage beside its history: history.csv for tables and plots, and event files
for TensorBoard where the package tensorboardX is installed (extra `train`)."""

import contextlib
import csv
import importlib
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from varjax.storage.atomic import write_text

CSV, EVENTS = "history.csv", "events"


def scalars(entry: Mapping) -> dict[str, float]:
    """Return {name: number} of an entry of the history; numbers inside others have names with
    slashes, as validation/per_scale/1."""
    found = {}
    for name, value in entry.items():
        if isinstance(value, list):
            value = dict(enumerate(value, 1))
        inner = scalars(value) if isinstance(value, Mapping) else {None: value}
        found |= {f"{name}/{key}" if key else str(name): number for key, number in inner.items()}
    return found


def write_csv(path: Path, lines: Iterable[str]) -> None:
    """Write a history, JSON lines, as a table with a column for every number."""
    rows = [scalars(json.loads(line)) for line in lines]
    text, columns = io.StringIO(), dict.fromkeys(name for row in rows for name in row)
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())


class Events(contextlib.AbstractContextManager):
    """Event files in a folder, from a step on; without tensorboardX there are none."""

    def __init__(self, folder: Path, start: int):
        with contextlib.suppress(ImportError):
            library = importlib.import_module("tensorboardX")
            # steps after the checkpoint that the run goes on from come again
            self._writer = library.SummaryWriter(str(folder), purge_step=start + 1)

    _writer = None

    def __exit__(self, *error) -> None:
        if self._writer:
            self._writer.close()

    def add(self, entry: Mapping) -> None:
        """Add the numbers of an entry of the history."""
        if self._writer:
            for name, value in scalars(entry).items():
                self._writer.add_scalar(name, value, entry["step"])
