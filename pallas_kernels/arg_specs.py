"""Named shapes of the operations, taken from published models, and arguments of these shapes.

Tests cut shapes down (`reduced`), ahead-of-time compilation needs no numbers (`abstract`), the
benchmark runs with random ones (`arguments`).
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_write.reference import quantize
from pallas_kernels.projection import Projection
from pallas_kernels.ragged_attention import QuerySums
from pallas_kernels.residual.operands import TILE
from pallas_kernels.tables import BlockTable, BlockWrites, block_writes, slots_by_token

Tree = TypeVar("Tree")  # of arrays
FILLINGS = ("random", "empty", "full", "repeated", "shared")


@dataclass(frozen=True, kw_only=True)
class ArgSpec:
    """One call of an operation.

    rows: batch rows, two per image.
    queries_per_head: query heads that share each of the `heads` of keys and values; more than 1
      only for operations of models that draw token by token.
    tokens: T, padded length of the scale.
    length: real tokens of the scale.
    entries: M, table entries of every head.
    filling: what table entries hold: "random" runs, with an empty and a full head among them; all
      "empty"; all "full"; "repeated" blocks, listed twice with disjoint ranges; or "shared" blocks,
      the same for every head, with disjoint ranges.
    per_row: whether every row has a table of its own. If not, tables, biases and multipliers are
      those of two layers, and the call is that of the last layer.
    apart: whether tokens are written into blocks that no head reads.
    kv_dtype: type of the pool; None: `dtype`.
    normalised, rotated: what has to be done to queries and keys.
    in_8_bits: whether the projection comes from a product in 8 bits, with scales still to come.
    """

    name: str
    rows: int = 16
    heads: int
    queries_per_head: int = 1
    head_dim: int
    tokens: int
    length: int
    block_size: int = 16
    entries: int
    filling: str = "random"
    per_row: bool = False
    apart: bool = False
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    normalised: bool = False
    rotated: bool = False
    in_8_bits: bool = False

    @property
    def pool_dtype(self):
        return jnp.dtype(self.kv_dtype or self.dtype)

    @property
    def pool_blocks(self) -> int:
        return (1 + self.apart) * self.heads * self.entries + 1

    @property
    def table_shape(self) -> tuple[int, ...]:
        shape = (self.heads, self.entries)
        return (self.rows, *shape) if self.per_row else shape

    def reduced(self, **changes) -> "ArgSpec":
        """A call of the same kind that is small enough for interpret mode: 2 rows, at most 3 heads,
        200 tokens and 7 entries. changes: other fields."""
        tokens = min(self.tokens, 200)
        small = replace(
            self,
            rows=2,
            heads=min(self.heads, 3),
            tokens=tokens,
            length=max(1, self.length * tokens // self.tokens),
            entries=min(self.entries, 7),
        )
        return replace(small, **changes)

    def abstract(self, sharding=None) -> "Arguments":
        """The arguments as shapes and types."""
        ids = np.zeros(self.table_shape, np.int32)
        source = np.zeros((*ids.shape, self.block_size), np.int32)
        by_token = slots_by_token(np.zeros((*ids.shape[:-1], self.tokens), np.int32))
        read = BlockTable(ids, ids, ids, finite=True)  # as models make them
        tables = read, BlockWrites(ids, source, by_token=by_token)
        found = jax.eval_shape(lambda: self._arrays(jnp, jnp.zeros, *_with_layers(self, *tables)))
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), found
        )

    def arguments(self, seed: int = 0, poison: bool = True) -> "Arguments":
        """Random arrays on the default device. poison: whether slots that no head owns hold NaN (in
        an int8 pool their scales do)."""
        rng = np.random.default_rng(seed)
        tables = _with_layers(self, *_random_tables(self, rng))
        found = self._arrays(np, rng.standard_normal, *tables)
        return found.poisoned() if poison else found

    def _arrays(self, xp, normal, table: BlockTable, writes: BlockWrites) -> "Arguments":
        """The arguments from `normal`, which makes arrays of a shape.

        xp: NumPy, which prepares numbers in host memory without a program for each step, or
        jax.numpy where only shapes are wanted.
        """
        projection = self._projection(xp, normal)
        pool = normal((self.rows, self.pool_blocks, self.block_size, 2 * self.head_dim))
        pool, scale = xp.asarray(pool, jnp.float32), None
        if self.pool_dtype == jnp.int8:
            pool, scale = _as_int8(pool)
        pool = jnp.asarray(pool.astype(self.pool_dtype))
        length = jnp.asarray(self.length, jnp.int32)
        return Arguments(projection, length, pool, scale, table, writes)

    def _projection(self, xp, normal) -> Projection:
        """Queries and keys whose scores are a few units, so that the softmax is not one-sided."""
        dtype = jnp.dtype(self.dtype)
        qkv = jnp.asarray(normal((self.rows, self.tokens, 3, self.heads, self.head_dim)), dtype)
        biases = [xp.asarray(normal(qkv.shape[3:]), dtype) for _ in range(2)]
        rotation = multiplier = None
        if self.rotated:
            angle = xp.asarray(normal((self.tokens, self.head_dim // 2)), jnp.float32)
            rotation = tuple(f(xp.repeat(angle, 2, axis=-1)) for f in (jnp.cos, jnp.sin))
        if self.normalised:
            multiplier = 1.5 + xp.abs(xp.asarray(normal((self.heads,)), jnp.float32)) / 2
        scale = 1.0 if self.normalised else 2 / math.sqrt(self.head_dim)
        layer, vectors = None, (biases, multiplier)
        if not self.per_row:  # vectors of two layers; those of the first are never read
            layer = jnp.int32(1)
            vectors = jax.tree.map(lambda a: xp.stack([xp.full_like(a, jnp.nan), a]), vectors)
        biases, multiplier = jax.tree.map(jnp.asarray, vectors)
        row_scale, channel_scale = self._scales(xp, normal) if self.in_8_bits else (None, None)
        return Projection(
            qkv=qkv,
            q_bias=biases[0],
            v_bias=biases[1],
            rotation=rotation,
            multiplier=multiplier,
            scale=scale,
            layer=layer,
            row_scale=row_scale,
            channel_scale=channel_scale,
        )

    def _scales(self, xp, normal) -> tuple[jax.Array, jax.Array]:
        """Scales of rows and channels; of rows as kernels leave them, with NaN behind the last."""
        rows = 1 + xp.abs(xp.asarray(normal((self.rows, self.tokens, 1)), jnp.float32)) / 2
        behind = ((0, 0), (0, -self.tokens % TILE), (0, 0))
        rows = xp.pad(rows, behind, constant_values=jnp.nan)
        channels = xp.asarray(normal((3, self.heads, self.head_dim)), jnp.float32)
        return jnp.asarray(rows), jnp.asarray(1 + xp.abs(channels) / 2)


@jax.jit
def _as_int8(pool):
    """The pool as int8, and its scales."""
    *shape, width = pool.shape
    values, scales = quantize(pool.reshape(*shape, 2, width // 2))
    return values.reshape(pool.shape), jnp.swapaxes(scales, -1, -2).reshape(*shape[:2], -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arguments:
    """The arguments of `attend`, `attention_moments`, `write` and `store_and_attend`. `writes`
    stores some of the tokens into blocks of their heads."""

    projection: Projection
    length: jax.Array
    kv_pool: jax.Array
    kv_scale: jax.Array | None
    table: BlockTable
    writes: BlockWrites

    @property
    def attend(self) -> tuple:
        """Positional arguments of `attend` (`kv_scale` goes by name)."""
        return self.projection, self.length, self.kv_pool, self.table

    @property
    def write(self) -> tuple:
        """Positional arguments of `write`."""
        return self.kv_pool, self.projection, self.writes

    def moments(self, query_weights: jax.Array, lse: jax.Array, squares: bool = False) -> tuple:
        """Positional arguments of `attention_moments`."""
        return *self.attend, QuerySums(query_weights, lse, squares)

    def poisoned(self) -> "Arguments":
        """The same arguments with NaN wherever no head may read."""
        rows, blocks, size, _ = self.kv_pool.shape
        # a slot that any head of the row may read is spared, whichever head it is
        slots, mask = (np.asarray(a) for a in (self.table.slots(size), self.table.slot_mask(size)))
        shape = (rows, *slots.shape[-2:])
        slots, mask = np.broadcast_to(slots, shape), np.broadcast_to(mask, shape)
        owned = np.zeros((rows, blocks * size), bool)
        for row in range(rows):
            owned[row, slots[row][mask[row]]] = True
        owned = owned.reshape(rows, blocks, size)
        if self.kv_scale is None:
            return replace(self, kv_pool=jnp.where(owned[..., None], self.kv_pool, jnp.nan))
        both = np.concatenate([owned, owned], axis=-1)
        return replace(self, kv_scale=jnp.where(both, self.kv_scale, jnp.nan))


def in_float32(operands: Tree) -> Tree:
    """The same operands in float32. An int8 pool stays as it is: with its scales it stands for the
    same keys and values."""
    is_float = partial(jnp.issubdtype, arg2=jnp.floating)
    return jax.tree.map(lambda a: a.astype(jnp.float32) if is_float(a.dtype) else a, operands)


def _with_layers(spec: ArgSpec, table: BlockTable, writes: BlockWrites):
    """Tables of two layers, of which the first is never read."""
    if spec.per_row:
        return jax.tree.map(jnp.asarray, (table, writes))
    both = (
        jax.tree.map(lambda a: jnp.asarray(np.stack([np.full_like(a, -(10**6)), a])), t)
        for t in (table, writes)
    )
    return tuple(t.of_layer(jnp.int32(1)) for t in both)


def _random_tables(spec: ArgSpec, rng: np.random.Generator) -> tuple[BlockTable, BlockWrites]:
    shape, size = spec.table_shape, spec.block_size
    ids = 1 + np.arange(spec.heads * spec.entries).reshape(shape[-2:])  # no head owns block 0
    ids = np.broadcast_to(ids, shape).astype(np.int32)
    if spec.per_row:
        ids = rng.permuted(ids.reshape(shape[0], -1), axis=-1).reshape(shape)
    shared = spec.filling == "shared"
    if shared:
        ids = np.broadcast_to(ids[..., :1, :], shape)
    start, stop = _shares(spec, rng, shape) if shared else _ranges(spec, rng, shape)
    read = ids.copy()  # writes take `ids`, where no block is listed twice
    if spec.filling == "repeated" and spec.entries > 1:
        pairs = spec.entries // 2
        first, second = (slice(i, 2 * pairs, 2) for i in (0, 1))
        read[..., second] = read[..., first]
        middle = rng.integers(0, size + 1, shape)[..., :pairs]
        start[..., first], stop[..., first] = 0, middle
        start[..., second], stop[..., second] = middle, size
    offset = np.arange(size)
    mine = (offset >= start[..., None]) & (offset < stop[..., None]) | (not shared)
    into = ids + spec.apart * spec.heads * spec.entries
    writes = block_writes(_write_slots(spec, rng, into, mine), size, spec.entries)
    return BlockTable(read, start, stop), writes


def _ranges(spec: ArgSpec, rng, shape) -> tuple[np.ndarray, np.ndarray]:
    """(first valid slot, last valid slot + 1) of every entry."""
    size = spec.block_size
    start, stop = np.zeros(shape, np.int32), np.full(shape, size, np.int32)
    if spec.filling == "empty":
        stop[:] = 0
    elif spec.filling != "full":
        start = rng.integers(0, size, shape).astype(np.int32)
        stop = np.minimum(start + rng.integers(0, size + 1, shape), size).astype(np.int32)
        used = rng.integers(0, spec.entries + 1, shape[:-1])
        stop = np.where(np.arange(spec.entries) < used[..., None], stop, start)
        start[..., 0, :], stop[..., 0, :] = 0, size  # a full head, whose last block is full
        if spec.heads > 1:
            stop[..., -1, :] = start[..., -1, :]  # an empty head
    return start, stop


def _shares(spec: ArgSpec, rng, shape) -> tuple[np.ndarray, np.ndarray]:
    """(first slot, last slot + 1) of every entry where all heads list the same blocks. Each block
    is cut at random, and about a third of its slots belong to no head."""
    cuts = rng.integers(0, spec.block_size + 1, (*shape[:-2], shape[-2] - 1, shape[-1]))
    ends = np.full((*shape[:-2], 1, shape[-1]), spec.block_size)
    cuts = np.concatenate([0 * ends, np.sort(cuts, axis=-2), ends], axis=-2).astype(np.int32)
    start, stop = cuts[..., :-1, :], cuts[..., 1:, :]
    return start, stop - np.where(rng.random(shape) < 0.5, (stop - start) * 2 // 3, 0)


def _write_slots(spec: ArgSpec, rng, ids: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """int [*rows, N, T]: the slots of some tokens of each head, -1 for the others. A head's slots
    are those of its blocks that are `mine`. Head 0 keeps all tokens that fit, in order."""
    size, lead = spec.block_size, ids.shape[:-1]
    room = ids[..., None] * size + np.arange(size)
    slots = np.full((*lead, spec.tokens), -1, np.int64)
    for head in np.ndindex(*lead):
        places = room[head][mine[head]]
        fits = min(places.size, spec.length)
        tokens = np.arange(fits)
        if head[-1]:
            count = fits if spec.filling == "shared" else rng.integers(0, fits + 1)
            tokens = rng.permutation(spec.length)[:count]
            places = rng.permutation(places)
        slots[(*head, tokens)] = places[: len(tokens)]
    return slots


# (padded tokens, tokens, entries of blocks of 16 slots) of some scales of each model. The entries
# are the full cache of the scales before, padded lengths those that the default segments choose.
SCALES = {
    ("var-d30", 30, 64): [(16, 1, 1), (64, 36, 4), (169, 100, 16), (256, 256, 27)],
    ("var-d36", 36, 64): [(16, 9, 2), (324, 324, 21), (1024, 1024, 76)],
    ("infinity-2b", 16, 128): [(64, 64, 4), (576, 400, 55), (4096, 4096, 402)],
    ("infinity-8b", 28, 128): [(144, 144, 8), (1600, 1600, 140), (4096, 4096, 402)],
    # models that draw token by token: one query per row
    ("llamagen-xl", 20, 64): [(1, 1, 36)],
    ("janus-pro-7b", 32, 128): [(1, 1, 36)],
    ("lumina-mgpt-34b", 8, 128): [(1, 1, 151)],
}
GROUPS = {"lumina-mgpt-34b": 8}  # query heads per head of keys and values, 1 in the others
SPECS = {
    f"{name}-t{n}": ArgSpec(
        name=f"{name}-t{n}",
        heads=heads,
        queries_per_head=GROUPS.get(name, 1),
        head_dim=size,
        tokens=t,
        length=n,
        entries=m,
        normalised=name.startswith(("var-", "infinity-")),
        rotated=not name.startswith("var-"),
    )
    for (name, heads, size), scales in SCALES.items()
    for t, n, m in scales
}
