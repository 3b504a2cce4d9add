"""Tokens, or their bits, that replace the draw: --given_tokens, --given_bits, --given_scales."""

from dataclasses import dataclass

import numpy as np

from experiments.settings import AbstractModel
from varjax.cli.command_line import CommandFlags
from varjax.errors import UserError

KINDS = {  # what a model calls its tokens: how a file holds them
    "tokens": "int [N, L]",
    "bits": "uint8 [N, L of the image tokenizer, bits of a code]",
}


@dataclass(frozen=True, eq=False)
class Given:
    """tokens: as the model draws them, of all images; None: nothing is forced. scales: so many of
    the first ones take them; None: all."""

    tokens: np.ndarray | None = None
    scales: int | None = None

    def take(self, index: np.ndarray) -> np.ndarray | None:
        """Tokens of some images."""
        return None if self.tokens is None else self.tokens[index]


class GivenFlags:
    """One flag per kind of token."""

    def __init__(self, flags: CommandFlags):
        self._files = {
            kind: flags.string(
                f"given_{kind}", None, f"npz file with `{kind}` {shape} that replace the draw."
            )
            for kind, shape in KINDS.items()
        }
        self._scales = flags.integer(
            "given_scales", None, "The first so many scales take what is given; default: all."
        )

    def resolve(self, model: AbstractModel, num_images: int) -> Given:
        """Checked against the model."""
        mine, schedule = model.pipeline.token_name, model.geometry.schedule
        for kind, holder in self._files.items():
            if holder.value and kind != mine:
                raise UserError(f"--given_{kind}: {model.name} draws {mine}: use --given_{mine}")
        path, scales = self._files[mine].value, self._scales.value
        if scales is not None and (not path or not 0 <= scales <= schedule.num_scales):
            raise UserError(
                f"--given_scales={scales}: 0 to {schedule.num_scales} scales, together with "
                f"--given_{mine}=FILE"
            )
        if not path:
            return Given()
        count = schedule.num_scales if scales is None else scales
        try:
            array = _read(path, mine)
            return Given(model.pipeline.tokens_from_file(array, num_images, count), scales)
        except UserError as error:
            raise UserError(f"--given_{mine}={path}: {error}") from None


def _read(path: str, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return archive[name]
    except Exception as error:  # NumPy raises many kinds over damaged files
        raise UserError(f"cannot read array `{name}` of an .npz file: {error}") from None
