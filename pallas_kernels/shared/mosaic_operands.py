"""Launching, shared memory and limits of the kernels for NVIDIA GPUs from Hopper on (Pallas' Mosaic
GPU backend). Their products: `mosaic_products`.

One warpgroup (128 threads) of a program fetches, the others compute. Tiles lie in shared memory as
the tensor cores read them: swizzled, in pieces of 8 rows by 64 or 128 bytes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import jax_versions, target
from pallas_kernels.implementations import check_attention, require
from pallas_kernels.shared.mosaic_products import products, tile
from pallas_kernels.tables import BlockTable, BlockWrites

Scratch = pl.MemoryRef | plgpu.Barrier  # memory of a program, or a barrier
ScratchTree = Scratch | Sequence["ScratchTree"]
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (8, 16, 32, 64)  # a piece of shared memory has 8 rows, a step of keys 64
PIECE = 8  # rows of shared memory that lie together
POOL_DTYPES = ("bfloat16", "float16", "int8")
# How operations on a warpgroup are lowered. The other way, the default from JAX 0.11 on, does not
# broadcast scalars.
LANES = plgpu.LoweringSemantics.Lane
# Registers of a thread, in the warpgroup that fetches and in each of two or three that compute.
# Together they must not exceed 3 x 168 or 4 x 128, what the warpgroups are launched with: a program
# would wait for the missing registers for ever.
MEMORY_REGISTERS, COMPUTE_REGISTERS = 24, {2: 240, 3: 160}
KIB, MEETING = 2**10, 64  # bytes through which warps join a number
# Sums and maxima of most kernels stay within a warp: they need no room to join warps.
PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=LANES, reduction_scratch_bytes=MEETING
)
SHARED, MOST = 228 * KIB, 226 * KIB  # shared memory of a multiprocessor; of a program, at most
CORES = {"9.0": 132, "10.0": 148}  # multiprocessors, by compute capability


def programs_at_once(shared_memory: int, most: int | None = None) -> int:
    """Number of programs that the chip runs at the same time. shared_memory: bytes of each, without
    barriers. most: on a multiprocessor; None: as many as there is shared memory for."""
    # compiled for a chip that is not here, or none known: as many as an H100 has
    cores = CORES.get(target.capability(), CORES["9.0"])
    # beside it, CUDA takes 1 KiB of every program, and barriers take part of another
    each = max(1, SHARED // (shared_memory + 2 * KIB))
    return cores * min(each, most or each)


def check(q, kv_pool, kv_scale, interpret) -> None:
    """Raise `NotImplementedError` for what the kernels cannot take."""
    # float32 is not among the types: tensor cores multiply it as TF32, and only if keys and values
    # are stored the other way round.
    check_attention("Mosaic", q, kv_pool, kv_scale, HEAD_DIMS, BLOCK_SIZES, POOL_DTYPES)
    products()  # raises where there are none
    check_simulator(interpret)


def check_simulator(interpret) -> None:
    """Raise `NotImplementedError` where kernels are to be simulated and cannot be."""
    takes = f"Mosaic kernels are simulated by JAX from 0.11 on, not {jax.__version__}"
    require(jax_versions.SIMULATES_GPUS or not interpret, takes)


def landing(tokens: int, shape: Sequence[int], dtype, swizzle: int) -> Scratch:
    """Shared memory for copies from and to an array with this many tokens: a `tile`, or plain rows
    where the array is not made of whole pieces."""
    plain = lands_plain(tokens)
    return plgpu.SMEM(tuple(shape), dtype) if plain else tile(shape, dtype, swizzle)


def lands_plain(tokens: int) -> bool:
    """Whether a `landing` is plain rows."""
    return tokens > PIECE and tokens % PIECE != 0


def load(ref, layout, plain: bool = False) -> Array:
    """The contents of a reference as registers in a layout. plain: whether they lie row by row,
    where some reads have to wait for others, or in global memory."""
    place = jax_versions.PLACE_OF_LOADS
    return plgpu.load(ref, *place, layout=layout, optimized=not plain)


def store(ref, numbers, plain: bool = True) -> None:
    """Store registers. plain: whether some stores have to wait for others, as in a plain `load`."""
    if plain and jax_versions.STORES_ARE_CHECKED:
        plgpu.store(ref, numbers, optimized=False)
    else:
        ref[...] = numbers


def padded(array: Array, axis: int, multiple: int, least: int = 0) -> Array:
    """The array with zeros behind the end of an axis, up to a multiple of `multiple` and at least
    `least`. Copies take whole pieces of 8 rows, and no tile is larger than the array that it is
    copied from."""
    size = array.shape[axis]
    wanted = max(least, -(-size // multiple) * multiple)
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, wanted - size)
    return jnp.pad(array, widths) if wanted > size else array


def packed(table: BlockTable | BlockWrites) -> tuple[Array, bool]:
    """(`packed` of a table that has it, with one axis in front, whether that axis counts rows).
    Else it counts layers, or is 1."""
    found, shared = table.packed, table.ids.ndim == 2
    return found[None] if shared else found, table.layer is None and not shared


def simulator(interpret):
    """The value of Pallas' argument `interpret`. interpret: False, True or parameters of the
    simulator."""
    if interpret is not True:
        return interpret
    # copies may reach beyond an array's end, as they may on the chip
    return plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")


def launch(
    body: Callable,
    operands: Sequence[Array],
    results: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[ScratchTree],
    *,
    computing: int,
    grid: dict[str, int],
    cost: pl.CostEstimate,
    interpret,
    name: str,
) -> Sequence[Array]:
    """Run `body(*operand refs, *result refs, *scratch refs)` in the programs of a grid.

    computing: warpgroups of a program that compute, beside one that fetches; 0: one does both.
    grid: its axes. There is one more, "warpgroup".
    interpret: whether to run in the simulator, or `plgpu.InterpretGPUParams` that say how.
    """
    # not `plgpu.kernel`, which takes no estimate
    return pl.kernel(
        lambda *refs: pl.run_scoped(partial(body, *refs), *scratch, collective_axes="warpgroup"),
        out_type=tuple(results),
        mesh=plgpu.Mesh(
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=computing + 1,
            thread_name="warpgroup",
        ),
        compiler_params=PARAMS,
        cost_estimate=cost,
        interpret=simulator(interpret),
        name=name,
    )(*operands)
