"""The varjax checkpoint: a folder with `model.json` and one Orbax tree of parameters.

    DIR/model.json     what the model is: format version, family, both configurations, schedule,
                       classes, recommended sampling, where the weights came from
    DIR/params/        Orbax tree {"transformer": {...}, "codec": {...}}

A checkpoint appears as a whole or not at all. Reading checks the description, then the names and
shapes of all stored arrays, before a single weight is read.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flax import nnx

from varjax.errors import UserError
from varjax.models import parameters, registry
from varjax.schedule import Schedule
from varjax.storage import arrays as parameter_files
from varjax.storage import manifest as description_file
from varjax.storage.atomic import new_folder

PARTS = ("transformer", "codec")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `metadata` is the content of `model.json`."""

    family: str
    transformer: nnx.Module
    codec: nnx.Module
    metadata: dict
    path: Path

    @property
    def schedule(self) -> Schedule:
        return Schedule(tuple((h, w) for h, w in self.metadata["schedule"]))

    @property
    def class_names(self) -> list[str] | None:
        return self.metadata.get("class_names")

    @property
    def sampling(self) -> dict:
        """Recommended sampling, by the names of `sampling.RECOMMENDABLE`: cfg, tau,
        cfg_insertion_layer, top_k, top_p, more_smooth."""
        return dict(self.metadata.get("sampling", {}))


def demo_directory() -> Path:
    """Folder of the embedded demo checkpoint."""
    spec = importlib.util.find_spec("ported_weights")
    for root in spec.submodule_search_locations or [] if spec else []:
        if (Path(root) / "demo" / description_file.NAME).is_file():
            return Path(root) / "demo"
    raise UserError(
        "the embedded demo checkpoint is not installed: give --checkpoint=DIR, or install varjax"
        " from a full source tree (folder ported_weights/demo)"
    )


# --- writing --------------------------------------------------------------------------------------


def save(
    directory,
    *,
    family: str,
    transformer: nnx.Module,
    codec: nnx.Module,
    metadata: Mapping | None = None,
    dtype=None,
    overwrite: bool = False,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint.

    Args:
      directory: the folder to create.
      family: a name of `varjax.models.registry.FAMILIES`.
      transformer, codec: modules with a `config`.
      metadata: further entries of `model.json`: class_names, sampling, sources,
        converter_version, or anything that JSON can hold. Computed entries win.
      dtype: storage type of floating parameters; by default they stay as they are.
      overwrite: replace `directory` if it exists.
      also: writes what else belongs into the folder (a text encoder) before the folder appears.

    Raises:
      UserError: `directory` exists, or cannot be written, or the entries do not fit the model.
        Nothing is left behind.
    """
    modules = {"transformer": transformer, "codec": codec}
    free = {k: v for k, v in (metadata or {}).items() if k != "files"}  # files are those written
    description_file.check_entries(directory, family, free, transformer.config, codec.config)
    with new_folder(directory, overwrite=overwrite) as folder:
        arrays = {
            f"{part}/{name}": array
            for part, module in modules.items()
            for name, array in parameter_files.host_arrays(module, dtype).items()
        }
        parameter_files.write(folder / "params", arrays)
        content = description_file.compose(family, transformer.config, codec.config, arrays)
        content["files"] = description_file.file_records(folder / "params")
        if also is not None:
            also(folder)
        description_file.write(folder, {**(metadata or {}), **content})


# --- reading --------------------------------------------------------------------------------------


def read_description(directory) -> dict:
    """Content of `model.json`, checked; no weights are read. `UserError` if it is not usable."""
    return description_file.read(Path(directory))


def load_abstract(directory) -> Checkpoint:
    """As `load`, but the modules hold shapes and types only: no weights are read."""
    path = Path(directory)
    content = description_file.read(path)
    return Checkpoint(content["family"], *_abstract_modules(content, path), content, path)


def load(directory, dtype=None, codec_dtype=None) -> Checkpoint:
    """Read a checkpoint onto the default device.

    Args:
      directory: folder of the checkpoint.
      dtype: type of the transformer's floating parameters; None keeps the stored types.
      codec_dtype: likewise for the codec.

    Raises:
      UserError: not a checkpoint, another format version, names or shapes that do not fit the
        configuration (all of them in one message), or damaged files.
    """
    described = load_abstract(directory)
    modules = dict(zip(PARTS, (described.transformer, described.codec), strict=True))
    folder = described.path / "params"
    description_file.check_files(folder, described.metadata)
    expected = {f"{p}/{n}": x for p in PARTS for n, x in parameters.named(modules[p]).items()}
    dtypes = dict(zip(PARTS, (dtype, codec_dtype), strict=True))
    arrays = parameter_files.read(
        *(folder, expected, description_file.NAME), lambda name: dtypes[name.split("/")[0]]
    )
    filled = [
        parameters.fill(modules[p], {n: arrays[f"{p}/{n}"] for n in parameters.named(modules[p])})
        for p in PARTS
    ]
    return Checkpoint(described.family, *filled, described.metadata, described.path)


def _abstract_modules(content: Mapping, path: Path) -> list[nnx.Module]:
    family = registry.family(content["family"])
    configs = description_file.configurations(path / description_file.NAME, content)
    parts = (family.transformer, family.codec)
    return [part.abstract(config) for part, config in zip(parts, configs, strict=True)]
