"""Names of files that follow from what others wrote: prompt sets, policies, folders of models.

Every file that is named after such a text goes through `inside`. So nothing is written outside of
the folder where it belongs, and nothing fails late because a file system refuses a name.
"""

import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from varjax.core.errors import UserError
from varjax.storage.atomic import LONGEST_NAME

_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"\\|?*\ud800-\udfff]')
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # of Windows


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`; slashes divide the names of folders and the file.
    `UserError`: a part that leads elsewhere or is no name on every usual file system."""
    parts = name.split("/")
    for part in parts:
        if problem := _problem(part):
            raise UserError(f"{name!a:.80} cannot be the name of a file: {problem}; rename it")
    return folder.joinpath(*parts)


def _problem(part: str) -> str | None:
    if part.startswith("."):
        return "a name must not begin with a dot"
    if not part or part[-1] in " .":
        return "a name must not be empty or end with a space or a dot"
    if wrong := _FORBIDDEN.search(part):
        return f"{wrong.group()!a} is not allowed in names"
    if _DEVICE.match(part):
        return f"{part!a:.20} names a device on Windows"
    if len(part.encode()) > LONGEST_NAME:
        return f"names have at most {LONGEST_NAME} bytes"
    return None


def check_distinct(names: Iterable[str]) -> None:
    """`UserError` if two names are the same file on systems that ignore capitals, or the way in
    which an accent is encoded."""
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name).casefold()
        if other := seen.get(key):
            raise UserError(
                f"{other!a:.80} and {name!a:.80} are the same file on many systems: rename one"
            )
        seen[key] = name


# --- folders of varjax in the user's cache folder ---


def cache_folder(*names: str) -> Path:
    """`varjax/NAMES` in XDG_CACHE_HOME, else in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home).joinpath("varjax", *names)


def converted(name: str) -> Path:
    """The folder that `python -m ported_weights --model=NAME` writes unless it is told another one,
    and that `--checkpoint=NAME` and `varjax.load(NAME)` read."""
    return cache_folder("checkpoints", name)
