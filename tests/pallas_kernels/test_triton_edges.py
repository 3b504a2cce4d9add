"""Interpreted GPU kernels on shapes that published models do not have."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_attention
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.ragged_attention import BlockTable, triton
from pallas_kernels.ragged_attention.config import TritonConfig
from tests.pallas_kernels.test_kernels import padded_with

SPEC = ArgSpec(
    name="edge",
    rows=2,
    heads=3,
    head_dim=16,
    tokens=37,
    length=29,
    block_size=4,
    entries=5,
    dtype="float32",
)
NEAR = {"atol": 2e-5, "rtol": 2e-5}
attend = jax.jit(
    partial(ragged_attention.attend, return_lse=True), static_argnames=["implementation"]
)
moments = jax.jit(ragged_attention.attention_moments, static_argnames=["implementation"])


def real(array):
    """Output [R, T, N, H] or statistics [R, N, T] of the real tokens."""
    return array[:, : SPEC.length] if array.ndim == 4 else array[:, :, : SPEC.length]


def compare(args, length: int):
    """Attention and its moments, kernel against reference, for arguments of SPEC's kind."""
    weights = (jnp.arange(args.projection.shape[2]) < length).astype(jnp.float32)
    results = []
    for name in ("triton-interpret", "reference"):
        out, lse = attend(*args.attend, kv_scale=args.kv_scale, implementation=name)
        sums = moments(
            *args.moments(weights, lse, squares=True), kv_scale=args.kv_scale, implementation=name
        )
        results.append((out[:, :length], lse, *sums))
        chex.assert_tree_all_finite(out)
    for i, (found, expected) in enumerate(zip(*results, strict=True)):
        if i == 1:  # log-sum-exp
            found, expected = found[:, :, :length], expected[:, :, :length]
        chex.assert_trees_all_close(found, expected, **NEAR)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"block_size": 3, "head_dim": 24}, marks=pytest.mark.slow),  # no powers of two
        {"normalised": True, "rotated": True, "kv_dtype": "int8"},
        # more own keys than one step holds: they are finished before the kernel
        {"normalised": True, "rotated": True, "tokens": 257, "length": 200},
        # decoding
        pytest.param(
            {"rotated": True, "tokens": 1, "length": 1, "rows": 5}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()),
)
def test_sizes(changes):
    spec = replace(SPEC, **changes)
    compare(spec.arguments(), spec.length)


def test_nothing_stored():
    """Before the first scale a table may have no entry and a pool no block."""
    args = SPEC.arguments(poison=False)
    none = jnp.zeros((SPEC.heads, 0), jnp.int32)
    pool = jnp.full_like(args.kv_pool, jnp.nan)[:, :0]
    compare(replace(args, table=BlockTable(none, none, none), kv_pool=pool), SPEC.length)


def test_padding_may_hold_anything():
    """Real queries do not see what lies behind the last token."""
    args = replace(SPEC, normalised=True, rotated=True).arguments()
    padded = jnp.arange(SPEC.tokens) >= SPEC.length
    clean = attend(*args.attend, implementation="triton-interpret")
    for anything in (jnp.nan, jnp.inf):
        dirty = padded_with(args, anything)
        found = attend(*dirty.attend, implementation="triton-interpret")
        chex.assert_tree_all_finite(found)
        for a, b in zip(map(real, found), map(real, clean), strict=True):
            chex.assert_trees_all_equal(a, b)
        weights = (jnp.arange(SPEC.tokens) < SPEC.length).astype(jnp.float32)
        lse = jnp.where(padded, anything, clean[1])
        sums, _ = moments(
            *dirty.moments(weights, lse, squares=True), implementation="triton-interpret"
        )
        chex.assert_trees_all_close(sums.sum(-1), SPEC.length, rtol=1e-5)


@pytest.mark.parametrize(("block_q", "block_k"), [(16, 128), (64, 16)])
def test_any_tiles_give_the_same(block_q, block_k):
    args = SPEC.arguments()
    config = TritonConfig(block_q=block_q, block_k=block_k, num_warps=4, num_stages=2)
    out, lse = triton.attend(
        *args.attend, args.kv_scale, return_lse=True, interpret=True, config=config
    )
    expected, expected_lse = attend(*args.attend, implementation="reference")
    chex.assert_trees_all_close(real(out), real(expected), **NEAR)
    chex.assert_trees_all_close(real(lse), real(expected_lse), **NEAR)


def test_large_scores_do_not_overflow():
    args = SPEC.arguments()
    projection = replace(args.projection, scale=100.0)  # scores of hundreds
    args = replace(args, projection=projection)
    out, lse = attend(*args.attend, implementation="triton-interpret")
    expected, expected_lse = attend(*args.attend, implementation="reference")
    chex.assert_trees_all_close(real(lse), real(expected_lse), rtol=1e-5)
    assert np.linalg.norm(real(out - expected)) < 1e-3 * np.linalg.norm(real(expected))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "heads of 16, 32, 64, 128, not 24"),
        ({"block_size": 48}, "blocks of 1, 2, .* slots, not 48"),
        ({"kv_dtype": "float64"}, "pool of bfloat16, .*, not float64"),
    ],
)
def test_refused_on_a_gpu(changes, message):
    """Tracing raises the reason and a way out."""
    spec = replace(SPEC, **{n: v for n, v in changes.items() if n != "kv_dtype"})
    args = spec.abstract()
    if "kv_dtype" in changes:
        args = replace(args, kv_pool=jax.ShapeDtypeStruct(args.kv_pool.shape, np.float64))
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=message) as caught:
        jax.eval_shape(partial(attend, implementation="triton"), *args.attend)
    assert "--attention=reference" in str(caught.value)


def test_an_int8_pool_that_32_bits_cannot_address_is_refused():
    spec = replace(SPEC, head_dim=64, block_size=16, rows=1, kv_dtype="int8", dtype="bfloat16")
    args = spec.abstract()
    blocks = 2**31 // (16 * 128) + 1
    pool = jax.ShapeDtypeStruct((1, blocks, 16, 128), jnp.int8)
    scale = jax.ShapeDtypeStruct((1, blocks, 32), jnp.float32)
    args = replace(args, kv_pool=pool)
    with pytest.raises(NotImplementedError, match="int8 pool of 2.00 GiB"):
        jax.eval_shape(partial(attend, implementation="triton"), *args.attend, kv_scale=scale)
