"""Processes of this package that commands start in the user's folder, which may hold an
`experiments` of its own."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def command(module: str) -> list[str]:
    """Return the beginning of a command. -P: Python does not look into the folder first."""
    return [sys.executable, "-P", "-m", module]


def environment() -> dict[str, str]:
    """Return the environment: the process finds this package, then what this one finds."""
    places = [str(ROOT), *(place or os.getcwd() for place in sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
