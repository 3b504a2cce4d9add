"""Reading what is stored, products, and calls of the Triton attention kernels."""

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.refs import Operand
from pallas_kernels.tables import BlockTable
from pallas_kernels.triton_operands import (
    HeadTables,
    load,
    row_spec,
    rows_at,
)

LOG2_E = math.log2(math.e)
# Values of jax_default_matmul_precision that ask for float32; the others leave TF32.
FULL_PRECISION = ("highest", "float32")
AT_ONCE = 1024  # numbers that are searched side by side: 8 for each of the 128 threads of 4 warps
IDS, START, STOP = range(3)  # of a head's tables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredSlots:
    """The pool and table of a call as kernel operands.

    The pool is seen as slots [R, P', 2 H] and the scales as lines [R, 2 P'], both without a copy.
    Inside a kernel they are those of one row. Key g of a head is slot g % block_size of entry g //
    block_size of its table.
    """

    tables: HeadTables
    kv_pool: Operand
    kv_scale: Operand
    block_size: int = field(metadata=dict(static=True))

    @classmethod
    def of(cls, kv_pool: Array, table: BlockTable, kv_scale: Array | None) -> "StoredSlots":
        """The operands of a call. An empty table becomes one empty entry, an empty pool one block,
        because a kernel cannot have an array without elements."""
        entries = table.ids, table.start, table.stop
        if not table.ids.shape[-1]:
            # start == stop: the entry is empty
            entries = (jnp.zeros((*table.ids.shape[:-1], 1), jnp.int32),) * 3
        if not kv_pool.shape[1]:
            kv_pool = jnp.zeros((kv_pool.shape[0], 1, *kv_pool.shape[2:]), kv_pool.dtype)
            if kv_scale is not None:
                kv_scale = jnp.zeros((len(kv_scale), 1, kv_scale.shape[2]), kv_scale.dtype)
        rows, _, block_size, width = kv_pool.shape
        # merging adjacent axes moves no data
        if kv_scale is not None:
            kv_scale = kv_scale.reshape(rows, -1)
        tables = HeadTables.of(table.layer, *entries)
        return cls(tables, kv_pool.reshape(rows, -1, width), kv_scale, block_size)

    @property
    def specs(self) -> "StoredSlots":
        """The table of one head and the pool of one row, for a grid (tiles, heads, rows)."""
        scale = None if self.kv_scale is None else row_spec(self.kv_scale)
        return replace(
            self, tables=self.tables.specs, kv_pool=row_spec(self.kv_pool), kv_scale=scale
        )

    @property
    def head_dim(self) -> int:
        return self.kv_pool.shape[-1] // 2

    @property
    def entries(self) -> int:
        """M."""
        return self.tables.arrays[IDS].shape[-1]

    # --- inside a kernel ---

    def used(self) -> Int[Array, ""]:
        """Keys up to the last entry that the head uses."""

        def holds(m, inside):
            return self.tables.load(STOP, m, inside) > self.tables.load(START, m, inside)

        return last_true(holds, self.entries) * self.block_size

    def slots(self, key: Int[Array, " K"]):
        """(slot numbers, whether the head owns them, the places of their keys' scales)."""
        entry, offset = key // self.block_size, key % self.block_size
        # A step may reach beyond the table, where start = stop = 0 is loaded: no slot is owned.
        inside = entry < self.entries
        ids, start, stop = (self.tables.load(i, entry, inside) for i in (IDS, START, STOP))
        owned = (offset >= start) & (offset < stop)
        # a block has twice as many scales as slots: those of its keys, then those of its values
        return ids * self.block_size + offset, owned, ids * 2 * self.block_size + offset

    def read(self, key: Int[Array, " K"], dtype, halves: int = 2):
        """[(K or V [K, H], its scales [K] or None)], K first, `halves` of them; zero where not
        owned, and the mask [K]."""
        # Both loads are masked: NaN in slots that the head does not own, or in their scales, is
        # replaced by 0 before any arithmetic and costs no traffic.
        slot, owned, place = self.slots(key)
        found = []
        for half in range(halves):
            scale = None
            if self.kv_scale is not None:
                scale = load(self.kv_scale, place + half * self.block_size, owned)
            values = rows_at(self.kv_pool, slot, owned, self.head_dim, half)
            found.append((values.astype(dtype), scale))  # bfloat16 holds -127 ... 127 exactly
        return found, owned


def last_true(where, length: int) -> Int[Array, ""]:
    """One more than the last index below `length` for which `where(index, inside)` is true, or 0.

    where: called inside a kernel with some of the indices and whether they are below `length`.
    """
    size = min(AT_ONCE, tiles.power_of_two(length))

    def last(i, found):
        index = i * size + jnp.arange(size, dtype=jnp.int32)
        inside = index < length
        return jnp.maximum(found, jnp.max(jnp.where(where(index, inside), index + 1, 0)))

    return jax.lax.fori_loop(0, pl.cdiv(length, size), last, jnp.int32(0))


def dot(a: Array, b: Array, transposed: bool = False) -> Array:
    """a @ b, or a @ b.T, with float32 sums. float32 factors are multiplied in full precision only
    where JAX's default for matrix products asks for it when the program is traced, else in TF32."""
    # The setting is read while tracing, so it is part of the compiled program, as for XLA's
    # products.
    full = jax.config.jax_default_matmul_precision in FULL_PRECISION
    exact = full and a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


# --- calls with a grid (tiles, heads, rows) ---


def attention_call(kernel, given, results, *, grid, config, cost, interpret, name) -> list[Array]:
    """Run `kernel(given, results)`, which gets references in place of arrays, in a grid of programs
    per head, heads, rows. given: pairs of an operand and its BlockSpec. results: pairs of a shape
    with its type and a BlockSpec. config: tiles."""
    operands, in_specs = zip(*given, strict=True)
    out_shape, out_specs = zip(*results, strict=True)

    return pl.pallas_call(
        lambda given, *results: kernel(given, results),
        # The first axis is blockIdx.x, which counts fastest: tiles of a head follow one another.
        # It is also the only one that CUDA lets exceed 65,535.
        grid=grid,
        in_specs=[in_specs],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )(operands)
