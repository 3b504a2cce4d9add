"""Fine-tuning: runs that begin with the weights of a checkpoint, a VAR or a LlamaGen.

Sizes are the checkpoint's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

import numpy as np
from flax import nnx

from experiments.training.data import Dataset
from experiments.training.settings import FAMILIES, FIELDS, TrainingSettings, shown
from varjax.calibration.files import model_digest
from varjax.codecs.vq import VQConfig
from varjax.codecs.vqvae import VQVAEConfig
from varjax.core.errors import UserError
from varjax.models import loading, registry
from varjax.models.llamagen import LlamaGenConfig
from varjax.models.var import VARConfig
from varjax.storage import checkpoint, parameters

CLASSES = "class_embedding"  # the parameter of both families that has a row for each class
# defaults: smaller steps than from nothing, and a codec that has its codes already
DEFAULTS = {"vqvae_lr": 1e-4, "var_lr": 1e-4, "autoencoder_steps": 0}
FROM_NOTHING = ("autoencoder_steps", "reseed_every")


def settings(init: str, **given) -> "FineTuning":
    """Return the settings of a run that begins with the checkpoint `init`. `UserError` if there is
    no such checkpoint, it cannot be trained, or something given contradicts.

    init: a folder, or a name that `varjax.load` knows. given: fields of `TrainingSettings`; sizes
      may be left out, and have to be the checkpoint's.
    """
    start = Start.read(init)
    refused = {name: f"the codec of init={init} has its codes" for name in FROM_NOTHING}
    sizes = {name: has for name, has in start.held.items() if name != "label_drop"}
    for name, has in sizes.items():
        if given.get(name, has) != has:
            refused[name] = f"init={init} has {name}={shown(has)}, which training does not change"
    if given.get("family", start.family) != start.family:
        refused = {"family": f"init={init} is of the family {start.family}"}
    for name in given:
        if name in refused:
            why = refused[name]
            raise UserError(f"{name}={shown(given[name])} given, but {why}: leave it out")
    if given.get("label_drop") and not start.held["label_drop"]:
        raise UserError(
            f"label_drop={given['label_drop']} given, but init={init} was trained without a class"
            " for none: choose 0"
        )
    own = {**start.held, **DEFAULTS, **given, **sizes}
    return FineTuning(start=start, **{**FAMILIES[start.family], "family": start.family, **own})


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run begins with, of which nothing but the description is read.

    digest: it tells checkpoints apart (`varjax.calibration.model_digest`).
    transformer, codec: configurations.
    description: the content of `model.json`.
    """

    path: str = field(compare=False)
    family: str
    digest: str
    transformer: VARConfig | LlamaGenConfig
    codec: VQVAEConfig | VQConfig
    description: Mapping = field(compare=False, repr=False)

    @classmethod
    def read(cls, path: str) -> "Start":
        """Describe a checkpoint. `UserError` unless it can be trained further."""
        found = loading.describe(registry.found(path))
        family = found.family.name
        configs = {name: part.config for name, part in found.parts.items()}
        transformer, codec = configs["transformer"], configs["codec"]
        if family not in FAMILIES:
            raise UserError(
                f"init={path} is of the family {family}: {' and '.join(FAMILIES)} can be trained,"
                " which draw from labels"
            )
        problems = {
            f"draws from {transformer.condition}: training takes labels": (
                transformer.condition != "labels"
            ),
            "has no weights here: give the folder of a converted checkpoint": not found.directory,
            "has token maps that are no squares: training takes square pictures": (
                family == "var" and any(h != w for h, w in transformer.schedule.maps)
            ),
            "has a codec that does not take pictures in RGB": (
                getattr(codec, "in_channels", 3) != 3 or not getattr(codec, "has_encoder", True)
            ),
        }
        for problem, there in problems.items():
            if there:
                raise UserError(f"init={path} {problem}")
        return cls(path, family, model_digest(found.metadata), transformer, codec, found.metadata)

    @cached_property
    def held(self) -> dict:
        """{setting: value} of all settings that describe what the checkpoint holds: sizes, and how
        often labels were dropped in training."""
        parts = zip((self.codec, self.transformer), FIELDS[self.family], strict=True)
        found = {n: getattr(part, field) for part, own in parts for field, n in own.items()}
        if self.family == "llamagen":
            return found | {"image_size": self.transformer.grid[0] * self.codec.downsample}
        sides = tuple(side for side, _ in self.transformer.schedule.maps)
        return found | {"image_size": sides[-1] * self.codec.downsample, "patch_nums": sides}

    def load(self, part: str) -> nnx.Module:
        """A part in float32, in host memory. `UserError` if files are damaged."""
        folder = loading.describe(registry.found(self.path)).directory
        wanted = {part: "float32"}
        return checkpoint.load(folder, registry.CATALOGUE, wanted, on_host=True)[0][part]

    def transformer_parameters(self, rows: Sequence[int], seed: int) -> dict:
        """{name: array} of the transformer. rows: for each class of the data its class here, or -1
        (`classes`): then its embedding is drawn, with the mean and spread of those that are there.
        """
        found = parameters.named(self.load("transformer"))
        table = found[CLASSES]
        count = self.transformer.num_classes
        old, null = table[:count], table[count:]
        drawn = np.random.default_rng((seed, len(rows))).standard_normal((len(rows), old.shape[1]))
        drawn = old.mean(0) + (old - old.mean(0)).std() * drawn
        rows = np.asarray(rows)
        own = np.where(rows[:, None] < 0, drawn, old[rows]).astype(table.dtype)
        return {**found, CLASSES: np.concatenate([own, null])}

    def classes(self, pictures: Dataset) -> tuple[list[int], str]:
        """For each class of the data the same class of the checkpoint, or -1; and a line about it.

        Classes are the same if they have the same name, or, where one side has no names, the same
        number and there are equally many.
        """
        count, names = self.transformer.num_classes, self.description.get("class_names")
        if names and pictures.class_names:
            rows = [names.index(n) if n in names else -1 for n in pictures.class_names]
        else:
            same = pictures.num_classes == count
            rows = list(range(count)) if same else [-1] * pictures.num_classes
        new = sum(row < 0 for row in rows)
        how = "by name" if names and pictures.class_names else "by number"
        line = f"{len(rows) - new} of {len(rows)} classes are classes of {self.path} ({how})"
        return rows, line + (f", embeddings of {new} are drawn anew" if new else "")


@dataclass(frozen=True, kw_only=True)
class FineTuning(TrainingSettings):
    """Settings of a run that begins with a checkpoint; make them by `settings`."""

    start: Start = field(metadata={"stages": (), "family": None, "valid": None})

    codec = property(attrgetter("start.codec"))

    def transformer(self, num_classes: int) -> VARConfig | LlamaGenConfig:
        return replace(self.start.transformer, num_classes=num_classes)

    def deciding(self, stage: str) -> dict:
        return super().deciding(stage) | {"init": self.start.digest}
