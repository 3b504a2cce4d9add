"""Pictures and masks of an edit, and which tokens a mask keeps.

The rule is that of VAR's notebook on editing: the mask is resized bilinearly to every scale and cut
at 0.5; scales of at most three tokens are wholly the picture's. The notebook keeps the first scales
even where nothing of the picture is kept. Here such a mask gives no token at all, so that the edit
is what `varjax.generate` draws.

Letters: N images, H x W pixels, L tokens of an image.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32

from varjax.core.errors import UserError, show
from varjax.core.maps import bilinear_matrix
from varjax.models.model import Model
from varjax.storage.values import as_array

WHOLE = 3  # scales of at most so many tokens are wholly the picture's
CUT = 0.5 + 1e-6  # a place on the edge is drawn; the margin is for rounding
WHITE = 255
LARGEST_FEATHER = 64  # pixels; squares of distances stay far inside 16 bits
MASK_WANTED = (
    "give an array [H, W] or [N, H, W] of True (to be drawn) and False (kept), of 1 and 0 or of 255"
    " and 0"
)
PICTURES_WANTED = "give uint8, or floats in [0, 1], [H, W, 3] or [N, H, W, 3]"


def check_pictures(model: Model, images: object, count: int) -> Float[np.ndarray, "N H W 3"]:
    """The pictures of `count` edits, float32 in [0, 1]. A single one serves all edits. `UserError`
    if they are no pictures, or of another size than the model draws."""
    array = as_array("images", images)
    whole = array.dtype == np.uint8 or jnp.issubdtype(array.dtype, jnp.floating)
    if not whole or array.ndim not in (3, 4) or array.shape[-1] != 3 or not array.size:
        raise UserError(
            f"images have shape {array.shape} and type {array.dtype}: {PICTURES_WANTED}"
        )
    array = array[None] if array.ndim == 3 else array
    if array.dtype == np.uint8:
        array = array.astype(np.float32) / np.float32(255)
    elif not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
        raise UserError(
            f"images of type {array.dtype} hold numbers outside [0, 1]: give uint8, or floats "
            f"in [0, 1]"
        )
    return _one_each("images", array.astype(np.float32), model, count)


def check_masks(model: Model, mask: object, count: int) -> Bool[np.ndarray, "N H W"]:
    """The masks of `count` edits: what is to be drawn. A single one serves all edits. `UserError`
    for a mask that is none, grey, or of another size than the model draws."""
    array = as_array("mask", mask)
    number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)
    complex_ = jnp.issubdtype(array.dtype, jnp.complexfloating)
    if not number or complex_ or array.ndim not in (2, 3) or not array.size:
        raise UserError(f"mask has shape {array.shape} and type {array.dtype}: {MASK_WANTED}")
    array = array[None] if array.ndim == 2 else array
    values = array.astype(np.float64)  # exact for all that matter; types of 8 bits lack 255
    white = values == (WHITE if (values == WHITE).any() else 1)
    if (grey := ~(white | (values == 0))).any():
        found = show(array[grey].flat[0].item())
        raise UserError(f"mask holds {found}, which is grey: {MASK_WANTED}")
    return _one_each("mask", white, model, count)


def _one_each(name: str, array: np.ndarray, model: Model, count: int) -> np.ndarray:
    """An array for each edit, of the size that the model draws."""
    if array.shape[1:3] != model.pixels:
        given, own = ("x".join(map(str, pair)) for pair in (array.shape[1:3], model.pixels))
        raise UserError(
            f"{name} of {given} pixels (height x width): {model.name} draws {own}, resize it"
        )
    if len(array) not in (1, count):
        raise UserError(f"{len(array)} {name} for {count} edits: give one for each, or one for all")
    return np.broadcast_to(array, (count, *array.shape[1:]))


def kept_tokens(model: Model, drawn: Bool[np.ndarray, "N H W"]) -> Bool[np.ndarray, "N L"]:
    """Returns which tokens stay those of the picture. `UserError` if the model draws row by row,
    and something is kept behind what is drawn."""
    by_token = model.draws_tokens
    keep = (~drawn).astype(np.float64)
    parts = []
    for size in model.config.token_maps:
        rows, columns = (bilinear_matrix(n, m) for n, m in zip(keep.shape[1:], size, strict=True))
        resized = np.einsum("nhw,ph,qw->npq", keep, rows.astype(float), columns.astype(float))
        parts.append(resized.reshape(len(keep), -1) > CUT)
        if not by_token and size[0] * size[1] <= WHOLE:  # kept where anything is
            parts[-1][:] = keep.any(axis=(1, 2))[:, None]
    kept = np.concatenate(parts, axis=1)
    if by_token and (kept[:, 1:] & ~kept[:, :-1]).any():
        raise UserError(
            f"{model.name} draws its tokens row by row and cannot look ahead: what is drawn must be"
            f" the end of the picture, as all rows below a line; mask everything behind the first"
            f" pixel that is to be drawn"
        )
    return kept


def paste(
    images: Float[np.ndarray, "N H W 3"],
    pictures: Float[np.ndarray, "N H W 3"],
    drawn: Bool[np.ndarray, "N H W"],
    feather: float = 0.0,
) -> Float[np.ndarray, "N H W 3"]:
    """Returns drawn images with the pictures' own pixels outside the masks.

    feather: pixels outside the masks over which drawn images fade into the pictures. Both show the
    same there, but for tokens that a mask cuts; inside, what was replaced would shine through.
    """
    if not feather:
        return np.where(drawn[..., None], images, pictures)
    share = weights(drawn, feather)[..., None]
    return np.where(share > 0, share * images + (1 - share) * pictures, pictures)


def weights(drawn: Bool[np.ndarray, "N H W"], feather: float) -> Float32[np.ndarray, "N H W"]:
    """The shares of the drawn images: 1 in the masks, 1 - d / (feather + 1) at a distance of d
    pixels up to `feather`, and 0 beyond."""
    reach = int(feather)
    beyond = (reach + 1) ** 2
    squares = np.where(drawn, 0, beyond).astype(np.int16)
    for axis in (1, 2):  # the square of a distance is the sum of the axes'
        lines = squares.swapaxes(1, axis)
        before = lines.copy("K")
        for step in range(1, min(reach + 1, lines.shape[1])):
            ahead, behind = lines[:, step:], lines[:, :-step]
            np.minimum(ahead, before[:, :-step] + step**2, out=ahead)
            np.minimum(behind, before[:, step:] + step**2, out=behind)
    fading = 1 - np.sqrt(squares, dtype=np.float32) / np.float32(feather + 1)
    return np.where(squares <= feather**2, fading, np.float32(0))
