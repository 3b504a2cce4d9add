"""Previews of a picture while it is drawn: after every scale, or every few lines.

make = functools.partial(varjax.Generator, model, "headkv", 0.25, batch_size=1)
watched = Watched(make, varjax.Build())
show = Previews(model).of_picture()
watched.run(condition, np.zeros(1, np.int32), hear=lambda *seen: print(show(*seen)))
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatchmethod

import jax
import numpy as np
from jaxtyping import PyTree

from varjax.core.sequence import Schedule, TokenSequence
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.models.model import Model
from varjax.storage.pictures import to_uint8

LINES = 2  # of a token model, between two previews
GREY = np.uint8(128)


class Watched:
    """A generator each of whose runs may be heard by somebody else.

    make: returns the generator from `build=...`. build: all of it but `watch`.
    """

    def __init__(self, make: Callable[..., Generator], build: Build):
        # JAX keeps what it has traced for a while, and with it who hears: so that must not know the
        # generator, whose programs would stay as long
        self._heard = heard = [None]

        def watch(number, what) -> None:
            if heard[0] is not None:
                heard[0](int(number), np.array(what))

        self.generator = make(build=replace(build, watch=watch))

    def run_batch(
        self, *arguments, hear: Callable[[int, np.ndarray], None] | None, **options
    ) -> tuple[dict, PyTree]:
        """`Generator.run_batch`; `hear` is told of every scale or token before it returns, on
        another thread (`Generator`: watch)."""
        self._heard[0] = hear
        try:
            found = self.generator.run_batch(*arguments, **options)
            jax.effects_barrier()
            return found
        finally:
            self._heard[0] = None


@dataclass(frozen=True, eq=False)
class Preview:
    """A preview: a picture uint8 [H, W, 3], the part that is done, and words."""

    picture: np.ndarray
    part: float
    words: str


Show = Callable[[int, np.ndarray], Preview | None]


_decode = jax.jit(lambda codec, code_map: codec.decode(code_map))


@dataclass(frozen=True, eq=False)
class Previews:
    """Pictures of what a model has drawn so far."""

    model: Model

    def warm(self) -> None:
        """Compiles what decodes, so that the first preview does not wait for it."""
        self._pixels(np.zeros((1, *self.model.code_map), np.float32))

    def of_picture(self, most: int | None = None) -> Show:
        """Returns what makes the previews of one picture, at most so many, from the number of each
        scale and the code map after it, or of each token and the token."""
        return self._of(self.model.geometry.schedule, most)

    @singledispatchmethod
    def _of(self, order: Schedule, most: int | None) -> Show:
        maps, chosen = order.maps, _chosen(order.num_scales, most)

        def show(number: int, code_map: np.ndarray) -> Preview | None:
            if number not in chosen:
                return None
            (h, w), part = maps[number], (number + 1) / len(maps)
            return Preview(self._pixels(code_map), part, f"scale {number + 1}: {h} x {w}")

        return show

    @_of.register
    def _(self, order: TokenSequence, most: int | None) -> Show:
        rows, columns = self.model.code_map[:2]
        places = {int(p): i for i, p in enumerate(order.places)}
        chosen = _chosen(rows // LINES, most)
        tokens = np.zeros((1, rows * columns), np.int32)

        def show(number: int, token: np.ndarray) -> Preview | None:
            place = places.get(number)
            if place is None:  # a new line
                return None
            tokens[0, place] = token.reshape(-1)[0]
            stage, rest = divmod(place + 1, LINES * columns)
            if rest or stage - 1 not in chosen:
                return None
            codes = self.model.codec.code_map(jax.numpy.asarray(tokens), (rows, columns))
            picture = self._pixels(codes)
            line = stage * LINES
            picture[line * (picture.shape[0] // rows) :] = GREY
            return Preview(picture, line / rows, f"line {line} of {rows}")

        return show

    def _pixels(self, code_map) -> np.ndarray:
        decoded = _decode(self.model.codec, jax.numpy.asarray(code_map))
        return to_uint8((np.asarray(decoded) + 1) / 2)[0]


def _chosen(stages: int, most: int | None) -> set[int]:
    """Stages, at most so many, after which a preview is shown."""
    last = stages - 1  # after it comes the picture itself
    count = last if most is None else min(most, last)
    return {int(n) for n in np.linspace(0, last, count + 1)[1:] - 1} if count else set()
