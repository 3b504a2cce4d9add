"""Files of finished steps in the folder of an unfinished run: JSON objects that say which run and
which step they belong to. They appear whole or not at all."""

import pathlib
from collections.abc import Mapping

from experiments.batch_files import Damaged
from varjax.errors import UserError
from varjax.io.json_text import json_text
from varjax.storage.atomic import write_text
from varjax.storage.manifest import read_json

PREFIX = "step-"
OWN = SETTINGS, NAME = ("settings", "name")


def path_of(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The file of a step."""
    return folder / f"{PREFIX}{name}.json"


def write(folder: pathlib.Path, name: str, settings: str, content: Mapping) -> None:
    """Keep what a step found. settings: digest of the run's settings."""
    own = {SETTINGS: settings, NAME: name}
    write_text(path_of(folder, name), json_text({**own, **content}))


def read(folder: pathlib.Path, name: str, settings: str) -> dict | None:
    """What a step found; None if it is not finished, or its file is damaged or of another run."""
    path = path_of(folder, name)
    try:
        content = _content(path) if path.is_file() else {}
    except Damaged:
        return None
    if [content.get(key) for key in OWN] != [settings, name]:
        return None
    return {key: value for key, value in content.items() if key not in OWN}


def settings_of(path: pathlib.Path) -> str:
    """The digest of the settings that a file was made with. `Damaged` if it does not say."""
    found = _content(path).get(SETTINGS)
    if not isinstance(found, str):
        raise Damaged("it does not say what it is")
    return found


def _content(path: pathlib.Path) -> dict:
    try:
        found = read_json(path)
    except UserError as error:
        raise Damaged(str(error)) from None
    if not isinstance(found, dict):
        raise Damaged("it holds no object")
    return found
