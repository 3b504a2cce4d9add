"""Stored keys and values on TPU. Blocks are copied through the table while the kernel computes on
blocks that were copied before.

A head's table is one row of int32 (`BlockTable.packed`). A grid step has only its own heads' rows
in scalar memory, so tables of any number of rows or layers cost no more of it than one. Tables of
all layers are one operand, in which a call finds its layer's rows by number.

A group is some blocks of one head, which are copied behind one another into one of `BUFFERS`
buffers. Trailing empty entries are not copied. Rows outside the valid range are zeroed as they are
loaded, because the buffer may hold anything there: old contents, or nothing that was ever written.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.implementations import check_attention
from pallas_kernels.ragged_attention import config as tiles_of
from pallas_kernels.refs import Ref, Scalar
from pallas_kernels.shared import tpu_operands
from pallas_kernels.shared.tpu_operands import block_of, block_shape, in_parts
from pallas_kernels.shared.tpu_projection import HeadGroups, Operands
from pallas_kernels.tables import RANGE_BITS

HEAD_DIMS = (64, 128, 256)
POOL_DTYPES = ("bfloat16", "float32", "int8")
# Groups in flight or in use. There are more than two, because a group of 128 keys is only 32 KiB:
# computing on it may take less time than HBM takes to answer.
BUFFERS = 4
# Blocks per group, whose loads are unrolled. 16 of the smallest blocks (8 slots) are still the 128
# keys that the sums over queries need.
MAX_GROUP = 16


def prepare(operation: str, projection, kv_pool, table, kv_scale, config, interpret: bool):
    """(the call, its tiles); tiles are those of `config.choose` if none are given. Raises
    `NotImplementedError` where the arrays do not compile or were never compiled."""
    if not interpret:
        takes = HEAD_DIMS, tpu_operands.BLOCK_SIZES, POOL_DTYPES
        check_attention("TPU", projection, kv_pool, kv_scale, *takes)
    call = tiles_of.Call.of(operation, projection, kv_pool, table)
    return call, config or tiles_of.choose(call, "tpu")


def call(
    kernel,
    stored: tuple,
    given: Operands,
    results: list[tuple],
    *,
    heads: HeadGroups,
    blocks: int,
    scratch: list,
    steps: int,
    vmem_limit: int | None,
    cost,
    interpret,
    name: str,
) -> list[Array]:
    """Run `kernel(blocks, length_ref, given, results, scratch)`. The kernel gets `Blocks`, the
    references of `given` by name, and lists of the others.

    stored: the scale's length, the pool, its packed table, and for int8 its scales.
    results: pairs of a shape with its type and a BlockSpec.
    blocks: of a group.
    steps: grid steps for the same heads of a row.
    """
    new_length, kv_pool, table, kv_scale = stored
    if not kv_pool.shape[1]:  # a kernel has no arrays without elements
        kv_pool = jnp.zeros((len(kv_pool), 1, *kv_pool.shape[2:]), kv_pool.dtype)
        kv_scale = None if kv_scale is None else jnp.zeros((len(kv_pool), 1, kv_scale.shape[2]))
    pools = tpu_operands.pools(kv_pool, kv_scale, interpret)
    length = jnp.reshape(new_length, 1).astype(jnp.int32)
    rows, table_spec = tpu_operands.table_rows(table, heads)
    arrays, in_specs = zip(*given.values(), strict=True)
    out_shape, out_specs = zip(*results, strict=True)
    counts = (len(given), len(pools), len(results), len(scratch), len(pools), 2)
    entries = table.ids.shape[-1]

    def body(length_ref, _, table, *refs):
        own, whole, results, scratch, buffers, state = in_parts(refs, *counts)
        blocks = Blocks(entries, pl.program_id(0), table, whole, buffers, *state)
        kernel(blocks, length_ref, dict(zip(given, own, strict=True)), results, scratch)

    buffers = [pltpu.VMEM((BUFFERS, blocks, *block_shape(pool)), pool.dtype) for pool in pools]
    # One semaphore per buffer is enough: every copy is waited for, and a buffer takes one group at
    # a time.
    state = [pltpu.SemaphoreType.DMA((BUFFERS,)), pltpu.SMEM((4,), jnp.int32)]
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(kv_pool), heads.steps, steps),
            in_specs=[table_spec, *in_specs, *[tpu_operands.IN_PLACE] * len(pools)],
            out_specs=out_specs,
            scratch_shapes=[*scratch, *buffers, *state],
        ),
        out_shape=out_shape,
        # No grid step needs what another one left, so the two cores of a v5p may share them.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=vmem_limit
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )(length, tpu_operands.layer_of(table), rows, *arrays, *pools)


@dataclass(frozen=True)
class Blocks:
    """The stored slots of some heads of one row, inside a kernel. The kernel takes them in order:
    all groups of the first head, then those of the next.

    entries: M, of the table.
    table: packed rows of the heads, in scalar memory.
    pools: whole, in HBM.
    buffers: for blocks (and scales), in vector memory.
    semaphores: one per buffer.
    cursor: the head and the group that are copied next, the number of groups started, and the
      number of groups taken, in scalar memory.
    """

    entries: int
    row: Scalar
    table: Ref
    pools: list[Ref]
    buffers: list[Ref]
    semaphores: Ref
    cursor: Ref

    @property
    def size(self) -> int:
        """Blocks of a group."""
        return self.buffers[0].shape[1]

    def used(self, head):
        """The number of entries up to the last one that is not empty."""
        return self.table[0, head, 0, 2 * self.entries]

    def start(self) -> None:
        """Start the first copies. Call it before anything that can be computed meanwhile."""
        for i in range(4):
            self.cursor[i] = 0
        # one buffer stays free for the group that `for_each_group` starts in its first step
        for _ in range(BUFFERS - 1):
            self._start_next()

    def for_each_group(self, head, do) -> None:
        """Call `do(group, buffer)` for every group of the next head as it arrives."""

        def step(group, _):
            taken = self.cursor[3]
            buffer = jax.lax.rem(taken, BUFFERS)
            self._for_copies(head, group, buffer, lambda copy: copy.wait())
            self.cursor[3] = taken + 1
            # The next copy goes to the buffer of the group before, which `do` left one step ago.
            # Every group that is started is waited for above, so no copy is under way after the
            # last head.
            self._start_next()
            pl.when(group * self.size < self.used(head))(lambda: do(group, buffer))
            return 0

        jax.lax.fori_loop(0, self._groups(head), step, 0)

    def _groups(self, head):
        """Groups of a head. An empty head counts one, so that no search for the next head is
        needed."""
        return jnp.maximum(pl.cdiv(self.used(head), self.size), 1)

    def _start_next(self) -> None:
        """Start copying the next group, if there is one. The group of an empty head has no
        blocks."""
        head, group, started = (self.cursor[i] for i in range(3))

        @pl.when(head < self.table.shape[1])
        def _():
            self._start(head, group, jax.lax.rem(started, BUFFERS))
            last = group + 1 == self._groups(head)
            self.cursor[0] = jnp.where(last, head + 1, head)
            self.cursor[1] = jnp.where(last, 0, group + 1)
            self.cursor[2] = started + 1

    def _start(self, head, group, buffer) -> None:
        self._for_copies(head, group, buffer, lambda copy: copy.start())

    def _for_copies(self, head, group, buffer, do) -> None:
        size = self.size

        def step(i, _):
            # Empty entries before the last one in use are copied, so their ids have to be valid.
            block = self.table[0, head, 0, group * size + i]
            for pool, target in zip(self.pools, self.buffers, strict=True):
                source, target = block_of(pool, self.row, block), target.at[buffer, i]
                do(pltpu.make_async_copy(source, target, self.semaphores.at[buffer]))
            return 0

        # Starts and waits of a group take the same number of copies, or a wait would never end.
        jax.lax.fori_loop(0, jnp.minimum(size, self.used(head) - group * size), step, 0)

    def load(self, head, group, buffer):
        """(K and V float32 [keys, 2 H], valid bool [keys, 1]) of a group that has arrived. Rows
        that are not valid are zero."""
        _, count, size, width = self.buffers[0].shape
        slot = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        rows, valid, entries = [], [], self.entries
        for i in range(count):
            # what lies behind the table is not in use
            entry = jnp.minimum(group * count + i, entries - 1)
            packed = self.table[0, head, 0, entries + entry]
            packed = jnp.where(group * count + i < entries, packed, 0)
            start, stop = packed & (2**RANGE_BITS - 1), packed >> RANGE_BITS
            inside = (slot >= start) & (slot < stop)
            block = self.buffers[0][buffer, i].astype(jnp.float32)
            if len(self.buffers) > 1:
                # scales are lanes, slots are rows: those of keys first, then those of values
                scales = self.buffers[1][buffer, i]
                is_key = jax.lax.broadcasted_iota(jnp.int32, block.shape, 1) < width // 2
                block *= jnp.where(is_key, _column(scales, 0, size), _column(scales, size, size))
            # Chosen, not multiplied: rows outside (old, never written, not owned) may be NaN.
            rows.append(jnp.where(inside, block, 0.0))
            valid.append(inside.astype(jnp.int32))
        return jnp.concatenate(rows, axis=0), jnp.concatenate(valid, axis=0) > 0


def _column(row, first: int, size: int):
    """Elements first, first + 1, ... of a row [1, W] as a column [size, 1]. The copy is exact, and
    NaN does not spread to other elements."""
    # The diagonal of the repeated row is chosen and summed; a product would spread NaN.
    shape = (size, row.shape[1])
    here = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + first
    chosen = jax.lax.broadcasted_iota(jnp.int32, shape, 1) == here
    return jnp.where(chosen, row, 0.0).sum(axis=1, keepdims=True)
