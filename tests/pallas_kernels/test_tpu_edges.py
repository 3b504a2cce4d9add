"""TPU kernels in interpret mode where shapes and contents are awkward."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cache_write, ragged_attention
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.cache_write import BlockWrites
from pallas_kernels.ragged_attention import tpu
from pallas_kernels.ragged_attention.config import TPUConfig
from pallas_kernels.ragged_attention.tpu_blocks import BUFFERS
from pallas_kernels.shared import tpu_projection
from tests.pallas_kernels.test_kernels import padded_with

SMALL = ArgSpec(
    name="small", rows=2, heads=2, head_dim=16, tokens=21, length=13, entries=3, dtype="float32"
)
SMALL_TILES = TPUConfig(block_q=128, copy_keys=32, own_keys=64)
attend = jax.jit(
    partial(ragged_attention.attend, return_lse=True), static_argnames="implementation"
)
moments = jax.jit(ragged_attention.attention_moments, static_argnames="implementation")
write = jax.jit(cache_write.write, static_argnames="implementation")
small_tiles = jax.jit(partial(tpu.attend, return_lse=True, interpret=True, config=SMALL_TILES))


def close(found, expected, tolerance=1e-5):
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def check_attend(args, found):
    """`found`, or what the kernel gives, against the reference."""
    expected = attend(*args.attend, kv_scale=args.kv_scale, implementation="reference")
    for a, b in zip(found, expected, strict=True):
        chex.assert_tree_all_finite(real(a, args))
        close(real(a, args), real(b, args))


def real(array, args):
    """Output [R, T, N, H] or statistics [R, N, T] of the real tokens."""
    length = int(args.length)
    return array[:, :length] if array.ndim == 4 else array[:, :, :length]


def kernel_attend(args):
    return attend(*args.attend, kv_scale=args.kv_scale, implementation="tpu-interpret")


@pytest.mark.slow
def test_small_heads_and_blocks():
    args = replace(SMALL, block_size=5, per_row=True).arguments()
    check_attend(args, kernel_attend(args))


@pytest.mark.slow
def test_several_tiles_of_every_kind():
    """Tiles of queries and groups of keys that the sizes are no multiples of, more groups than
    buffers; padded tokens hold anything."""
    entries = 2 * BUFFERS * 2 + 1
    spec = replace(SMALL, tokens=301, length=300, entries=entries, kv_dtype="int8")
    args = spec.arguments()
    for bad in (jnp.nan, jnp.inf):
        check_attend(args, small_tiles(*padded_with(args, bad).attend, args.kv_scale))


def test_a_pool_without_blocks():
    """Nothing is stored yet, or nothing ever will be."""
    args = SMALL.arguments(poison=False)
    table = jax.tree.map(lambda a: a[..., :0], args.table.sliced())
    args = replace(args, table=table, kv_pool=args.kv_pool[:, :0])
    check_attend(args, kernel_attend(args))
    both_writes(args)


@pytest.mark.slow
def test_moments_of_some_queries():
    """Queries without weight may hold anything."""
    args = replace(SMALL, tokens=150, length=131, entries=20).arguments()
    rng = np.random.default_rng(3)
    lse = jnp.asarray(rng.uniform(3, 5, (2, 2, 150)), jnp.float32)
    weights = jnp.asarray(rng.random(150), jnp.float32).at[131:].set(0)
    expected = moments(*args.moments(weights, lse, squares=True), implementation="reference")
    dirty = padded_with(args, jnp.nan).moments(weights, lse, squares=True)
    for a, b in zip(moments(*dirty, implementation="tpu-interpret"), expected, strict=True):
        close(a, b)


def both_writes(args):
    found, expected = (
        write(*args.write, kv_scale=args.kv_scale, implementation=name)
        for name in ("tpu-interpret", "reference")
    )
    chex.assert_trees_all_equal(found, expected, strict=True)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_every_kind_of_entry(kv_dtype):
    """Consecutive, full, partial and empty entries in any order, an empty head; tokens that are not
    stored hold anything; zeros."""
    size, none = 8, -np.ones(8, np.int32)
    run, mixed = np.arange(3, 3 + size), np.array([20, 2, 19, 0, 1, 12, 13, 11])
    part = np.where(np.arange(size) % 3 == 1, 14 + np.arange(size) // 3, -1)
    source = np.stack([np.stack([none, part, none, none, run, mixed]), np.tile(none, (6, 1))])
    ids = np.array([[0, 4, 0, 0, 2, 7], [0, 0, 0, 0, 0, 0]])
    writes = BlockWrites(jnp.asarray(ids, jnp.int32), jnp.asarray(source, jnp.int32))
    spec = replace(SMALL, block_size=size, entries=6, kv_dtype=kv_dtype)
    args = replace(spec.arguments(poison=False), writes=writes)
    unused = np.setdiff1d(np.arange(21), source)
    qkv = args.projection.qkv.at[:, unused, 1].set(jnp.nan).at[:, 2, 1].set(0)
    both_writes(replace(args, projection=replace(args.projection, qkv=qkv)))


def sharing(spec: ArgSpec):
    """Arguments where all heads store tokens into the same blocks, each into slots of its own, some
    of which stay as they are."""
    args = spec.arguments(poison=False)
    head, token = np.ogrid[: spec.heads, : spec.tokens]
    slots = np.where((token + head) % 3, token * spec.heads + head, -1)
    writes = jax.tree.map(jnp.asarray, cache_write.block_writes(slots, spec.block_size))
    assert spec.tokens <= spec.entries * spec.block_size
    return replace(args, writes=writes)


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "at_once"), [("bfloat16", 1), ("int8", 1024)])
def test_heads_share_blocks(monkeypatch, kv_dtype, at_once):
    """Heads share one grid step or take several."""
    monkeypatch.setattr(tpu_projection, "TOKENS_AT_ONCE", at_once)
    both_writes(sharing(replace(SMALL, heads=5, block_size=8, kv_dtype=kv_dtype)))


def test_what_does_not_compile_is_refused():
    args = SMALL.arguments()
    with pytest.raises(NotImplementedError, match="heads of 64, 128, 256, not 16.*reference"):
        ragged_attention.attend(*args.attend, implementation="tpu")
    with pytest.raises(NotImplementedError, match="heads of 64, 128, ..., not 16.*reference"):
        cache_write.write(*args.write, implementation="tpu")
    args = replace(SMALL, head_dim=64, block_size=128, kv_dtype="int8").arguments()
    with pytest.raises(
        NotImplementedError, match="blocks of 8, 16, ... 64 slots in a pool of int8"
    ):
        cache_write.write(*args.write, kv_scale=args.kv_scale, implementation="tpu")
