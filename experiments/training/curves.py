"""Curves of a training stage: its history as a table, and as events for TensorBoard."""

import csv
import importlib
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from varjax.storage.atomic import write_text


def scalars(entry: Mapping) -> dict[str, float]:
    """Return {name: number} of an entry of the history. Names of numbers inside others have
    slashes, as validation/per_scale/1."""
    found = {}
    for name, value in entry.items():
        inner = dict(enumerate(value, 1)) if isinstance(value, list) else value
        nested = scalars(inner) if isinstance(inner, Mapping) else {"": inner}
        found |= {f"{name}/{key}".rstrip("/"): number for key, number in nested.items()}
    return found


def write_csv(path: Path, lines: Iterable[bytes]) -> None:
    """Write a history, JSON lines, as a table with a column for every number."""
    rows = [scalars(json.loads(line)) for line in lines]
    text, columns = io.StringIO(), dict.fromkeys(name for row in rows for name in row)
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())


def events(folder: Path, start: int):
    """A writer of event files, where tensorboardX is installed (extra `train`); else None. Events
    after the step `start` are no longer shown: the run goes on from there."""
    try:
        return importlib.import_module("tensorboardX").SummaryWriter(folder, purge_step=start + 1)
    except ImportError:
        return None
