"""Matrix products of the Mosaic GPU kernels, by the generation of the tensor cores.

A warpgroup multiplies 64 rows by another matrix, both of 16-bit numbers in shared memory. The
product arrives in its registers in the layout `LAYOUT`. Masks, softmax and conversions see nothing
else of the chip, so that one kernel serves all generations.

Hopper (`wgmma`) sums in registers. Blackwell (`tcgen05`) sums in tensor memory, 512 columns of 128
rows by 4 bytes on a multiprocessor: one thread starts the product, a barrier tells when it is done,
and the sums are then loaded. A product of 64 rows by N columns is kept as 128 rows by N / 2, one
half of the columns below the other; such products run at half of the tensor cores' rate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import target
from pallas_kernels.implementations import MOSAIC, require
from pallas_kernels.refs import Ref

ROWS = 64  # of the first factor
LAYOUT = plgpu.Layout.WGMMA  # how a warpgroup's registers hold a product
PER_ROW, PER_COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)  # one number for each of its rows, columns
Multiply = Callable[[Ref, Ref, tuple[int, int]], Array]  # (a, b, shape): a @ b in float32
# (total, weights, values): total + weights @ values. The total is float32, and like the weights, of
# 16-bit numbers, in registers; the values are in shared memory.
Add = Callable[[Array, Array, Ref], Array]


def across(rows, shape):
    """Repeat a number per row in every column."""
    return jax.lax.broadcast_in_dim(rows, shape, [0])


def down(columns, shape):
    """Repeat a number per column in every row."""
    return jax.lax.broadcast_in_dim(columns, shape, [1])


def tile(shape: Sequence[int], dtype, swizzle: int) -> pl.MemoryRef:
    """Shared memory for one matrix or several, laid out as tensor cores take it. swizzle: bytes."""
    width = jnp.dtype(dtype).itemsize
    swizzle = min(swizzle, shape[-1] * width)
    transforms = (plgpu.TilingTransform((8, swizzle // width)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


@dataclass(frozen=True)
class Wgmma:
    """Hopper's products.

    swizzle: bytes, of both factors in shared memory.
    registers: whether `add` takes weights from registers. JAX's simulator takes them from shared
      memory alone.
    """

    swizzle: int = 128
    registers: bool = True

    def scratch(self, groups: int, *widths: int) -> list:
        """Scratch memory for products by `groups` warpgroups. widths: numbers of columns that
        products have."""
        return []

    def multiply(self, refs: Sequence, group) -> Multiply:
        """The function with which a warpgroup multiplies. refs: references to `scratch`."""

        def product(a, b, shape):
            def run(total):
                plgpu.wgmma(total, a, b)
                return total[...]

            return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

        return product

    def add(self, multiply: Multiply, weights: Sequence, group) -> Add:
        """The function with which a warpgroup adds weighted values. weights: shared memory for the
        weights of all warpgroups; none if it takes `registers`."""

        def added(total, factors, values):
            if not self.registers:
                place = weights[0].at[group]  # of this warpgroup alone
                place[...] = factors
                plgpu.commit_smem()  # the product reads shared memory in another way than stores
                return total + multiply(place, values, total.shape)

            run = pl.run_state(lambda sums: plgpu.wgmma(sums, factors, values))
            return run(plgpu.ACC.init(total))

        return added


@dataclass(frozen=True)
class Tcgen05(Wgmma):
    """Blackwell's products, whose sums and weights are not in registers."""

    # each half of the columns is a product of its own, and no narrower than a swizzled line
    swizzle: int = 64
    registers: bool = False

    def scratch(self, groups: int, *widths: int) -> list:
        """A barrier and the sums; see `Wgmma.scratch`."""
        sums = [plgpu.TMEM((groups, ROWS, n), jnp.float32) for n in sorted(set(widths))]
        return [plgpu.Barrier(num_barriers=groups, orders_tensor_core=True), *sums]

    def multiply(self, refs: Sequence, group) -> Multiply:
        """See `Wgmma.multiply`. One product runs at a time; products of one width share a place."""
        done, *sums = refs

        def product(a, b, shape):
            (total,) = (ref.at[group] for ref in sums if ref.shape[-1] == shape[1])
            plgpu.tcgen05_mma(total, a, b, done.at[group], accumulate=False)
            plgpu.barrier_wait(done.at[group])
            found = plgpu.async_load_tmem(total, layout=LAYOUT)
            plgpu.wait_load_tmem()  # the next product may overwrite it
            return found

        return product


PRODUCTS = dict(zip(MOSAIC, (Wgmma(), Tcgen05()), strict=True))  # by compute capability


def products() -> Wgmma:
    """The products of the chip that is traced for; Hopper's where there is no GPU, as in the
    simulator.

    Raises:
      NotImplementedError: the GPU has other tensor cores.
    """
    found = target.capability()
    takes = f"Mosaic kernels are for GPUs of compute capability {' and '.join(PRODUCTS)}"
    require(found in (None, *PRODUCTS), f"{takes}, not {found}")
    return PRODUCTS[found or "9.0"]
