"""What can be seen of a picture while it is drawn: after every scale, or every few lines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from varjax.io.images import to_uint8
from varjax.model import Model

LINES = 2  # of a token model, between two previews
GREY = np.uint8(128)


@dataclass(frozen=True)
class Waiting:
    """Nothing can be seen yet, and why."""

    words: str


@dataclass(frozen=True, eq=False)
class Preview:
    """What can be seen so far: a picture uint8 [H, W, 3], and the part that is done."""

    picture: np.ndarray
    part: float
    words: str


@jax.jit
def _decode(codec: nnx.Module, code_map: Float[Array, "B P Q C"]) -> Array:
    return codec.decode(code_map)


class Previews:
    """Pictures of what a model has drawn so far."""

    def __init__(self, model: Model):
        self.model = model

    def warm(self) -> None:
        """Compile what decodes, so that the first preview does not wait for it."""
        self._pixels(np.zeros((1, *self.model.code_map), np.float32))

    def of(self, seen: Iterator) -> Iterator[Waiting | Preview]:
        """Previews of what is seen, (number, code map or token); what is `Waiting` stays that."""
        show = self._token_preview() if self.model.draws_tokens else self._scale_preview
        for one in seen:
            shown = one if isinstance(one, Waiting) else show(*one)
            if shown is not None:
                yield shown

    def _scale_preview(self, number: int, code_map: np.ndarray) -> Preview | None:
        maps = self.model.config.schedule.maps
        if number + 1 == len(maps):
            return None  # the picture itself comes at once
        (h, w), part = maps[number], (number + 1) / len(maps)
        return Preview(self._pixels(code_map), part, f"scale {number + 1}: {h} x {w}")

    def _token_preview(self) -> Callable[[int, np.ndarray], Preview | None]:
        rows, columns = self.model.code_map[:2]
        places = {int(p): i for i, p in enumerate(self.model.geometry.schedule.places)}
        tokens = np.zeros((1, rows * columns), np.int32)

        def show(number: int, token: np.ndarray) -> Preview | None:
            place = places.get(number)
            if place is None:  # a new line
                return None
            tokens[0, place] = token.reshape(-1)[0]
            done = place + 1
            if done % (LINES * columns) or done == tokens.size:
                return None
            codes = self.model.codec.code_map(jax.numpy.asarray(tokens), (rows, columns))
            picture = self._pixels(codes)
            picture[done // columns * (picture.shape[0] // rows) :] = GREY
            return Preview(picture, done / tokens.size, f"line {done // columns} of {rows}")

        return show

    def _pixels(self, code_map) -> np.ndarray:
        decoded = _decode(self.model.codec, jax.numpy.asarray(code_map))
        return to_uint8((np.asarray(decoded) + 1) / 2)[0]
