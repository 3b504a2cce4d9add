"""Folders of varjax in the user's cache folder."""

import os
from pathlib import Path


def cache_folder(*names: str) -> Path:
    """`varjax/NAMES` in XDG_CACHE_HOME, else in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home).joinpath("varjax", *names)


def converted(name: str) -> Path:
    """The folder that `python -m ported_weights --model=NAME` writes unless it is told another one,
    and that `--checkpoint=NAME` and `varjax.load(NAME)` read."""
    return cache_folder("checkpoints", name)
