"""Drawing for a server: one compiled program per batch size, whose images belong to anyone.

Picture i of a request with seed s is picture i of `experiments.run --seed=s` for the same class or
prompt, whoever else is in its batch: every image has a key of its own, folded from its request's
seed and its number there. The programs take given tokens, so that edits share batches with pictures
that are drawn freely.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import PyTree

from varjax.cache.plan import CachePlan
from varjax.editing import masks
from varjax.editing.edit import source_tokens
from varjax.engine.given import Given
from varjax.engine.memory import show_bytes
from varjax.errors import UserError
from varjax.generator import Generator
from varjax.io.images import to_uint8
from varjax.model import Model

FULL_ENOUGH = 3 / 4  # of a batch that is padded; else a smaller one is filled


@dataclass(frozen=True, eq=False)
class Patch:
    """What is edited of an image: the picture float32 [H, W, 3], and where it is drawn [H, W].

    tokens, kept: of the picture, and which of them stay [L].
    paste: whether the picture's own pixels come back outside the mask.
    """

    picture: np.ndarray
    drawn: np.ndarray
    tokens: np.ndarray
    kept: np.ndarray
    paste: bool = True

    @classmethod
    def of(cls, model: Model, picture: np.ndarray, drawn: np.ndarray, paste: bool) -> "Patch":
        """Encode a picture uint8 [H, W, 3] for an edit. `UserError` if the mask cannot be, or lets
        no token be drawn."""
        pictures = masks.check_pictures(model, picture, 1)
        drawn = masks.check_masks(model, drawn, 1)
        kept = masks.kept_tokens(model, drawn)
        if kept.all() and drawn.any():
            raise UserError(
                "too little is to be drawn: not one token lies in the mask by half; paint more"
            )
        tokens = source_tokens(model, pictures)
        return cls(pictures[0], drawn[0], tokens[0], kept[0], paste)


def encode_once(model: Model) -> None:
    """Compile what encodes a picture, by encoding one."""
    source_tokens(model, np.zeros((1, *model.pixels, 3), np.float32))


@dataclass(frozen=True, eq=False)
class Item:
    """One image that is to be drawn.

    condition: arrays of this image, leading axis 1. seed, number: of the request, and of the image
    in it. patch: what is edited; None: all is drawn.
    """

    condition: PyTree
    seed: int
    number: int
    patch: Patch | None = None


def ladder(most: int) -> tuple[int, ...]:
    """Batch sizes that are compiled: 1, 2, 4 ... and the largest."""
    sizes = [1]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return tuple(sorted({*sizes, most}))


def fitting(plan: CachePlan, dtype: str, kv_bytes: int | None, most: int) -> int:
    """Return how many images fit at once: into so many bytes of keys and values, and at most
    `most`. `UserError` if not one does."""
    one = plan.num_bytes(1, dtype)
    count = most if kv_bytes is None or not one else min(most, kv_bytes // one)
    if count < 1:
        raise UserError(
            f"kv_bytes={show_bytes(kv_bytes)} hold no image: one takes {show_bytes(one)} with this "
            f"policy and budget; give more, or take a smaller budget"
        )
    return count


class Drawer:
    """Draws batches of items with programs of several sizes.

    make: returns the generator of a batch size.
    """

    def __init__(self, model: Model, make: Callable[[int], Generator], sizes: Sequence[int]):
        self.model, self.sizes = model, tuple(sizes)
        self.generators = {size: make(size) for size in self.sizes}
        plan = self.generators[self.sizes[-1]].plan
        self._order = plan.geometry.schedule
        self._no_tokens = model.transformer.no_tokens(1)

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def compile(self, say: Callable[[str], None]) -> None:
        """Compile all programs, and draw once with each, so that no request pays for it. The first
        edit would pay for what encodes pictures."""
        start = time.perf_counter()
        encode_once(self.model)
        say(f"pictures to tokens: compiled in {time.perf_counter() - start:.1f} s")
        for size in self.sizes:
            start = time.perf_counter()
            self._draw_once(size)
            say(f"batches of {size}: compiled in {time.perf_counter() - start:.1f} s")

    def warm(self) -> None:
        """Call everything once that JAX may have forgotten; what was compiled here stays so."""
        encode_once(self.model)
        for size in self.sizes:
            self._draw_once(size)

    def _draw_once(self, size: int) -> None:
        shapes = self.model.transformer.condition_shapes(size)
        condition = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        nothing = self._given([None] * size)
        self.generators[size].run_batch(condition, np.zeros(size, np.int32), given=nothing)

    def size_for(self, waiting: int) -> int:
        """The batch size for so many items that wait: one that they fill, or nearly."""
        full = max(size for size in self.sizes if size <= max(1, waiting))
        padded = min((size for size in self.sizes if size >= waiting), default=full)
        return padded if waiting >= FULL_ENOUGH * padded else full

    def draw(self, items: Sequence[Item]) -> list[np.ndarray]:
        """Pictures uint8 [H, W, 3] of at most `largest` items."""
        size = min(size for size in self.sizes if size >= len(items))
        padded = [*items, *[items[-1]] * (size - len(items))]
        parts = [item.condition for item in padded]
        condition = jax.tree.map(lambda *a: np.concatenate(a), *parts)
        results, _ = self.generators[size].run_batch(
            condition,
            np.array([item.number for item in padded], np.int32),
            seed=np.array([item.seed for item in padded], np.int32),
            given=self._given([item.patch for item in padded]),
            keep_cache=False,
        )
        images = np.array(results["images"])[: len(items)]
        for image, item in zip(images, items, strict=True):
            if item.patch and item.patch.paste:
                kept = ~item.patch.drawn
                image[kept] = item.patch.picture[kept]
        return list(to_uint8(images))

    def _given(self, patches: Sequence[Patch | None]) -> Given:
        tokens = np.repeat(self._no_tokens, len(patches), axis=0)
        where = np.zeros(tokens.shape[:2], bool)
        for row, patch in enumerate(patches):
            if patch is not None:
                tokens[row], where[row] = patch.tokens, patch.kept
        return Given(tokens, where)
