"""Moves of slots on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend. See `api.move_all`.

Tiling. A program of one warpgroup serves some heads of one row, in all layers of a call. It copies
their last slots into shared memory, one copy for each layer, all of them under way at once, and
from there every slot to where it goes; nothing passes through registers. No slot is both read and
written: the kernel serves moves into slots in front of the last ones. Layers share a call because
moves of one take hardly longer than the start of a kernel.

Traffic. Every slot that moves, in and out: 2 R N P W b for P slots of W elements of b bytes; what
goes nowhere is read in vain. Targets are 4 bytes a slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import estimates
from pallas_kernels import mosaic_operands as mosaic
from pallas_kernels.slot_moves import reference

# Of a call: a kernel is started with two descriptors of 128 bytes for each, within 4 KiB.
LAYERS = 12
BYTES = 96 * mosaic.KIB  # of shared memory, about: room for two programs
LONGEST = 256  # numbers that a copy takes along an axis
ALIGNED = 128  # bytes: where a slot may begin in shared memory


def move(slots, target, below=None, *, interpret):
    """See `api.move`."""
    [found] = move_all([slots], target, below, interpret=interpret)
    return found


def move_all(layers, target, below=None, *, interpret, most: int = LAYERS):
    """See `api.move_all`. XLA moves numbers that no copy may take, what has scales, and slots that
    may go among the last ones. most: layers of a call."""
    mosaic.check_simulator(interpret)
    slots, count = layers[0], target.shape[-1]
    apart = below is not None and below <= slots.pool.shape[2] - count
    if not apart or slots.scale is not None or not _copies_take(slots.pool, count):
        return reference.move_all(layers, target, below)
    target, pools = target.reshape(-1), []
    calls = -(-len(layers) // most)
    each = -(-len(layers) // calls)  # about equally many in all calls
    for first in range(0, len(layers), each):
        part = [a.pool for a in layers[first : first + each]]
        pools += _moved(part, target, Tiles.of(part, first, count), interpret)
    return tuple(replace(a, pool=pool) for a, pool in zip(layers, pools, strict=True))


def _copies_take(pool, count: int) -> bool:
    slot = pool.shape[-1] * pool.dtype.itemsize
    fits = slot * count <= mosaic.MOST and max(count, pool.shape[-1]) <= LONGEST
    return fits and slot % ALIGNED == 0


def _moved(pools: Sequence, target, tiles: "Tiles", interpret) -> list:
    """The pools of some layers after the moves. target: of all layers, flat."""
    rows, heads, _, width = pools[0].shape
    refs = [jax.new_ref(pool) for pool in pools]  # changed in place

    def kernel(targets, refs):
        pl.run_scoped(
            partial(_move, tiles, targets, refs),
            plgpu.SMEM((len(refs), tiles.heads, tiles.count, width), pools[0].dtype),
            plgpu.Barrier(num_barriers=len(refs)),
        )

    pl.kernel(
        kernel,
        out_type=(),
        mesh=plgpu.Mesh(grid=(heads // tiles.heads, rows), grid_names=("heads", "row")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=mosaic.LANES),
        cost_estimate=estimates.move_some(pools, tiles.count),
        interpret=mosaic.simulator(interpret) if interpret else False,
        name="slot_moves",
    )(target, refs)
    return [jax.freeze(ref) for ref in refs]


@dataclass(frozen=True)
class Tiles:
    """What a program serves: some heads of a row.

    layer: number of the first layer. heads: of a program. count: slots of each that may move.
    """

    layer: int
    heads: int
    count: int

    @classmethod
    def of(cls, pools: Sequence, layer: int, count: int) -> "Tiles":
        _, heads, _, width = pools[0].shape
        each = len(pools) * count * width * pools[0].dtype.itemsize
        fit = [n for n in range(1, heads + 1) if heads % n == 0 and n * each <= BYTES]
        return cls(layer, max(fit, default=1), count)


def _move(tiles: Tiles, targets, pools, memory, arrived):
    row, first = jax.lax.axis_index("row"), jax.lax.axis_index("heads") * tiles.heads
    rows, heads, slots, _ = pools[0].shape
    last = pl.ds(slots - tiles.count, tiles.count)
    for layer, pool in enumerate(pools):
        those = pool.at[row, pl.ds(first, tiles.heads), last]
        plgpu.copy_gmem_to_smem(those, memory.at[layer], arrived.at[layer])

    def of_head(layer: int, head):
        begin = (((tiles.layer + layer) * rows + row) * heads + first + head) * tiles.count
        return [targets[begin + i] for i in range(tiles.count)]

    def store(layer: int, head, number: int, target) -> None:
        plgpu.copy_smem_to_gmem(
            memory.at[layer, head, number], pools[layer].at[row, first + head, target]
        )

    for layer in range(len(pools)):

        def head(number, going, layer=layer):
            # loaded here, long before they are needed
            following = of_head(layer, jnp.minimum(number + 1, tiles.heads - 1))
            for i, target in enumerate(going):
                pl.when(target < slots)(partial(store, layer, number, i, target))
            return following

        going = of_head(layer, 0)
        plgpu.barrier_wait(arrived.at[layer])
        jax.lax.fori_loop(0, tiles.heads, head, going)
    plgpu.wait_smem_to_gmem(0)  # shared memory is another program's afterwards
