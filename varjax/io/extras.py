"""Optional packages: imported on first use, and missed with a message that says what to install."""

import importlib
from types import ModuleType

from varjax.errors import UserError


class MissingExtra(UserError):
    """An optional package is not installed; the message holds the pip command."""


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`, which comes with the optional dependencies `extra` of pyproject.toml.

    Raises:
      MissingExtra: naming the package, what it is needed for (`purpose`) and the pip command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is there, but something that it needs is not
        raise MissingExtra(
            f"{purpose} needs the package {module.split('.')[0]}, which is not installed: "
            f"run `pip install -e '.[{extra}]'` in the folder of varjax"
        ) from None
