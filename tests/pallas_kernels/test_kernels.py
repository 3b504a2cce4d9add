"""Kernels in interpret mode against the float32 reference, over shapes of published models.

Every shape and type is a program of its own, and compiling it is nearly all of a test's time.
"""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cache_write, ragged_attention
from pallas_kernels.arg_specs import FILLINGS, SPECS, ArgSpec, in_float32
from pallas_kernels.projection import Projection
from tests.often import often

KERNELS = ["triton-interpret", "tpu-interpret"]
# Relative Frobenius error against the float32 reference. float32: another order of sums.
# bfloat16: 8 bits of mantissa in the inputs' products, weights and result.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
TYPES = [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("float32", "int8")]
LONG = SPECS["var-d30-t256"].reduced(tokens=40, length=33)
WIDE = SPECS["infinity-2b-t64"].reduced()
# Both sizes of heads, every type, tables for all rows and per row, three sizes of blocks, with and
# without padding; several query tiles are in test_triton_edges and test_tpu_edges.
SHAPES = {
    "one": replace(SPECS["var-d30-t1"].reduced(), dtype="float32"),
    "rows": replace(LONG, per_row=True),
    "block64-int8": replace(LONG, block_size=64, dtype="float32", kv_dtype="int8"),
    "rows-block32-int8": replace(WIDE, per_row=True, block_size=32, kv_dtype="int8"),
}


attend = jax.jit(
    partial(ragged_attention.attend, return_lse=True), static_argnames=["implementation"]
)
moments = jax.jit(ragged_attention.attention_moments, static_argnames=["implementation"])
write = jax.jit(cache_write.write, static_argnames=["implementation"])


def traced_once(operation, **options):
    """`operation` jitted; an error if other numbers of the same shapes were another program."""
    chex.clear_trace_counter()
    return jax.jit(chex.assert_max_traces(operation, n=1), **options)


def error(found, expected) -> float:
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)


def padded_with(args, anything: float):
    """The same arguments with `anything` in place of padded tokens."""
    qkv = args.projection.qkv
    real = (jnp.arange(qkv.shape[1]) < args.length)[:, None, None, None]
    qkv = jnp.where(real, qkv, anything).astype(qkv.dtype)
    return replace(args, projection=replace(args.projection, qkv=qkv))


def with_kernels(count: int) -> list:
    """Every shape; by default one for each of the first `count` kernels."""
    found = []
    for turn, (name, spec) in enumerate(SHAPES.items()):
        for i, kernel in enumerate(KERNELS):
            marks = [] if turn == 3 * i and i < count else [pytest.mark.slow]
            found.append(pytest.param(kernel, spec, id=f"{name}-{kernel}", marks=marks))
    return found


def tables(spec: ArgSpec):
    """One shape with every kind of table: same program, other numbers."""
    return [replace(spec, filling=filling, name=filling) for filling in FILLINGS]


def written(spec: ArgSpec):
    """One shape with the kinds of tables that matter to storing: heads have blocks of their own, or
    share them."""
    return [replace(spec, filling=filling) for filling in ("random", "shared")]


def heads_that_store(writes) -> np.ndarray:
    """How many heads store something in each block; of the first row."""
    writes = writes.sliced()
    ids, stored = (a[0] if writes.ids.ndim == 3 else a for a in (writes.ids, writes.source >= 0))
    return np.bincount(np.asarray(ids)[np.asarray(stored).any(-1)])


@pytest.mark.parametrize(("kernel", "shape"), with_kernels(count=2))
def test_attend(kernel, shape):
    run = traced_once(ragged_attention.attend, static_argnames=["return_lse", "implementation"])
    for spec in tables(shape):
        args = spec.arguments()
        out, lse = run(*args.attend, kv_scale=args.kv_scale, return_lse=True, implementation=kernel)
        exact = in_float32(args)
        expected, expected_lse = attend(
            *exact.attend, kv_scale=args.kv_scale, implementation="reference"
        )
        chex.assert_type(out, args.projection.dtype)
        chex.assert_type(lse, jnp.float32)
        chex.assert_tree_all_finite(out, custom_message=spec.name)
        real = slice(0, spec.length)
        assert error(out[:, real], expected[:, real]) < TOLERANCE[spec.dtype], spec.name
        tolerance = 10 * TOLERANCE[spec.dtype]
        chex.assert_trees_all_close(lse[..., real], expected_lse[..., real], atol=tolerance)


@pytest.mark.parametrize(("kernel", "shape"), with_kernels(count=1))  # TPU: test_tpu_simulator
def test_attention_moments(kernel, shape):
    for spec in tables(shape):
        args = spec.arguments()
        exact = in_float32(args)
        _, lse = attend(*exact.attend, kv_scale=args.kv_scale, implementation="reference")
        weights = jnp.where(jnp.arange(spec.tokens) < spec.length, 1.0, 0.0)
        both = (
            moments(
                *a.moments(weights, lse, squares=True),
                kv_scale=a.kv_scale,
                implementation=implementation,
            )
            for a, implementation in ((args, kernel), (exact, "reference"))
        )
        for power, (found, expected) in enumerate(zip(*both, strict=True), 1):
            chex.assert_equal_shape([found, expected])
            chex.assert_type(found, jnp.float32)
            # a square is off by twice as much, relatively
            assert error(found, expected) < power * TOLERANCE[spec.dtype], spec.name


@pytest.mark.parametrize(("kernel", "shape"), with_kernels(count=1))  # TPU: test_tpu_simulator
def test_write(kernel, shape):
    for spec in written(shape):
        args = spec.arguments(poison=False)
        assert heads_that_store(args.writes).max() > 1 or spec.filling != "shared"
        check_write(kernel, args)


def check_write(kernel, args):
    found, expected = (
        write(*args.write, kv_scale=args.kv_scale, implementation=name)
        for name in (kernel, "reference")
    )
    assert_stored(found, expected, args.projection)


@pytest.mark.parametrize("kernel", often(["reference"], ["reference", *KERNELS]))
def test_store_and_attend_is_both(kernel):
    """Bit for bit what attention and storing do, one after the other."""
    args = replace(PLAIN, apart=True).arguments()
    options = dict(kv_scale=args.kv_scale, implementation=kernel)
    both = jax.jit(ragged_attention.store_and_attend, static_argnames=["implementation"])
    found = both(*args.attend, args.writes, **options)
    expected = (attend(*args.attend, **options)[0], *write(*args.write, **options))
    chex.assert_trees_all_equal(found, expected)


PLAIN = SPECS["var-d30-t256"].reduced(tokens=40, length=33, normalised=False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), often(TYPES[3:], TYPES))
def test_tokens_are_stored_as_they_are(kernel, dtype, kv_dtype):
    """Without norm, rotation or bias every bit is the reference's, int8 as well."""
    args = replace(PLAIN, dtype=dtype, kv_dtype=kv_dtype).arguments(poison=False)
    args = replace(args, projection=replace(args.projection, v_bias=None))
    assert stored_exactly(args.kv_pool, args.projection)
    check_write(kernel, args)


def stored_exactly(pool, projection: Projection) -> bool:
    """Whether ways to store a token may not differ in any bit: but for a bias, whose sum is rounded
    once, nothing is computed on the way. (Compilers may leave out the rounding of that sum to
    bfloat16 on the way to int8.)"""
    plain = projection.multiplier is None and projection.rotation is None
    once = pool.dtype != jnp.int8 or projection.dtype == jnp.float32
    return plain and (once or projection.v_bias is None)


def assert_stored(found, expected, projection: Projection):
    """Pools and scales of two ways to store the same tokens. Unless `stored_exactly`, numbers that
    are computed on the way may be rounded the other way."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    if stored_exactly(found[0], projection):
        chex.assert_trees_all_equal(found, expected, strict=True)
    (pool, scale), (wanted, wanted_scale) = found, expected
    one = 1.01 if pool.dtype == jnp.int8 else 0
    near = {jnp.float32: 2e-6}.get(pool.dtype.type, 2**-7)
    pool, wanted = (np.asarray(a, np.float32) for a in (pool, wanted))
    small, others = near * 1e-3, 0.04
    if projection.rotation is not None and projection.row_scale is not None:
        # rounded before they are rotated, too, and a result may be the small difference of two
        small, others = np.abs(wanted).max() * 2**-9, 0.5
    np.testing.assert_allclose(pool, wanted, rtol=near, atol=one or small)
    # compilers may leave out a rounding to bfloat16 on the way to int8: 1 in 40 numbers
    assert np.mean(pool != wanted) < others or near < 1e-3
    if scale is not None:
        np.testing.assert_allclose(scale, wanted_scale, rtol=2**-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_empty_entries_of_a_write_touch_nothing(kernel):
    """They may name a block that another entry stores into."""
    k, v = (jax.random.normal(jax.random.key(i), (1, 1, 16, 64)) for i in range(2))
    slots = np.full((1, 16), -1)
    slots[0, 3] = 0
    writes = jax.tree.map(jnp.asarray, cache_write.block_writes(slots, 16, entries=4))
    pool = jnp.zeros((1, 2, 16, 128))
    found, _ = write(pool, Projection.of(k, k, v), writes, implementation=kernel)
    expected = pool.at[0, 0, 0].set(jnp.concatenate([k[0, 0, 3], v[0, 0, 3]]))
    chex.assert_trees_all_equal(found, expected)


def test_padding_may_hold_anything():
    """Padded keys, values and queries of NaN change nothing in the reference."""
    spec = SPECS["var-d30-t36"].reduced(dtype="float32", tokens=40, length=9)
    args = spec.arguments()
    weights = jnp.where(jnp.arange(spec.tokens) < spec.length, 1.0, 0.0)

    def results(a):
        out, lse = attend(*a.attend, implementation="reference")
        sums = moments(*a.moments(weights, lse, squares=True), implementation="reference")
        return out[:, : spec.length], lse[:, :, : spec.length], sums

    chex.assert_trees_all_close(results(padded_with(args, jnp.nan)), results(args), atol=1e-6)
