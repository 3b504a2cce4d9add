"""Tokens, or their bits, that replace the draw: --given_tokens, --given_bits, --given_scales."""

import numpy as np

from varjax.cli.flags import CommandFlags, about
from varjax.errors import UserError
from varjax.model import Model

KINDS = {  # what a model calls its tokens: how a file holds them
    "tokens": "int [N, L]",
    "bits": "uint8 [N, L of the image tokenizer, bits of a code]",
}


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

    def resolve(self, model: Model, num_images: int) -> tuple[np.ndarray | None, int | None]:
        """(tokens as the model draws them, of all images, or None; how many scales take them, None
        for all), checked against the model."""
        mine, schedule = model.transformer.token_name, model.config.schedule
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
            return None, None
        count = schedule.num_scales if scales is None else scales
        with about(self._files[mine]):
            array = _read(path, mine)
            return model.transformer.tokens_from_file(array, num_images, count), scales


def _read(path: str, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return archive[name]
    except Exception as error:  # NumPy raises many kinds over damaged files
        raise UserError(f"cannot read array `{name}` of an .npz file: {error}") from None
