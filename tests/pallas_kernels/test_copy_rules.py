"""Copies that break a rule of the chip are seen, each for its reason; those of the kernels are in
the kernels' tests."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_operands
from tests.pallas_kernels import copy_rules, gpu_simulation

pytestmark = gpu_simulation.needed
HALF = jnp.bfloat16


def plain(*shape):
    return plgpu.SMEM(shape, HALF)


def swizzled(rows: int, columns: int, piece: int, swizzle: int):
    transforms = plgpu.TilingTransform((8, piece)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((rows, columns), HALF, transforms=transforms)


def copied(monkeypatch, shape, part, memory, times: int = 1) -> list[str]:
    """What a program that copies `part` of an array to shared memory does wrong. part: an index."""
    broken = copy_rules.watch(monkeypatch)

    def kernel(array, out):
        def body(place, arrived):
            for _ in range(times):
                plgpu.copy_gmem_to_smem(array.at[part], place, arrived)
            plgpu.barrier_wait(arrived)
            out[...] = jnp.zeros(128, jnp.float32)

        pl.run_scoped(body, memory, plgpu.Barrier(num_arrivals=times))

    pl.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        mesh=plgpu.Mesh(),
        compiler_params=plgpu.CompilerParams(lowering_semantics=mosaic_operands.LANES),
        interpret=plgpu.InterpretGPUParams(),
    )(jnp.zeros(shape, HALF)).block_until_ready()
    return broken


ALL, ds = slice(None), pl.ds
GOOD = {
    "whole": ((64, 64), (ALL, ALL), swizzled(64, 64, 64, 128)),
    "pool": ((2, 9, 16, 128), (1, 3, ALL, ds(64, 64)), swizzled(16, 64, 64, 128)),
    "plain": ((64, 64), (ds(8, 8), ALL), plain(8, 64)),
}
BAD = {
    "begins at no multiple of 16": ((64, 72), (ALL, ds(4, 64)), plain(64, 64)),
    "rows are no multiples of 16": ((64, 68), (ALL, ds(0, 64)), plain(64, 64)),
    "is no multiple of 16 bytes": ((64, 64), (ALL, ds(0, 12)), plain(64, 12)),
    "or longer than 256": ((512, 64), (ALL, ALL), plain(512, 64)),
    "no multiple of 128 bytes in all": ((64, 64), (ds(0, 1), ds(0, 8)), plain(1, 8)),
    "more than 5 axes": ((2, 3, 2, 2, 16, 64), (ALL,) * 6, plain(2, 3, 2, 2, 16, 64)),
}


@pytest.mark.parametrize("case", GOOD)
def test_good(case, monkeypatch):
    assert not copied(monkeypatch, *GOOD[case])


@pytest.mark.parametrize("reason", BAD)
def test_bad(reason, monkeypatch):
    broken = copied(monkeypatch, *BAD[reason])
    assert len(broken) == 1 and reason in broken[0]


@pytest.mark.parametrize(("times", "seen"), [(15, 0), (16, 1)])
def test_bytes_of_a_phase(times, seen, monkeypatch):
    """64 KiB each."""
    broken = copied(monkeypatch, (256, 128), (ALL, ALL), plain(256, 128), times)
    assert len(broken) == seen and all("a barrier wait for 1048576 bytes" in b for b in broken)


def copy_of(rows, columns, **layout):
    """A copy of part of a matrix [64, 64] to the same place of another."""
    given = dict(shape=(64, 64), place_shape=(64, 64), dtype=jnp.dtype(HALF))
    return copy_rules.Copy(box=(rows, columns), place=(rows, columns), **given, **layout)


ROWS, WIDE = slice(0, 8), slice(0, 64)


@pytest.mark.parametrize(
    ("given", "layout", "reason"),
    [
        ((ROWS, WIDE), dict(tiling=(8, 64), swizzle=128), None),
        ((ROWS, slice(8, 64)), {}, "begins at no multiple of 128 bytes in shared memory"),
        # JAX refuses these two, as long as it does
        ((ROWS, WIDE), dict(tiling=(8, 32), swizzle=128), "rows of 64 bytes, swizzled within 128"),
        ((ROWS, slice(0, 32)), dict(tiling=(8, 64), swizzle=128), "rows of 128 bytes, swizzled"),
    ],
)
def test_places_in_shared_memory(given, layout, reason):
    broken = [*copy_of(*given, **layout).broken()]
    assert len(broken) == (reason is not None)
    assert all(reason in b for b in broken)
