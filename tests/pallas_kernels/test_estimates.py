"""Estimates of what kernels compute and move: formulas against numbers counted by hand, and that
every kernel has one."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import cache_write, estimates, implementations, ragged_attention
from pallas_kernels.arg_specs import SPECS, ArgSpec
from tests.pallas_kernels.token_shapes import abstract_token_arguments
from varjax.generation.cost import program_cost

# 2 rows x 3 heads = 6 lists of 2 blocks of 16 slots; 30 queries, each with 5 + 32 keys
SPEC = ArgSpec(name="small", rows=2, heads=3, head_dim=64, tokens=5, length=5, entries=2)
INT8 = replace(SPEC, kv_dtype="int8")


def counted(estimate) -> tuple[int, int, int]:
    return estimate.flops, estimate.transcendentals, estimate.bytes_accessed


def test_attend():
    a = SPEC.abstract()
    given = a.projection, a.kv_pool, a.table
    own = 4 * 30 * 64 * 2  # q, k, v and the result, bfloat16
    stored = 6 * 32 * (64 + 64) * 2
    work = 4 * 30 * 37 * 64, 30 * 37
    assert counted(estimates.attend(*given, lse=False)) == (*work, own + stored)
    tiles = estimates.attend(*given, lse=True, tiles=3)
    assert counted(tiles) == (*work, own + 3 * stored + 30 * 4)


def test_attend_int8():
    """A scale for the key and one for the value of every slot; on a TPU 128 of them at once."""
    a = INT8.abstract()
    run = partial(estimates.attend, a.projection, a.kv_pool, a.table, lse=False)
    own = 4 * 30 * 64 * 2
    assert run().bytes_accessed == own + 6 * 32 * (128 + 2 * 4)
    assert run(scales_at_once=128).bytes_accessed == own + 6 * 2 * (16 * 128 + 128 * 4)


def test_attend_token():
    """6 heads of 40 slots; positions of 4 bytes, sums read and written, two scales per slot."""
    query, slots = abstract_token_arguments(SPEC, 40)
    queries, held = 2 * 6 * 64 * 2, 240 * 128
    found = counted(estimates.attend_token(query, slots))
    assert found == (4 * 240 * 64, 240, queries + 2 * held + 4 * 240 + 8 * 240)
    stored = estimates.attend_token(query, slots, stored=8)  # 8 of 40 slots written, k and v read
    more = stored.bytes_accessed - estimates.attend_token(query, slots).bytes_accessed
    assert more == 6 * 8 * 128 * 2 + 2 * 6 * 64 * 2
    query, slots = abstract_token_arguments(INT8, 40, sums=False, shared=True)
    moved = queries + held + 4 * 80 + 8 * 240
    assert estimates.attend_token(query, slots).bytes_accessed == moved


def test_compilers_are_told_the_estimate():
    a = SPEC.abstract()
    traced = jax.jit(partial(ragged_attention.attend, implementation="tpu")).trace(*a.attend)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    [work] = program_cost(traced.jaxpr).kernels
    [told] = re.findall(r"flops\\22: ?(\d+)", text)
    assert int(told) == work.flops > 0


def test_queries_alone_have_no_keys_of_their_own():
    a = SPEC.abstract()
    queries = jax.eval_shape(lambda p: replace(p, qkv=p.qkv[:, :, :1]), a.projection)
    found = estimates.attend(queries, a.kv_pool, a.table, lse=False)
    stored = 6 * 32 * (64 + 64) * 2
    assert counted(found) == (4 * 30 * 32 * 64, 30 * 32, 2 * 30 * 64 * 2 + stored)


@pytest.mark.parametrize(("squares", "results"), [(False, 6 * 37 * 4), (True, 2 * 6 * 37 * 4)])
def test_attention_moments(squares, results):
    a, wide = SPEC.abstract(), INT8.abstract()
    run = partial(estimates.attention_moments, squares=squares)
    own = 2 * 30 * 64 * 2 + 30 * 4  # q and k, log-sum-exp
    found = run(a.projection, a.kv_pool, a.table)
    moved = own + 6 * 32 * 64 * 2 + results
    assert counted(found) == (2 * 30 * 37 * 64, 30 * 37, moved)
    found = run(a.projection, a.kv_pool, a.table, halves=2)  # values beside the keys
    assert found.bytes_accessed == moved + 6 * 32 * 64 * 2
    found = run(wide.projection, wide.kv_pool, wide.table)
    assert found.bytes_accessed == own + 6 * 32 * (64 + 4) + results


def test_write():
    a, wide = SPEC.abstract(), INT8.abstract()
    tokens = 30 * 2 * 64 * 2  # of 5 tokens each, room is for 32
    assert counted(estimates.write(a.projection, a.kv_pool, a.writes)) == (0, 0, 2 * tokens)
    whole = estimates.write(a.projection, a.kv_pool, a.writes, blocks=True)  # read and written
    assert whole.bytes_accessed == tokens + 2 * 6 * 2 * 16 * 128 * 2
    found = estimates.write(wide.projection, wide.kv_pool, wide.writes)
    assert found.bytes_accessed == tokens + 30 * (128 + 8)
    few = replace(SPEC, tokens=40, length=40).abstract()  # room for 32 of 40
    found = estimates.write(few.projection, few.kv_pool, few.writes)
    assert found.bytes_accessed == 2 * 6 * 32 * 2 * 64 * 2


def test_finish():
    projection = SPEC.abstract().projection
    moved = 2 * (2 * 30 * 64 * 2)  # keys and values, read and written
    assert counted(estimates.finish(projection, 2)) == (0, 0, moved)
    rotated = estimates.finish(projection, 2, 64)  # keys by a matrix [64, 64]
    assert counted(rotated) == (2 * 30 * 64 * 64, 0, moved)


def kernels(operation, *arguments) -> dict:
    """{name: work} of the kernels of a traced program."""
    found = program_cost(jax.make_jaxpr(operation)(*arguments)).kernels
    return {work.name: work for work in found}


@pytest.mark.parametrize("kernel", implementations.PLATFORMS)
@pytest.mark.parametrize("name", ["var-d30-t256", "infinity-2b-t64", "llamagen-xl-t1"])
def test_every_kernel_has_an_estimate(kernel, name):
    """Traced kernels have the same names on every platform. Kernels with the same arithmetic agree
    on the FLOPs."""
    a = SPECS[name].abstract()
    lse = jax.ShapeDtypeStruct(a.projection.shape[:3], jnp.float32)
    weights = jax.ShapeDtypeStruct(a.projection.shape[2:3], jnp.float32)
    attend = partial(ragged_attention.attend, implementation=kernel)
    moments = partial(ragged_attention.attention_moments, implementation=kernel)
    write = partial(cache_write.write, implementation=kernel)
    found = kernels(attend, *a.attend)
    found |= kernels(moments, *a.moments(weights, lse)) | kernels(write, *a.write)
    both = partial(ragged_attention.store_and_attend, implementation=kernel)
    found |= kernels(both, *a.attend, a.writes)
    own = {"finish", "finish_and_store"} if kernel == "mosaic" else set()
    assert found.keys() == {"ragged_attention", "attention_moments", "cache_write"} | own
    assert all(work.bytes > 0 for work in found.values()), found
    expected = estimates.attend(a.projection, a.kv_pool, a.table, lse=False)
    assert found["ragged_attention"].flops == expected.flops
    assert found["ragged_attention"].bytes >= expected.bytes_accessed
    assert found["attention_moments"].flops == expected.flops / 2
    if own:  # what is stored is written once more, and read no second time
        stored = found["finish_and_store"].bytes - found["finish"].bytes
        assert 0 < stored == found["cache_write"].bytes / 2


@pytest.mark.parametrize(("score", "part", "each"), [(0, 0, 4), (1, 0, 9), (1, 1, 12)])
def test_ranks_count_vector_operations(score, part, each):
    """Six heads of 10 slots: 100 pairs each; what is compared, `among` and counts are moved."""
    array = jax.ShapeDtypeStruct((2, 3, 10), jnp.float32)
    found = estimates.rank(array, array if score else None, array if part else None)
    assert found.flops == 6 * 100 * each * 30
    assert found.bytes_accessed == 4 * 60 * (3 + score + part)


@pytest.mark.parametrize(("top_k", "top_p", "passes"), [(0, 0.0, 0), (5, 0.0, 32), (5, 0.9, 64)])
def test_choosing_counts_vector_operations(top_k, top_p, passes):
    """Two rows of each of three tokens of 128: 3 operations a pass and 8 once, each as long as 30
    of a matrix product; logits, noise and tokens are moved."""
    logits, noise = (jax.ShapeDtypeStruct((rows, 3, 128), jnp.float32) for rows in (2, 1))
    found = estimates.sample(logits, noise, top_k, top_p)
    assert found.flops == 3 * 128 * (3 * passes + 8) * 30
    assert found.bytes_accessed == 4 * (2 * 3 * 128 + 3 * 128 + 3)
