"""Matrix products of the models' shapes, and kernels that do nothing, to be timed like operations.

A product is timed with other weights each time, as many as a chip's cache cannot hold: a layer's
weights come from memory in a real program, too.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.bench import Candidate, Work
from pallas_kernels.bench.timing import after
from varjax.nn.published import TransformerConfig

COLD = 256 * 2**20  # bytes of weights that a loop goes through
MOST = 16  # products of a loop
STARTS = 256  # kernels of a chain


@dataclass(frozen=True)
class Product:
    """[rows, inner] times [inner, columns]. name: what of a layer it is."""

    name: str
    rows: int
    inner: int
    columns: int

    def work(self, dtype: str) -> Work:
        """Its FLOPs, and bytes of factors and result."""
        numbers = self.inner * (self.rows + self.columns) + self.rows * self.columns
        return Work(
            2.0 * self.rows * self.inner * self.columns, numbers * jnp.dtype(dtype).itemsize
        )

    def loop(self, dtype: str) -> tuple[Candidate, int]:
        """(what is timed, how many products a run of it holds)."""
        each = self.inner * self.columns * jnp.dtype(dtype).itemsize
        count = max(1, min(MOST, -(-COLD // each)))
        key = jax.random.key(0)
        normal = partial(jax.random.normal, dtype=jnp.dtype(dtype))
        x = normal(key, (self.rows, self.inner))
        weights = tuple(
            normal(jax.random.fold_in(key, n), (self.inner, self.columns)) for n in range(count)
        )
        out = jnp.zeros((self.rows, self.columns), jnp.dtype(dtype))
        return Candidate("products", _products, out, (x, weights)), count


def _products(out, x, weights):
    for matrix in weights:
        out = after(out, x) @ matrix  # one after another, as layers are
    return out


def of_model(config: TransformerConfig, rows: int) -> list[Product]:
    """The products of a layer and of the head. rows: of the transformer times tokens."""
    width, hidden = config.embed_dim, config.hidden_dim
    logits = config.logits_per_token
    return [
        Product("qkv", rows, width, 3 * width),
        Product("out", rows, width, width),
        Product("up", rows, width, hidden),
        Product("down", rows, hidden, width),
        Product("head", rows, width, logits),
    ]


def starts() -> tuple[Candidate, int]:
    """(a chain of the smallest kernels, each of which waits for the one before, how many)."""
    return Candidate("starts", _starts, jnp.zeros(128, jnp.float32), ()), STARTS


def _starts(x):
    for _ in range(STARTS):
        x = jax.lax.optimization_barrier(x + 1)  # not fused with the next one
    return x
