"""Tokens of the pictures, which the transformer is trained on: made once, in float32, and kept."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from varjax.codecs.vqvae.model import VQVAE
from varjax.errors import UserError
from varjax.storage.atomic import new_file
from varjax.training.data import Dataset, to_float
from varjax.training.settings import TrainingSettings


def write(path: Path, codec: VQVAE, pictures: Dataset, settings: TrainingSettings) -> None:
    """Tokenise training pictures, plain and mirrored, and some validation pictures."""
    encode = jax.jit(VQVAE.images_to_tokens)

    def tokens_of(images: np.ndarray) -> np.ndarray:
        size, found = min(settings.var_batch_size, len(images)), []
        for start in range(0, len(images), size):
            # the last picture fills up the last batch, so that one program serves all
            rows = np.minimum(np.arange(start, start + size), len(images) - 1)
            found.append(np.asarray(encode(codec, to_float(images[rows]))))
        return np.concatenate(found)[: len(images)]

    path.parent.mkdir(parents=True, exist_ok=True)
    most = settings.max_validation
    arrays = {
        "train": np.stack([tokens_of(pictures.train), tokens_of(pictures.train[:, :, ::-1])]),
        "train_labels": pictures.train_labels,
        "val": tokens_of(pictures.val[:most]),
        "val_labels": pictures.val_labels[:most],
    }
    with new_file(path) as file:
        np.savez_compressed(file, **arrays)


def read(path: Path, pictures: Dataset) -> Dataset:
    """`pictures` as int32 tokens: `train` [2, N, L], plain and mirrored; `val` [M, L]."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dataclasses.replace(pictures, **arrays)
    except Exception as error:  # NumPy raises many kinds over damaged files
        raise UserError(f"{path} is damaged ({error}): delete it to make it again") from error
