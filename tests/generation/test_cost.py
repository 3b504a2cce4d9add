"""FLOPs and bytes of small programs, counted by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.arg_specs import SPECS
from pallas_kernels.cache_write import mosaic_gpu as mosaic_write
from pallas_kernels.ragged_attention import mosaic_gpu
from varjax.generation.cost import PallasWork, device_bytes, num_bytes, program_cost, times_read

A = jax.ShapeDtypeStruct((4, 8), jnp.float32)
B = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
PRODUCT = 2 * 4 * 8 * 16


def cost(function, *arguments):
    return program_cost(jax.make_jaxpr(function)(*arguments))


def test_products():
    assert cost(lambda a, b: a @ b.astype(a.dtype), A, B).flops == PRODUCT
    batched = cost(
        lambda a, b: jnp.einsum("nij,njk->nik", a, b), np.zeros((3, 4, 8)), np.zeros((3, 8, 16))
    )
    assert batched.flops == 3 * PRODUCT
    assert cost(jax.jit(lambda a: jax.checkpoint(jnp.sin)(a) @ a.T), A).flops == 2 * 4 * 4 * 8


def test_products_in_8_bits_are_told_apart():
    one, other = np.zeros((4, 8), np.int8), np.zeros((8, 16), np.int8)

    def both(one, other):
        exact = jnp.dot(one, other, preferred_element_type=jnp.int32)
        return exact + one.astype(jnp.float32) @ other.astype(jnp.float32)

    found = cost(both, one, other)
    assert (found.flops, found.flops_8_bits) == (2 * PRODUCT, PRODUCT)
    repeated = cost(lambda a, b: jax.lax.map(lambda _: both(a, b), jnp.arange(3)), one, other)
    assert (repeated.flops, repeated.flops_8_bits) == (6 * PRODUCT, 3 * PRODUCT)


def test_convolution():
    image, weights = np.zeros((2, 6, 6, 8), np.float32), np.zeros((3, 3, 4, 10), np.float32)

    def convolve(image, weights):
        return jax.lax.conv_general_dilated(
            image, weights, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )  # fmt: skip

    assert cost(convolve, image, weights).flops == 2 * (2 * 4 * 4 * 10) * (3 * 3 * 4)


def test_scans_are_multiplied_out():
    weights = jax.ShapeDtypeStruct((5, 8, 8), jnp.bfloat16)

    def layers(x, weights):
        unread = jnp.zeros((5, 1000))
        return jax.lax.scan(lambda x, w: (x @ w[0].astype(x.dtype), None), x, (weights, unread))[0]

    def scales(x, weights):
        return jax.lax.scan(lambda x, _: (layers(x, weights), None), x, None, length=7)[0]

    found = cost(scales, A, weights)
    assert found.flops == 7 * 5 * 2 * 4 * 8 * 8
    assert found.scanned_bytes == 7 * 5 * 8 * 8 * 2
    assert not found.kernels and not found.loops


def test_branches_and_loops():
    def either(which, a):
        return jax.lax.cond(which, lambda a: a @ a.T, lambda a: a @ a.T @ a @ a.T, a)

    assert cost(either, True, A).flops == 2 * (4 * 4 * 8 + 4 * 4 * 8 + 4 * 8 * 4)

    def loop(a, times):
        return jax.lax.fori_loop(0, times, lambda _, a: a @ a.T @ a, a)

    found = cost(loop, A, 3)
    assert found.flops == 2 * 2 * 4 * 4 * 8 and found.loops == 1


def test_estimates_of_kernels_count_as_often_as_they_run():
    estimate = pl.CostEstimate(flops=10, bytes_accessed=7, transcendentals=1)

    def kernel(x, _):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = pl.pallas_call(lambda a, b: None, out_shape=shape, name="k", cost_estimate=estimate)
        return call(x), None

    found = cost(lambda x: jax.lax.scan(kernel, x, None, length=3)[0], np.zeros((8, 8), np.float32))
    assert dict(found.kernels) == {PallasWork("k", 10.0, 7.0): 3}


def test_mosaic_kernels_are_named_and_not_looked_into():
    """Their loops are as long as a table says."""
    args = SPECS["var-d30-t256"].reduced(heads=2).abstract()
    attend = partial(mosaic_gpu.attend, return_lse=False, interpret=False)
    found = cost(attend, *args.attend, args.kv_scale)
    write = partial(mosaic_write.write, kv_scale=None, interpret=False)
    found += cost(write, args.kv_pool, *args.write[1:])
    # keys are finished for each
    names = sorted(work.name for work in found.kernels.elements())
    assert names == ["cache_write", "finish", "finish", "ragged_attention"]
    assert all(work.bytes for work in found.kernels)
    assert found.flops == found.loops == 0


def test_inside_shard_map_the_share_of_one_device_counts():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = P("data"), P()

    def run(a, b, unread):
        return a @ b.astype(a.dtype)

    program = jax.shard_map(run, mesh=mesh, in_specs=(split, whole, whole), out_specs=split)
    jaxpr = jax.make_jaxpr(program)(A, B, A)
    assert program_cost(jaxpr).flops == PRODUCT / 2
    assert [n > 0 for n in times_read(jaxpr)] == [True, True, False]
    divided = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, split))
    assert device_bytes(divided) == num_bytes(divided) / 2 == 4 * 8 * 4 / 2


def test_how_often_inputs_are_read():
    """Once by every equation, within loops as often as they run; what is sliced likewise."""

    def program(a, b, c, d):
        once = jax.jit(lambda x: x @ x.T)(a)

        def step(carry, _):
            return carry + b.sum().astype(jnp.float32) + once.sum(), None

        return jax.lax.scan(step, c, None, length=5)[0]

    jaxpr = jax.make_jaxpr(program)(A, B, 1.0, 2.0)
    assert times_read(jaxpr) == [2, 5, 5, 0]
