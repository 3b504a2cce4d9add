"""Matrix products of the models' shapes, and kernels that do nothing, to be timed like operations.

Products are timed in pairs, [rows, width] to [rows, columns] and back, so that each takes all of
the last one's result and nothing can be left out. Every pair has weights of its own, together more
than a chip's cache holds: a layer's weights come from memory in a real program, too.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.bench import Candidate, Work
from varjax.nn.published import TransformerConfig

COLD = 256 * 2**20  # bytes of weights that a run goes through
MOST = 8  # pairs of a run
STARTS = 256  # kernels of a chain


@dataclass(frozen=True)
class Pair:
    """[rows, width] times [width, columns], and the result times [columns, width]. name: what of a
    layer the first one is."""

    name: str
    rows: int
    width: int
    columns: int

    def work(self, dtype: str) -> Work:
        """FLOPs of each of the two products, and bytes of its factors and result."""
        small, large = self.rows * self.width, self.rows * self.columns
        moved = (small + large + self.width * self.columns) * jnp.dtype(dtype).itemsize
        return Work(2.0 * self.rows * self.width * self.columns, moved)

    def run(self, dtype: str, most: int = MOST) -> tuple[Candidate, int]:
        """(what is timed, how many products a run of it holds). most: pairs of a run."""
        each = 2 * self.width * self.columns * jnp.dtype(dtype).itemsize
        count = max(1, min(most, -(-COLD // each)))
        keys = jax.random.split(jax.random.key(0), 2 * count + 1)
        x = jax.random.normal(keys[0], (self.rows, self.width), jnp.dtype(dtype))
        weights = tuple(
            _matrix(key, self.width, self.columns, dtype)
            if number % 2 == 0
            else _matrix(key, self.columns, self.width, dtype)
            for number, key in enumerate(keys[1:])
        )
        return Candidate("products", _chain, x, weights), 2 * count


def _matrix(key: jax.Array, inner: int, columns: int, dtype: str) -> jax.Array:
    """Random numbers with which results stay as large as the rows that are multiplied."""
    found = jax.random.normal(key, (inner, columns), jnp.dtype(dtype))
    return found / math.sqrt(inner)


def _chain(x, *weights):
    for matrix in weights:
        x = x @ matrix
    return x


def of_model(config: TransformerConfig, rows: int) -> list[Pair]:
    """The products of a layer and of the head. rows: of the transformer times tokens."""
    width = config.embed_dim
    columns = {"qkv": 3 * width, "out": width, "up": config.hidden_dim}
    columns["head"] = config.logits_per_token
    return [Pair(name, rows, width, number) for name, number in columns.items()]


def starts() -> tuple[Candidate, int]:
    """(a chain of the smallest kernels, each of which waits for the one before, how many)."""
    return Candidate("starts", _starts, jnp.zeros(128, jnp.float32), ()), STARTS


def _starts(x):
    for _ in range(STARTS):
        x = jax.lax.optimization_barrier(x + 1)  # not fused with the next one
    return x
