"""Pictures that show how a training run is going: reconstructions of the codec, and samples that
the transformer draws with its averaged weights."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from experiments.images import save_grid
from experiments.training.var_trainer import TransformerStage
from experiments.training.vqvae_trainer import VQVAEStage
from varjax.codecs.autoencoder import ImageCodec
from varjax.generation import hosts
from varjax.generation.generator import Generator
from varjax.models.model import Model
from varjax.storage.pictures import to_uint8

PICTURES = 8  # of a sheet of reconstructions
CLASSES, EACH = 8, 4  # of a sheet of samples: the most classes, and pictures of each
BATCH = 8


def possible(devices: int) -> bool:
    """Whether sheets are drawn: on one device, where pillow is installed."""
    return devices * hosts.count() == 1 and importlib.util.find_spec("PIL") is not None


def save_reconstructions(stage: VQVAEStage, state: dict, folder: Path, step: int) -> Path:
    """Write reconstructions/STEP.png: validation pictures above, what the codec makes of them
    below."""
    pairs = [pictures[:PICTURES] for pictures in stage.reconstructed(state)]
    return _save(folder / "reconstructions", step, np.concatenate(pairs), columns=len(pairs[0]))


class Samples:
    """Sheets samples/STEP.png: a row of pictures of each class, drawn by `varjax.Generator` with
    the sampling that the finished model recommends. Its program is compiled once.

    description: of the finished model, as `model.json` has it.
    """

    def __init__(self, stage: TransformerStage, codec: ImageCodec, description: Mapping):
        self._stage, self._codec, self._description = stage, codec, description
        classes = stage.config.num_classes
        chosen = np.linspace(0, classes - 1, min(classes, CLASSES)).round().astype(int)
        self._labels, self._program = [int(label) for label in chosen.repeat(EACH)], None

    def save(self, state: dict, folder: Path, step: int) -> Path:
        """Write a sheet with the state's averaged weights."""
        # copies: a generator arranges weights as its program takes them
        parts = {"transformer": self._stage.model(state["ema"]), "codec": self._codec}
        parts = jax.tree.map(lambda array: array.copy(), parts)
        generator = Generator(Model("training", parts, self._description), batch_size=BATCH)
        generator.program = self._program
        images = to_uint8(generator(labels=self._labels))
        self._program = generator.program
        names = self._description.get("class_names") or range(self._stage.config.num_classes)
        captions = [str(names[label]) for label in self._labels]
        return _save(folder / "samples", step, images, captions, columns=EACH)


def _save(
    folder: Path, step: int, images: np.ndarray, captions: list[str] | None = None, *, columns: int
) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{step:06}.png"
    save_grid(path, images, captions, columns)
    return path
