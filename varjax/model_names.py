"""Names of published models: what they stand for here, and how their weights come here."""

from pathlib import Path

from varjax.models import registry
from varjax.storage.names import converted


def convert_command(name: str) -> str:
    """The command that gets and converts the weights of a published model."""
    return f"python -m ported_weights --model={name} --source=hub"


def found(name_or_directory: str | Path | None) -> str | Path | None:
    """The path to read for a checkpoint's name: a published name stands for what
    `python -m ported_weights --source=hub` has converted (`varjax.storage.names`), if it has and
    there is no folder of that name here; anything else stands for itself."""
    name = str(name_or_directory)
    if name in registry.PRESETS and not Path(name).exists():
        folder = converted(name)
        return folder if folder.is_dir() else name
    return name_or_directory
