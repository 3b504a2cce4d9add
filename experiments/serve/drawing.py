"""Pictures that a server draws: in batches whose images have nothing in common, each with its own
condition, its own seed and number, and perhaps an edit; and previews of them meanwhile.

Image i of a request with seed s is image i of `experiments.run --seed=s` for the same class or
prompt, whoever else is in its batch: every image has a key of its own, folded from its seed and its
number. The program takes given tokens, so that edits share batches with images drawn freely.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jaxtyping import PyTree

from varjax.core.errors import UserError
from varjax.core.given import Given
from varjax.core.sequence import Schedule, TokenSequence
from varjax.editing import masks
from varjax.editing.edit import source_tokens
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.generation.kept import at_the_end
from varjax.models.model import Model
from varjax.storage import pictures

LINES = 2  # of a token model, between two previews
GREY = np.uint8(128)
Hear = Callable[[int, np.ndarray], None]  # of a scale and the code map after it, or of a token


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
    tokens = np.repeat(model.token_arrays.no_tokens(1), len(patches), axis=0)
    where = np.zeros(tokens.shape[:2], bool)
    for row, patch in enumerate(patches):
        if patch is not None:
            tokens[row], where[row] = patch.tokens, patch.kept
    return Given(tokens, where)


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

    @contextlib.contextmanager
    def heard_by(self, hear: Hear | None) -> Iterator[None]:
        """A run inside tells `hear` of every scale or token before this ends, on another thread."""
        self._heard[0] = hear
        try:
            yield
            jax.effects_barrier()
        finally:
            self._heard[0] = None


@dataclass(frozen=True, eq=False)
class Item:
    """One image that is to be drawn.

    condition: arrays of this image, leading axis 1. seed, number: of the request, and of the image
    in it. patch: what is edited; None: all is drawn. program: its own; None: any. hear, kept: who
    is told of it while it is drawn, and whether to tell what heads kept; both need a program.
    """

    condition: PyTree
    seed: int
    number: int
    patch: Patch | None = None
    program: Watched | None = None
    hear: Hear | None = None
    kept: bool = False


@dataclass(frozen=True, eq=False)
class Drawn:
    """A picture uint8 [H, W, 3], its tokens, and the seconds that its batch took.

    batch: the same object for all pictures of a batch. kept: bool [L, N, F], which tokens each head
    held at the end (`kept.at_the_end`), if that was asked for.
    """

    picture: np.ndarray
    tokens: np.ndarray
    seconds: float
    batch: object = field(repr=False)
    kept: np.ndarray | None = None


def draw(program: Generator | Watched, items: Sequence[Item]) -> list[Drawn]:
    """Draws at most a batch of items; a short batch repeats its last one. A `Watched` program draws
    one, as it asks to be heard and told of."""
    start, first, watched = time.perf_counter(), items[0], isinstance(program, Watched)
    generator = program.generator if watched else program
    padded = [*items, *[items[-1]] * (generator.batch_size - len(items))]
    condition = jax.tree.map(lambda *a: np.concatenate(a), *(item.condition for item in padded))
    with program.heard_by(first.hear) if watched else contextlib.nullcontext():
        results, _ = generator.run_batch(
            condition,
            np.array([item.number for item in padded], np.int32),
            seed=np.array([item.seed for item in padded], np.int32),
            given=given_tokens(generator.model, [item.patch for item in padded]),
            keep_cache=False,
        )
    images, tokens = np.asarray(results["images"]), np.asarray(results["tokens"])
    batch, seconds, kept, found = object(), time.perf_counter() - start, None, []
    if first.kept:
        kept = at_the_end(generator.plan, results["contents"])
    for item, image, own in zip(items, images, tokens, strict=False):
        image = image if item.patch is None else item.patch.finish(image)
        found.append(Drawn(pictures.to_uint8(image[None])[0], own, seconds, batch, kept))
    return found


def draw_nothing(generator: Generator) -> None:
    """Compiles a program as `draw` needs it, and runs it once: the first run is slower."""
    size = generator.batch_size
    shapes = generator.model.transformer.condition_shapes(size)
    condition = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    nothing = given_tokens(generator.model, [None] * size)
    generator.run_batch(condition, np.zeros(size, np.int32), given=nothing, keep_cache=False)


# --- previews: after every scale, or every few lines ---


@dataclass(frozen=True, eq=False)
class Preview:
    """A preview: a picture uint8 [H, W, 3], the part that is done, and words."""

    picture: np.ndarray
    part: float
    words: str


Show = Callable[[int, np.ndarray], Preview | None]
_decode = jax.jit(lambda codec, code_map: codec.decode(code_map))


def previews(model: Model, most: int | None = None) -> Show:
    """Returns what makes the previews of one picture, at most so many, from the number of each
    scale and the code map after it, or of each token and the token."""
    order = model.geometry.schedule
    if isinstance(order, TokenSequence):
        return _of_lines(model, order, most)
    return _of_scales(model, order, most)


def _of_scales(model: Model, order: Schedule, most: int | None) -> Show:
    maps, chosen = order.maps, _chosen(order.num_scales, most)

    def show(number: int, code_map: np.ndarray) -> Preview | None:
        if number not in chosen:
            return None
        (h, w), part = maps[number], (number + 1) / len(maps)
        return Preview(decoded(model, code_map), part, f"scale {number + 1}: {h} x {w}")

    return show


def _of_lines(model: Model, order: TokenSequence, most: int | None) -> Show:
    rows, columns = model.code_map[:2]
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
        picture = decoded(model, model.codec.code_map(jax.numpy.asarray(tokens), (rows, columns)))
        line = stage * LINES
        picture[line * (picture.shape[0] // rows) :] = GREY
        return Preview(picture, line / rows, f"line {line} of {rows}")

    return show


def decoded(model: Model, code_map: np.ndarray | jax.Array) -> np.ndarray:
    """The picture uint8 [H, W, 3] of what is drawn so far. Its first call compiles what decodes."""
    pixels = _decode(model.codec, jax.numpy.asarray(code_map))
    return pictures.to_uint8((np.asarray(pixels) + 1) / 2)[0]


def _chosen(stages: int, most: int | None) -> set[int]:
    """Stages, at most so many, after which a preview is shown."""
    last = stages - 1  # after it comes the picture itself
    count = last if most is None else min(most, last)
    return {int(n) for n in np.linspace(0, last, count + 1)[1:] - 1} if count else set()
