"""Mosaic GPU kernels compiled for Hopper and Blackwell GPUs that are not here.

Machine code is made when a program is loaded on the chip: what is seen here is that the kernels
lower, that their shared memory fits, and that the pool is changed in place.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import chips
from pallas_kernels.arg_specs import SPECS
from pallas_kernels.cache_write import mosaic_gpu as mosaic_write
from pallas_kernels.ragged_attention import config, mosaic_gpu

pytestmark = pytest.mark.aot
BASE = replace(SPECS["var-d30-t256"], tokens=176, length=169)
SHAPES = {
    "decode": SPECS["var-d30-t1"],
    "odd": replace(BASE, tokens=169, length=100),
    "rows": replace(BASE, per_row=True),
    "block8": replace(BASE, block_size=8),
    "block64": replace(BASE, block_size=64),
    "wide": SPECS["infinity-2b-t4096"],
}
SHAPES |= {f"{name}-int8": replace(spec, kv_dtype="int8") for name, spec in SHAPES.items()}


@pytest.fixture(params=["h100", "h200", "b200"])
def sharding(request):
    """Of a chip, which is traced for as well."""
    if why := chips.why_unavailable(request.param):
        pytest.skip(why)
    mesh = Mesh(np.array(chips.compile_only_devices(request.param)), ("devices",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield NamedSharding(mesh, PartitionSpec())


def kernels(compiled) -> int:
    return compiled.as_text().count('custom_call_target="mosaic_gpu')


@pytest.mark.parametrize("name", SHAPES)
def test_attention(sharding, name):
    spec = SHAPES[name]
    args = spec.abstract(sharding)
    attend = jax.jit(partial(mosaic_gpu.attend, return_lse=True, interpret=False))
    assert kernels(attend.lower(*args.attend, args.kv_scale).compile()) == 1

    def line(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    given = args.moments(line(spec.tokens), line(*args.q.shape[:3]))
    moments = jax.jit(partial(mosaic_gpu.attention_moments, squares=True, interpret=False))
    assert kernels(moments.lower(*given, args.kv_scale).compile()) == 1


@pytest.mark.parametrize("name", [name for name in SHAPES if "int8" not in name])
def test_storing_is_in_place(sharding, name):
    args = SHAPES[name].abstract(sharding)

    def store(pool, *given):
        return mosaic_write.write(pool, *given, None, interpret=False)[0]

    compiled = jax.jit(store, donate_argnums=0).lower(*args.write).compile()
    assert kernels(compiled) == 1
    pool = args.kv_pool.size * args.kv_pool.dtype.itemsize
    # no second pool; tokens of other than a multiple of 8 are copied
    assert compiled.memory_analysis().temp_size_in_bytes < pool / 2


def test_shared_memory():
    """As docs/kernels.md says, and within the 227 KiB of a Hopper multiprocessor."""
    found = {}
    for head_dim in (64, 128):
        for kv_dtype in ("bfloat16", "int8"):
            sizes = dict(queries=4096, slots=6400, head_dim=head_dim, block_size=64)
            types = dict(dtype="bfloat16", kv_dtype=kv_dtype)
            call = config.Call(operation="attend", **sizes, **types)
            tiles = config.heuristic(call, "mosaic")
            used = mosaic_gpu.shared_memory(tiles, head_dim, kv_dtype == "int8")
            found[head_dim, kv_dtype] = used / 1024
    assert found == {
        (64, "bfloat16"): 96.5,
        (64, "int8"): 81.5,
        (128, "bfloat16"): 176.5,
        (128, "int8"): 145.5,
    }
