"""The summary that a command prints: lines of a name and a text."""

from collections.abc import Sequence


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """Return a line for each (name, text), with all texts in one column."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)
