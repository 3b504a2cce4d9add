"""Names and shapes of published checkpoints against our abstract modules: no weights, no arrays."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ported_weights import rules
from varjax.storage import parameters


@dataclass
class Shape:
    """A tensor of which only the shape is known; reading gives zeros, or what `value` makes."""

    shape: tuple[int, ...]
    value: Callable[[tuple[int, ...]], np.ndarray] | None = None
    dtype: np.dtype = np.dtype(np.float32)

    def read(self) -> np.ndarray:
        if self.value is not None:
            return self.value(self.shape)
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)


def read_shapes(path: Path, name: str) -> dict[str, Shape]:
    """{parameter name: tensor} of one model in a `released_shapes.json.gz`."""
    shapes = json.loads(gzip.open(path).read())[name]
    return {n: Shape(tuple(shape)) for n, shape in shapes.items()}


def check(table, tensors, module) -> int:
    """Every name matches exactly one rule, every parameter is filled exactly once; returns how many
    names carry parameters. `UserError` with all problems otherwise."""
    plan = rules.check(table, tensors, parameters.named(module))
    whole = [name for name, _ in plan.ignored if name in tensors]
    assert len(plan.moves) + len(whole) == len(tensors)
    return len(plan.moves)
