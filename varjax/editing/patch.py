"""The edit of one image in a batch of others, each of which may be edited or not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varjax.editing import masks
from varjax.editing.edit import source_tokens
from varjax.engine.given import Given
from varjax.errors import UserError
from varjax.io import pictures
from varjax.model import Model


@dataclass(frozen=True, eq=False)
class Patch:
    """The edit of an image: the picture float32 [H, W, 3], and where it is drawn [H, W].

    tokens, kept: of the picture, and which of them stay [L].
    paste, feather: whether the picture's own pixels come back outside the mask, and how softly.
    """

    picture: np.ndarray
    drawn: np.ndarray
    tokens: np.ndarray
    kept: np.ndarray
    paste: bool = True
    feather: float = 0

    @classmethod
    def of(
        cls, model: Model, picture: np.ndarray, drawn: np.ndarray, paste: bool, feather: float = 0
    ) -> "Patch":
        """Encodes a picture uint8 [H, W, 3] for an edit. `UserError` if the mask cannot be, or lets
        no token be drawn."""
        found, drawn = masks.check_pictures(model, picture, 1), masks.check_masks(model, drawn, 1)
        kept = masks.kept_tokens(model, drawn)
        if kept.all() and drawn.any():
            raise UserError(
                "too little is to be drawn: not one token lies in the mask by half; paint more"
            )
        tokens = source_tokens(model, found)
        return cls(found[0], drawn[0], tokens[0], kept[0], paste, feather)

    def finish(self, image: np.ndarray) -> np.ndarray:
        """The drawn image float32 [H, W, 3] with the picture's own pixels where they belong."""
        if not self.paste:
            return image
        return masks.paste(image[None], self.picture[None], self.drawn[None], self.feather)[0]


def read_own_size(model: Model, data: bytes, name: str, *, mask: bool = False) -> np.ndarray:
    """A picture uint8 [H, W, 3] of the model's size, or a mask [H, W] of which some is drawn, from
    the bytes of a file. `UserError` for others, before a pixel is decoded where the size is wrong.
    """
    given, (height, width) = pictures.size(data, name), model.pixels
    found = None
    if sorted(given) == sorted(model.pixels):  # a camera may have stored it on its side
        found = (pictures.read_mask if mask else pictures.read_picture)(data, name)
    if found is None or found.shape[:2] != model.pixels:
        words = f"{given[1]}x{given[0]} pixels, the model draws {width}x{height}: resize it"
        raise UserError(f"{name} has {words}")
    if mask and (found.all() or not found.any()):
        what = "white: all would be" if found.any() else "black: nothing would be"
        raise UserError(f"mask is all {what} drawn; paint what is to be drawn white")
    return found


def given_tokens(model: Model, patches: Sequence[Patch | None]) -> Given:
    """The tokens that a batch is given; None: an image of which all is drawn."""
    tokens = np.repeat(model.transformer.no_tokens(1), len(patches), axis=0)
    where = np.zeros(tokens.shape[:2], bool)
    for row, patch in enumerate(patches):
        if patch is not None:
            tokens[row], where[row] = patch.tokens, patch.kept
    return Given(tokens, where)
