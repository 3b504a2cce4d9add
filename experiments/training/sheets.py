"""Sheets of pictures that show how a training run is going: reconstructions, and samples."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.images import save_grid
from experiments.training.mesh import TrainingMesh
from experiments.training.settings import TrainingSettings
from experiments.training.var_trainer import TransformerStage
from experiments.training.vqvae_trainer import VQVAEStage
from varjax.codecs.autoencoder import ImageCodec
from varjax.generation.generator import Generator
from varjax.models.model import Model
from varjax.storage.pictures import to_uint8

PICTURES = 8  # of a sheet of reconstructions, and the most classes of a sheet of samples
EACH = 4  # samples of each class


def wanted(settings: TrainingSettings, mesh: TrainingMesh) -> bool:
    """Whether sheets are drawn: on one device, where pillow is installed."""
    return bool(settings.sample_every and mesh.size == 1 and importlib.util.find_spec("PIL"))


def save_reconstructions(stage: VQVAEStage, state: dict, folder: Path, step: int) -> Path:
    """Write reconstructions/STEP.png: validation pictures above, and below what they become."""
    pairs = [pictures[:PICTURES] for pictures in stage.reconstructed(state)]
    path = folder / "reconstructions" / f"{step:06}.png"
    path.parent.mkdir(exist_ok=True)
    save_grid(path, np.concatenate(pairs), columns=len(pairs[0]))
    return path


class Samples:
    """Sheets samples/STEP.png: a row of pictures of each class, drawn by `varjax.Generator` with
    the sampling that the finished model recommends. Its program is compiled once.

    description: of the finished model, as `model.json` has it.
    """

    def __init__(self, codec: ImageCodec, description: Mapping):
        self._codec, self._description, self._program = codec, description, None

    def save(self, stage: TransformerStage, state: dict, folder: Path, step: int) -> Path:
        """Write a sheet that is drawn with the state's averaged weights."""
        classes = stage.config.num_classes
        chosen = np.linspace(0, classes - 1, min(classes, PICTURES)).round().astype(int)
        labels = chosen.repeat(EACH).tolist()
        parts = {"transformer": stage.model(state["ema"]), "codec": self._codec}
        parts = jax.tree.map(jnp.copy, parts)  # a generator arranges its weights in its own way
        generator = Generator(Model("training", parts, self._description), batch_size=PICTURES)
        generator.program = self._program
        images = to_uint8(generator(labels=labels))
        self._program = generator.program
        names = self._description.get("class_names") or range(classes)
        path = folder / "samples" / f"{step:06}.png"
        path.parent.mkdir(exist_ok=True)
        save_grid(path, images, [str(names[label]) for label in labels], columns=EACH)
        return path
