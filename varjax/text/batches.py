"""Encoding many texts of different lengths with few compiled programs.

Texts are sorted by length and padded to the next of a few sizes, each of which is one program; the
last batch of a size is filled up. What is padding is dropped from the results.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from varjax.text.t5 import T5Encoder

SMALLEST = 16  # tokens; further sizes are powers of two


def padded_size(length: int) -> int:
    """The size that a text of `length` tokens is padded to."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


def encode(
    module: T5Encoder,
    texts: Sequence[Sequence[int] | None],
    batch_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Float[np.ndarray, "length D"]]:
    """Float32 features of every text, given its token ids; one row of zeros for None."""
    width = module.config.d_model
    found: list[np.ndarray] = [np.zeros((1, width), np.float32) for _ in texts]
    given = [i for i, ids in enumerate(texts) if ids is not None]
    rows, done = min(batch_size, len(given)), 0
    for size, indices in _grouped(texts, given, rows):
        ids, lengths = _arrays([texts[i] for i in indices], rows, size)
        features = np.asarray(_program(module, ids, lengths))
        for i, row, length in zip(indices, features, lengths, strict=False):
            found[i] = row[:length].copy()  # the rest of the batch can go
        done += len(indices)
        progress(done, len(given))
    return found


def _grouped(texts, given: Sequence[int], rows: int) -> Iterator[tuple[int, list[int]]]:
    """(size, indices of at most `rows` texts of that size), shortest first."""
    by_size: dict[int, list[int]] = {}
    for i in given:
        by_size.setdefault(padded_size(len(texts[i])), []).append(i)
    for size, members in sorted(by_size.items()):
        for start in range(0, len(members), rows):
            yield size, members[start : start + rows]


def _arrays(texts: Sequence[Sequence[int]], rows: int, size: int):
    """int32 ids [rows, size], lengths [rows]; rows without a text are one token of padding."""
    ids, lengths = np.zeros((rows, size), np.int32), np.ones(rows, np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)], lengths[row] = text, len(text)
    return ids, lengths


def compiled(module: T5Encoder, rows: int, length: int) -> jax.stages.Compiled:
    """The program for `rows` texts of at most `length` tokens, for questions about its memory."""
    return _program.lower(module, *_arrays([], rows, padded_size(length))).compile()


@jax.jit
def _program(
    module: T5Encoder, ids: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> Float[Array, "B T D"]:
    return module(ids, lengths)
