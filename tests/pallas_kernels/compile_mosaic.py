"""Compile the Mosaic GPU kernels for a GPU that is not here and tell what became of them.

    python tests/pallas_kernels/compile_mosaic.py TARGET SHAPE...

TARGET: a GPU of pallas_kernels/chips.py. SHAPE: of `SHAPES`, `ROWS`, `TOKENS`, `ENDS` or `LAYERS`.
Prints one JSON object per program: its temporaries, bytes of the pool and of the scale's keys and
values where there are any, and of every kernel that no program before had: registers and spilled
bytes per thread, as ptxas says, bytes of shared memory and columns of tensor memory. A program of
its own, because JAX (0.10.2) compiles these kernels for one architecture per process, whatever is
asked for later.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from pallas_kernels import chips, slot_moves
from pallas_kernels.arg_specs import SPECS
from pallas_kernels.cache_write import mosaic_gpu as mosaic_write
from pallas_kernels.cross_attention import TextKeys, attend_text
from pallas_kernels.ragged_attention import mosaic_gpu
from pallas_kernels.sample import sample
from pallas_kernels.token_attention import HeadSlots, NewToken, Probe, store_and_attend
from pallas_kernels.token_attention import attend as attend_one
from tests.pallas_kernels import test_token_products
from tests.pallas_kernels.test_sample import abstract
from tests.pallas_kernels.token_shapes import abstract_token_arguments, only

BASE = replace(SPECS["var-d30-t256"], tokens=176, length=169)
SHAPES = {
    "first": SPECS["var-d30-t1"],
    "var": replace(SPECS["var-d30-t256"], rows=16),
    "var-64": replace(SPECS["var-d30-t256"], rows=16, tokens=64, length=64),
    "decode": replace(SPECS["llamagen-xl-t1"], rows=256),
    "decode-wide": replace(SPECS["janus-pro-7b-t1"], rows=2),
    "odd": replace(BASE, tokens=169, length=100),
    "rows": replace(BASE, per_row=True),
    "block8": replace(BASE, block_size=8),
    "block64": replace(BASE, block_size=64),
    "wide": SPECS["infinity-2b-t4096"],
}
IN_8_BITS = ("first", "var", "var-64")
SHAPES |= {f"{name}-in-8-bits": replace(SHAPES[name], in_8_bits=True) for name in IN_8_BITS}
SHAPES |= {
    f"{name}-int8": replace(spec, kv_dtype="int8")
    for name, spec in SHAPES.items()
    if not spec.in_8_bits
}
# (images, tokens, vocabulary) of rows that tokens are chosen from: held by a program, or not
ROWS = {
    "rows-4096": (8, 256, 4096),
    "rows-1000": (8, 9, 1000),
    "rows-65536": (1, 256, 65536),
    "rows-16384": (256, 1, 16384),
    "rows-512": (2, 36, 512),
    "rows-131": (2, 3, 131),
}
# attention of one query per row: (call, slots of a head)
XL, LARGE = (replace(SPECS[f"{name}-t1"], rows=64) for name in ("llamagen-xl", "janus-pro-7b"))
TOKENS = {
    "tokens": (replace(XL, rows=256), 105),
    "tokens-600": (XL, 600),
    "tokens-two-rows": (replace(XL, rows=2), 105),
    "tokens-h100": (replace(LARGE, head_dim=100), 105),
    "tokens-h128": (LARGE, 105),
    "tokens-int8": (replace(XL, kv_dtype="int8"), 105),
    "tokens-h128-int8": (replace(LARGE, kv_dtype="int8"), 600),
    "tokens-float32": (replace(XL, dtype="float32"), 105),
    "tokens-h100-float32": (replace(LARGE, head_dim=100, dtype="float32"), 105),
    "tokens-h128-float32": (replace(LARGE, dtype="float32"), 4096),
    "tokens-used": (replace(XL, rows=256), 577),
}
# what a stage of tokens ends with: (call, slots of a head, layers that decide together)
ENDS = {
    "end-xl": (replace(XL, rows=256), 96, 36),
    "end-7b": (LARGE, 105, 5),
    "end-float32": (replace(XL, dtype="float32"), 97, 1),
}
# products of a token's layer: (model, rows)
LAYERS = {
    "layer-xl": ("llamagen-xl-384", 256),
    "layer-3b": ("llamagen-3b-384", 2),
    "layer-7b": ("janus-pro-7b", 110),
}
USED = {"used": 300, "sums": False, "shared": True}  # of known contents


def token(name, sharding=None):
    """(function, arguments without data); sums are donated."""
    options = USED if "used" in name else {}

    def run(mass, query, slots):
        return attend_one(query, replace(slots, mass=mass), implementation="mosaic")

    query, slots = abstract_token_arguments(*TOKENS[name], sharding=sharding, **options)
    rest = only(slots, "pool", "position", "scale", "reach", "used")
    return jax.jit(run, donate_argnums=0), (slots.mass, query, rest)


def end_of_a_stage(name, sharding=None):
    """{operation: (function, arguments without data)}: attention for the last token, which scores
    the mean query, too, and the moves of 8 slots. Pools are donated."""
    spec, count, layers = ENDS[name]
    query, held = abstract_token_arguments(spec, count, sharding=sharding, sums=False)

    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    heads = spec.rows, spec.heads
    token = NewToken(query.q, query.q, shape("int32"))
    total, wanted = shape("float32", *heads, spec.head_dim), shape("bool")

    def attend_last(pool, scores, query, token, total, wanted, rest):
        slots = replace(rest, pool=pool, scores=scores)
        query = replace(query, probe=Probe(total, wanted, count=8, every=8))
        return store_and_attend(query, slots, token, implementation="mosaic")

    def move(pools, target):
        slots = [HeadSlots(pool) for pool in pools]
        moved = slot_moves.move_all(slots, target, below=count - 8, implementation="mosaic")
        return [a.pool for a in moved]

    scores = shape("float32", *heads, count)
    given = held.pool, scores, query, token, total, wanted, only(held, "position", "reach")
    target = shape("int32", layers * spec.rows, spec.heads, 8)
    return {
        "attend-last": (jax.jit(attend_last, donate_argnums=(0, 1)), given),
        "move": (jax.jit(move, donate_argnums=0), ([held.pool] * layers, target)),
    }


def layer_of_a_token(name, sharding=None):
    """(function, arguments without data)."""
    given = test_token_products.abstract(test_token_products.published(*LAYERS[name]))
    given = jax.tree.map(lambda a: a.update(sharding=sharding), given)
    return jax.jit(lambda given: test_token_products.run(given)), [given]


def choice(shape, sharding=None):
    """(function, arguments without data)."""
    run = partial(sample, top_k=900, top_p=0.96, implementation="mosaic")
    return jax.jit(lambda given: run(**given)), [abstract(shape, sharding)]


def programs(spec, sharding=None):
    """{operation: (function, arguments without data)}."""

    def line(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def store(pool, *given):
        return mosaic_write.write(pool, *given, None, interpret=False)[0]

    args = spec.abstract(sharding)
    attend = partial(mosaic_gpu.attend, return_lse=True, interpret=False)
    moments = partial(mosaic_gpu.attention_moments, interpret=False)
    given = args.moments(line(spec.tokens), line(*args.projection.shape[:3]), squares=True)
    found = {
        "attend": (jax.jit(attend), (*args.attend, args.kv_scale)),
        "attention_moments": (jax.jit(moments), (*given, args.kv_scale)),
    }
    if spec.kv_dtype is None:  # XLA stores numbers with scales
        found["write"] = (jax.jit(store, donate_argnums=0), args.write)
        layer = partial(_layer)  # traced anew for every chip, as `_text` is
        found["layer"] = (jax.jit(layer, donate_argnums=0), (args.kv_pool, args))
        for name, listed in (("apart", False), ("listed", True)):
            apart = partial(_layer_apart, listed=listed)
            found[name] = (jax.jit(apart, donate_argnums=0), (args.kv_pool, args))
        found["text"] = (jax.jit(partial(_text)), _text_arguments(args, sharding))
    return found


def _text_arguments(args, sharding):
    """Queries, keys and values of 500 text tokens in 3 layers, lengths."""
    rows, heads, tokens, size = args.projection.shape
    shapes = (rows, tokens, heads, size), (3, rows, heads, 500, size)
    q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in shapes)
    return q, k, k, jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=sharding)


def _text(q, k, v, length):
    return attend_text(q, TextKeys.of(k, v, length, "mosaic"), 1)


def _layer(pool, args):
    """Attention, then the store: keys and values are finished for both."""
    args = replace(args, kv_pool=pool)
    out = mosaic_gpu.attend(*args.attend, None, return_lse=False, interpret=False)
    return out, mosaic_write.write(*args.write, None, interpret=False)[0]


def _layer_apart(pool, args, listed):
    """Keys and values are stored by the kernel that finishes them, before attention, which finds
    them by the table if they are `listed` there."""
    given = (*replace(args, kv_pool=pool).attend, args.writes, None, args.table if listed else None)
    return mosaic_gpu.store_and_attend(*given, interpret=False)[:2]


def finished_bytes(spec) -> int:
    """Bytes of a scale's finished keys and values, which attention and storing copy."""
    rows, heads, tokens, head_dim = spec.abstract().projection.shape
    return 2 * 2 * rows * heads * -(-tokens // 8) * 8 * head_dim


def inspect(folder: Path) -> dict:
    """{kernel: what Mosaic left about it in `folder`}. Empties the folder."""
    found = {}
    for file in folder.glob("*.ptxas"):
        name = re.fullmatch(r"(\w+)_\d+", file.stem)[1]
        texts = (
            file.with_suffix(end).read_text() for end in (".ptxas", ".ptx", ".mlir-passes.log")
        )
        found[name] = _inspect(*texts)
    for file in folder.iterdir():
        file.unlink()
    return found


def _inspect(said: str, text: str, passes: str) -> dict:
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    columns, asked = 0, re.search(r"tcgen05\.alloc[^;]*, (%r\d+);", text)
    if asked:
        columns = int(re.search(rf"mov\.b32\s+{asked[1]}, (\d+);", text)[1])
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spills": sum(map(int, spills.groups())),
        "shared_memory": int(re.search(r"dynamic_shared_memory_size %c(\d+)_i32", passes)[1]),
        "tensor_memory": columns,
    }


def _programs(name: str, sharding) -> dict:
    if name in ROWS:
        return {"sample": choice(ROWS[name], sharding)}
    if name in ENDS:
        return end_of_a_stage(name, sharding)
    if name in LAYERS:
        return {"products": layer_of_a_token(name, sharding)}
    if name in TOKENS:
        return {"token": token(name, sharding)}
    return programs(SHAPES[name], sharding)


def main(target: str, *shapes: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kernels-"))
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = jax.sharding.Mesh(np.array(chips.compile_only_devices(target)), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    try:
        for name in shapes:
            for operation, (run, given) in _programs(name, sharding).items():
                with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                    compiled = run.lower(*given).compile()
                about = {"target": target, "shape": name, "operation": operation}
                about["kernels"] = compiled.as_text().count('custom_call_target="mosaic_gpu')
                about["temporaries"] = compiled.memory_analysis().temp_size_in_bytes
                if name in SHAPES:
                    pool = SHAPES[name].abstract().kv_pool
                    about["pool"] = pool.size * pool.dtype.itemsize
                    about["finished"] = finished_bytes(SHAPES[name])
                print(json.dumps(about | {"new": inspect(folder)}), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
