"""The simulator's stand-in for products of registers, by a kernel that makes one."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_operands, mosaic_products
from tests.pallas_kernels import gpu_simulation, register_products
from tests.pallas_kernels.gpu_simulation import UNWAITED, no_races

pytestmark = gpu_simulation.needed
ROWS, COLUMNS = mosaic_products.ROWS, 128


def kernel(waits: bool, factors, values, start, out, tiles, arrived):
    """out = start + factors @ values, twice."""
    place = tiles.at[0]
    plgpu.copy_gmem_to_smem(values, place, arrived)
    a = mosaic_operands.load(factors, mosaic_products.LAYOUT, plain=True)
    total = mosaic_operands.load(start, mosaic_products.LAYOUT, plain=True)
    if waits:
        plgpu.barrier_wait(arrived)
    chip = mosaic_products.Wgmma().simulated()
    add = chip.add(chip.multiply([], 0), [], 0)
    out[...] = add(add(total, a, place), a, place)


def run(waits: bool = True):
    given = (
        jax.random.normal(jax.random.key(0), (ROWS, ROWS), jnp.bfloat16),
        jax.random.normal(jax.random.key(1), (ROWS, COLUMNS), jnp.bfloat16),
        jax.random.normal(jax.random.key(2), (ROWS, COLUMNS), jnp.float32),
    )

    def whole(*refs):
        tile = mosaic_operands.tile((1, ROWS, COLUMNS), jnp.bfloat16, 128)
        pl.run_scoped(partial(kernel, waits, *refs), tile, plgpu.Barrier())

    found = pl.kernel(
        whole,
        out_type=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        mesh=plgpu.Mesh(),
        compiler_params=plgpu.CompilerParams(lowering_semantics=mosaic_operands.LANES),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )(*given)
    a, b, start = (x.astype(jnp.float32) for x in given)
    return jax.block_until_ready(found), start + 2 * a @ b


def test_sums_of_registers_and_shared_memory(monkeypatch):
    register_products.install(monkeypatch)
    chex.assert_trees_all_close(*run(), rtol=1e-5, atol=1e-4)


def test_values_that_are_not_waited_for_are_seen(monkeypatch, capsys):
    register_products.install(monkeypatch)
    with pytest.raises(Exception, match=UNWAITED):
        run(waits=False)
        assert no_races(capsys), "race"


def test_without_the_stand_in_products_are_of_shared_memory():
    """If the simulator learns them, the stand-in can go."""
    chip = mosaic_products.Wgmma()
    assert not chip.simulated().registers and chip.registers
    with pytest.raises(Exception, match="wgmma|run_state|Accumulator"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mosaic_products.Wgmma, "simulated", lambda self: self)
            run()
