"""How the GPU kernels read keys, stored and own, and multiply them."""

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.implementations import check_attention
from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.tables import BlockTable

# Powers of two, because Triton's arrays have no other sizes; a tensor core multiplies at least 16
# elements.
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = tuple(2**i for i in range(9))
POOL_DTYPES = ("bfloat16", "float16", "float32", "int8")
LOG2_E = math.log2(math.e)
# Values of jax_default_matmul_precision that ask for float32; the others leave TF32.
FULL_PRECISION = ("highest", "float32")
AT_ONCE = 1024  # numbers that are searched side by side: 8 for each of the 128 threads of 4 warps


@dataclass(frozen=True)
class Stored:
    """The pool and table of a call as kernel operands.

    The pool is seen as slots [R, P', 2 H] and the scales as a line [R, 2 P'], both without a copy.
    Key g of a head is slot g % block_size of entry g // block_size of its table.
    """

    kv_pool: Array
    table: BlockTable
    kv_scale: Array | None

    @classmethod
    def of(cls, kv_pool: Array, table: BlockTable, kv_scale: Array | None) -> "Stored":
        """The operands of a call; an empty table or pool becomes one empty entry or block, because
        a kernel cannot have an array without elements."""
        if not table.ids.shape[-1]:
            one = jnp.zeros((*table.ids.shape[:-1], 1), jnp.int32)
            table = BlockTable(one, one, one)  # start == stop: the entry is empty
        if not kv_pool.shape[1]:
            kv_pool = jnp.zeros((kv_pool.shape[0], 1, *kv_pool.shape[2:]), kv_pool.dtype)
            if kv_scale is not None:
                kv_scale = jnp.zeros((len(kv_scale), 1, kv_scale.shape[2]), kv_scale.dtype)
        return cls(kv_pool, table, kv_scale)

    @property
    def block_size(self) -> int:
        return self.kv_pool.shape[2]

    @property
    def entries(self) -> int:
        return self.table.ids.shape[-1]

    @property
    def keys(self) -> int:
        """Keys that a head can have."""
        return self.entries * self.block_size

    @property
    def head_dim(self) -> int:
        return self.kv_pool.shape[-1] // 2

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        rows = self.kv_pool.shape[0]
        # The kernels know operands by place: 0 ids, 1 start, 2 stop, 3 pool, 4 scales. Merging
        # adjacent axes moves no data.
        found = (*self.table.with_rows(), self.kv_pool.reshape(rows, -1, self.kv_pool.shape[-1]))
        return found if self.kv_scale is None else (*found, self.kv_scale.reshape(rows, -1))

    @cached_property
    def specs(self) -> list[pl.BlockSpec]:
        """One head's table and one row's pool, for a grid (tiles, heads, rows)."""
        table = head_spec(self.entries, per_row=self.table.ids.ndim == 3)
        return [table, table, table, *map(row_spec, self.arrays[3:])]

    @property
    def bytes(self) -> int:
        """At most what is read of pool and table when every head owns all its slots."""
        rows = self.kv_pool.shape[0]
        heads = self.table.ids.shape[-2]
        per_slot = self.kv_pool.dtype.itemsize * 2 * self.head_dim
        per_slot += 8 if self.kv_scale is not None else 0
        return rows * heads * (self.keys * per_slot + self.entries * 12)

    # --- inside a kernel; refs: those of `arrays` ---

    def used(self, refs) -> Int[Array, ""]:
        """Keys up to the last entry that the head uses."""
        count = last_true(
            lambda m, inside: load(refs[2], m, inside) > load(refs[1], m, inside), self.entries
        )
        return count * self.block_size

    def slots(self, refs, key: Int[Array, " K"]):
        """Slot numbers, whether the head owns them, and where their blocks' scales start."""
        entry, offset = key // self.block_size, key % self.block_size
        # A step may reach beyond the table. What is loaded there, start = stop = 0, owns no slot.
        ids, start, stop = (load(ref, entry, entry < self.entries) for ref in refs[:3])
        owned = (offset >= start) & (offset < stop)
        # a block has twice as many scales as slots: those of its keys, then those of its values
        return ids * self.block_size + offset, owned, ids * 2 * self.block_size + offset

    def read(self, refs, key: Int[Array, " K"], dtypes):
        """[(K or V [K, H], its scales [K] or None)], K first, one per type; zero where not
        owned, and the mask [K]."""
        # Both loads are masked: NaN in slots that the head does not own, or in their scales, is
        # replaced by 0 before any arithmetic and costs no traffic.
        slot, owned, place = self.slots(refs, key)
        found = []
        for half, dtype in enumerate(dtypes):
            scale = None
            if self.kv_scale is not None:
                scale = load(refs[4], place + half * self.block_size, owned)
            values = rows_at(refs[3], slot, owned, self.head_dim, half)
            found.append((values.astype(dtype), scale))  # bfloat16 holds -127 ... 127 exactly
        return found, owned


def last_true(where, length: int) -> Int[Array, ""]:
    """One more than the last index below `length` for which `where(index, inside)` is true, or 0.

    where: called in a kernel with a piece of the indices and whether they are below `length`.
    """
    size = min(AT_ONCE, tiles.power_of_two(length))

    def last(i, found):
        index = i * size + jnp.arange(size, dtype=jnp.int32)
        inside = index < length
        return jnp.maximum(found, jnp.max(jnp.where(where(index, inside), index + 1, 0)))

    return jax.lax.fori_loop(0, pl.cdiv(length, size), last, jnp.int32(0))


def load(ref, index: Int[Array, " K"], mask) -> Array:
    """ref[index]; zero where `mask` [K] is false."""
    return plgpu.load(ref.at[index], mask=mask, other=0)


def rows_at(ref, index: Int[Array, " K"], mask, head_dim: int, half: int = 0) -> Array:
    """Rows [K, H] of ref[:, half * H :]; zero where `mask` [K] is false."""
    column = half * head_dim + jnp.arange(head_dim, dtype=jnp.int32)
    shape = (*index.shape, head_dim)  # index arrays only: interpreted masks cannot mix with slices
    view = ref.at[jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(column, shape)]
    return plgpu.load(view, mask=mask[:, None], other=0)


def dot(a: Array, b: Array, transposed: bool = False) -> Array:
    """a @ b, or a @ b.T; float32 sums. float32 factors: full precision only where JAX's default for
    matrix products asks for it when the program is traced, else TF32."""
    # read while tracing: the setting is part of the compiled program, like that of XLA's products
    full = jax.config.jax_default_matmul_precision in FULL_PRECISION
    exact = full and a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def check(q: Array, kv_pool: Array, kv_scale: Array | None, interpret: bool) -> None:
    """Raise `NotImplementedError` with the reason where the kernels cannot run; interpreted, they
    take every size."""
    check_attention(
        *("triton", q, kv_pool, kv_scale),
        head_dims=(q.shape[-1],) if interpret else HEAD_DIMS,
        block_sizes=(kv_pool.shape[2],) if interpret else BLOCK_SIZES,
        dtypes=POOL_DTYPES,
    )
    if not interpret and kv_pool.dtype == jnp.int8 and 2**31 < kv_pool.size <= 2**32:
        # Pallas-Triton takes 32-bit offsets, which are signed, up to 2**32 bytes and 64-bit ones
        # beyond. Only in arrays of one byte per element does that allow more than 2**31 elements.
        raise NotImplementedError(
            f"triton attention cannot address an int8 pool of {kv_pool.size / 2**30:.2f} GiB "
            "(between 2 and 4 GiB): choose another batch size, or a bfloat16 pool"
        )


# --- calls with a grid (tiles, heads, rows) ---


def head_spec(*shape: int, per_row: bool = True) -> pl.BlockSpec:
    """All of one head of an array [R, N, *shape], or [1, N, *shape] that all rows share."""
    # A ref on a GPU is a pointer: a BlockSpec moves it to the program's head and copies nothing, so
    # it may span all tokens of a head, however many there are.
    zeros = (0,) * len(shape)
    return pl.BlockSpec((None, None, *shape), lambda i, n, r: (r if per_row else 0, n, *zeros))


def row_spec(array: Array) -> pl.BlockSpec:
    """All of one row of an array: only a pointer, loads and stores name the slots."""
    return pl.BlockSpec((None, *array.shape[1:]), lambda i, n, r: (r, *(0,) * (array.ndim - 1)))


def line_spec(size: int) -> pl.BlockSpec:
    """An array [size] that all programs share."""
    return pl.BlockSpec((size,), lambda i, n, r: (0,))


def attention_call(
    kernel, stored: Stored, config, new_length, given, results, *, tiles, cost, interpret, name
) -> list[Array]:
    """Run `kernel(length_ref, given, refs, results)`: lists of refs, `refs` those of `stored`.

    Args:
      given, results: (array or its shape and type, BlockSpec) each; [R, N, ...] the first ones.
      tiles: programs per head.
      cost: floating-point operations, exponentials, and bytes besides those of `stored`. Upper
        bounds: every token real, every slot owned, queries and keys read once.
    """
    arrays, in_specs = zip(*given, strict=True)
    out_shape, out_specs = zip(*results, strict=True)
    first, last = len(given), len(given) + len(stored.arrays)

    def body(length_ref, *refs):
        kernel(length_ref, refs[:first], refs[first:last], refs[last:])

    return pl.pallas_call(
        body,
        # The first axis is blockIdx.x, which counts fastest: tiles of a head follow one another.
        # It is also the only one that CUDA lets exceed 65,535.
        grid=(tiles, *arrays[0].shape[1::-1]),
        in_specs=[line_spec(1), *in_specs, *stored.specs],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        cost_estimate=pl.CostEstimate(
            flops=cost[0], transcendentals=cost[1], bytes_accessed=cost[2] + stored.bytes
        ),
        interpret=interpret,
        name=name,
    )(new_length.reshape(1).astype(jnp.int32), *arrays, *stored.arrays)
