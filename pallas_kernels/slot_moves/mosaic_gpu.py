"""Moves of slots on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend. See `api.move_all`.

Tiling. A program of one warpgroup serves some heads of one row, in all layers of a call. It copies
their last slots into shared memory, one copy for each layer, all of them under way at once, and
from there every slot to where it goes; nothing passes through registers. No slot is both read and
written: the kernel serves moves into slots in front of the last ones. Layers share a call because
moves of one take hardly longer than the start of a kernel.

Traffic. Every slot that moves, in and out: 2 R N P W b for P slots of W elements of b bytes; what
goes nowhere is read in vain. Targets are 4 bytes a slot.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import estimates
from pallas_kernels.shared import mosaic_operands as mosaic
from pallas_kernels.slot_moves import reference

# Of a call: a kernel is started with two descriptors of 128 bytes for each, within 4 KiB.
LAYERS = 12
BYTES = 96 * mosaic.KIB  # of shared memory, about: room for two programs
LONGEST = 256  # numbers that a copy takes along an axis
ALIGNED = 128  # bytes: where a slot may begin in shared memory


def move_all(layers, target, below=None, *, interpret, most: int = LAYERS):
    """See `api.move_all`. XLA moves numbers that no copy may take, what has scales, and slots that
    may go among the last ones. most: layers of a call."""
    mosaic.check_simulator(interpret)
    slots, count = layers[0], target.shape[-1]
    apart = below is not None and below <= slots.pool.shape[2] - count
    width, size = slots.pool.shape[-1], slots.pool.shape[-1] * slots.pool.dtype.itemsize
    copied = size * count <= mosaic.MOST and max(count, width) <= LONGEST and size % ALIGNED == 0
    if not apart or slots.scale is not None or not copied:
        return reference.move_all(layers, target, below)
    target, pools = target.reshape(-1), []
    calls = -(-len(layers) // most)
    each = -(-len(layers) // calls)  # about equally many in all calls
    for first in range(0, len(layers), each):
        part = [a.pool for a in layers[first : first + each]]
        pools += _moved(part, target, first, count, interpret)
    return tuple(replace(a, pool=pool) for a, pool in zip(layers, pools, strict=True))


def _moved(pools: list, target, layer: int, count: int, interpret) -> list:
    """The pools of some layers after the moves. target: of all layers, flat. layer: number of the
    first layer. count: slots of each head that may move."""
    rows, heads, _, width = pools[0].shape
    refs = [jax.new_ref(pool) for pool in pools]  # changed in place
    of_head = len(pools) * count * width * pools[0].dtype.itemsize
    some = [n for n in range(1, heads + 1) if heads % n == 0 and n * of_head <= BYTES]
    together = max(some, default=1)  # heads of a program
    memory = plgpu.SMEM((len(refs), together, count, width), pools[0].dtype)
    arrived = plgpu.Barrier(num_barriers=len(refs))
    pl.kernel(
        lambda *given: pl.run_scoped(partial(_move, layer, *given), memory, arrived),
        out_type=(),
        mesh=plgpu.Mesh(grid=(heads // together, rows), grid_names=("heads", "row")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=mosaic.LANES),
        cost_estimate=estimates.move_some(pools, count),
        interpret=mosaic.simulator(interpret) if interpret else False,
        name="slot_moves",
    )(target, refs)
    return [jax.freeze(ref) for ref in refs]


def _move(first_layer: int, targets, pools, memory, arrived):
    _, some, count, _ = memory.shape  # heads of a program, slots of each that may move
    row, first = jax.lax.axis_index("row"), jax.lax.axis_index("heads") * some
    rows, heads, slots, _ = pools[0].shape
    last = pl.ds(slots - count, count)
    for layer, pool in enumerate(pools):
        those = pool.at[row, pl.ds(first, some), last]
        plgpu.copy_gmem_to_smem(those, memory.at[layer], arrived.at[layer])

    def of_head(layer: int, head):
        begin = (((first_layer + layer) * rows + row) * heads + first + head) * count
        return [targets[begin + i] for i in range(count)]

    def store(layer: int, head, number: int, target) -> None:
        plgpu.copy_smem_to_gmem(
            memory.at[layer, head, number], pools[layer].at[row, first + head, target]
        )

    for layer in range(len(pools)):

        def head(number, going, layer=layer):
            # loaded here, long before they are needed
            following = of_head(layer, jnp.minimum(number + 1, some - 1))
            for i, target in enumerate(going):
                pl.when(target < slots)(partial(store, layer, number, i, target))
            return following

        going = of_head(layer, 0)
        plgpu.barrier_wait(arrived.at[layer])
        jax.lax.fori_loop(0, some, head, going)
    plgpu.wait_smem_to_gmem(0)  # shared memory is another program's afterwards
