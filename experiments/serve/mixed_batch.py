"""Images that have nothing in common, drawn in one batch: each has its own condition, its own seed
and number, and may be an edit. For servers, which draw what different people ask for together.

Image i of a request with seed s is image i of `experiments.run --seed=s` for the same class or
prompt, whoever else is in its batch: every image has a key of its own, folded from its seed and its
number. The program takes given tokens, so that edits share batches with images drawn freely.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import PyTree

from experiments.serve.previews import Watched
from varjax.core.errors import UserError
from varjax.core.given import Given
from varjax.editing import masks
from varjax.editing.edit import source_tokens
from varjax.generation.generator import Generator
from varjax.models.model import Model
from varjax.storage import pictures


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
    hear: Callable[[int, np.ndarray], None] | None = None
    kept: bool = False


@dataclass(frozen=True, eq=False)
class Drawn:
    """A picture uint8 [H, W, 3], its tokens, and the seconds that its batch took.

    batch: the same object for all pictures of a batch. kept: bool [L, N, F], which tokens each head
    held at the end (`CachePlan.at_the_end`), if that was asked for.
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
    results, state = program.run_batch(
        condition,
        np.array([item.number for item in padded], np.int32),
        seed=np.array([item.seed for item in padded], np.int32),
        given=given_tokens(generator.model, [item.patch for item in padded]),
        keep_cache=first.kept and generator.plan.final_cache_tells,
        **({"hear": first.hear} if watched else {}),
    )
    images, tokens = np.asarray(results["images"]), np.asarray(results["tokens"])
    batch, seconds, kept, found = object(), time.perf_counter() - start, None, []
    if first.kept:
        kept = generator.plan.at_the_end(results.get("contents", state))
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
