"""Programs with the TPU kernels, compiled for a chip that is not here.

    python tests/pallas_kernels/tpu_programs.py CHIP CASE ...

prints one JSON object per case: {"case", "error"} or {"case", "temp", "pool", "copies", "turned"}.
Runs in a process of its own, because some errors of the compiler end the process. Cases are

    OPERATION-POOLTYPE-hHEADDIM-bBLOCKSIZE-tTOKENS[-nHEADS][-rows]

sample-IMAGES-TOKENS-VOCABULARY, with {"case", "temp", "moved"}, and token-POOLTYPE-hHEADDIM-sSLOTS,
with {"case", "temp", "pool", "copies"}: attention of one query per row, token after token; -used
behind it: of known contents, whose first slots are in use; -stored: the kernel stores the token;
-gG: G query heads share each of 8 heads of keys and values; -probed: a second query is scored.
stage-POOLTYPE-hHEADDIM-sSLOTS-qQUERIES, with the same results, "temp" without the scores: what
happens to a cache after stages of 8 tokens; the mean of a window asks (float32), or several queries
do.
rank-ROWS-HEADS-SLOTS, with {"case", "temp"}: by score within two parts.

OPERATION: attend, moments, write, or scan: two scans, over scales and over layers. -rows: tables
per row. Activations are bfloat16 unless the pool is float32; queries and keys are normalised, and
rotated where heads are of 128 or there is one token.
"""

import json
import math
import os
import re
import sys
from dataclasses import replace
from functools import partial

from pallas_kernels import chips

os.environ.update(chips.quiet_environment())  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental.layout import Format, Layout  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from pallas_kernels import cache_write, ragged_attention, slot_moves, token_attention  # noqa: E402
from pallas_kernels.arg_specs import ArgSpec  # noqa: E402
from pallas_kernels.rank import rank  # noqa: E402
from pallas_kernels.sample import sample  # noqa: E402
from pallas_kernels.shared.tpu_operands import rounded  # noqa: E402
from pallas_kernels.token_attention import HeadSlots, NewToken, Probe, Query, reference  # noqa: E402
from pallas_kernels.token_attention import tpu as token_kernel  # noqa: E402
from tests.pallas_kernels.test_sample import abstract  # noqa: E402
from tests.pallas_kernels.token_shapes import abstract_token_arguments, only  # noqa: E402

SCALES, LAYERS = 2, 3
CHANGED = ("pool", "scale", "mass", "scores")  # arrays of slots that a token changes
MOVED_ROWS = re.compile(r"= f32\[\d+,\d+,\d+\S* (copy|transpose|fusion)\(")  # logits or noise


def spec_of(case: str) -> ArgSpec:
    """A pool far larger than everything else of the program, in blocks of no round number."""
    _, kv_dtype, *sizes = case.removesuffix("-rows").split("-")
    head_dim, block_size, tokens, *heads = (int(size[1:]) for size in sizes)
    return ArgSpec(
        name=case,
        rows=4,
        heads=heads[0] if heads else 4,
        head_dim=head_dim,
        tokens=tokens,
        length=tokens,
        block_size=block_size,
        entries=-(-8192 // block_size) | 1,
        per_row=case.endswith("-rows"),
        dtype="float32" if kv_dtype == "float32" else "bfloat16",
        kv_dtype=kv_dtype,
        normalised=True,
        rotated=head_dim == 128 or tokens == 1,
    )


def attend(a):
    return ragged_attention.attend(
        *a.attend, kv_scale=a.kv_scale, return_lse=True, implementation="tpu"
    )


def moments(a, lse=None):
    lse = jnp.zeros(a.projection.shape[:3]) if lse is None else lse
    return ragged_attention.attention_moments(
        *a.moments(jnp.ones(a.projection.shape[2]), lse, squares=True),
        kv_scale=a.kv_scale,
        implementation="tpu",
    )


def write(a):
    return cache_write.write(*a.write, kv_scale=a.kv_scale, implementation="tpu")


def scans(cache, tokens, tables, weights):
    """As the engine uses the kernels: the cache in the carry of both scans, the length and tables
    of all layers (or per row, of each) as scan inputs, attention, what a policy asks for, storing.
    Own tokens come out of a product and attention goes into one, as in a layer."""
    per_row, shape = tokens.table.layer is None, tokens.projection.qkv.shape

    def layer(length, tables, carry, index):
        (pool, scale), x, total = carry
        projection = replace(tokens.projection, qkv=(x @ weights[0]).reshape(shape))
        table, writes = (_of_layer(t, index, per_row) for t in tables)
        a = replace(tokens, projection=projection, length=length, kv_pool=pool, kv_scale=scale)
        a = replace(a, table=table, writes=writes)
        out, lse = attend(a)
        sums, _ = moments(a, lse)
        after = index + (out.reshape(-1)[0] > jnp.inf).astype(jnp.int32)
        a = replace(a, writes=_of_layer(tables[1], after, per_row))
        x = x + out.reshape(x.shape).astype(x.dtype) @ weights[1]
        return (write(a), x, total + sums.sum()), None

    def one_scale(carry, inputs):
        tables, length = inputs
        if not per_row:
            read, writes = tables
            tables = read.with_packed(writes.source.shape[-1]), writes.with_packed()
        return jax.lax.scan(partial(layer, length, tables), carry, jnp.arange(LAYERS))

    rows, length, _, *width = shape
    x = jnp.zeros((rows, length, math.prod(width)), tokens.projection.dtype)
    carry, _ = jax.lax.scan(one_scale, (cache, x, jnp.zeros(())), tables)
    return carry


def _of_layer(table, index, per_row: bool):
    return jax.tree.map(lambda a: a[index], table) if per_row else table.of_layer(index)


def scan_arguments(spec: ArgSpec):
    a = spec.abstract()

    def stacked(array):
        each = array.shape if spec.per_row else array.shape[1:]
        return jax.ShapeDtypeStruct((SCALES, LAYERS, *each), array.dtype)

    tables = jax.tree.map(stacked, tuple(replace(t, layer=None) for t in (a.table, a.writes)))
    width = spec.heads * spec.head_dim
    weights = [jax.ShapeDtypeStruct((width, n * width), a.projection.dtype) for n in (3, 1)]
    tables = tables, jax.ShapeDtypeStruct((SCALES,), jnp.int32)
    return (a.kv_pool, a.kv_scale), a, tables, weights


def token_arguments(case: str) -> tuple[Query, HeadSlots]:
    _, kv_dtype, head_dim, slots, *options = case.split("-")
    (group,) = [int(o[1:]) for o in options if o[0] == "g"] or [1]
    spec = spec_of(f"attend-{kv_dtype}-{head_dim}-b16-t1-n{20 if group == 1 else 8}")
    probed = "probed" in options
    options = {"used": 1, "sums": False, "shared": True} if "used" in options else {}
    spec = replace(spec, rows=64)
    query, held = abstract_token_arguments(spec, int(slots[1:]), group=group, **options)
    return with_probe(query, held) if probed else (query, held)


def with_probe(query: Query, held: HeadSlots) -> tuple[Query, HeadSlots]:
    rows, heads, slots, width = held.pool.shape
    total = jax.ShapeDtypeStruct((rows, heads, width // 2), jnp.float32)
    probe = Probe(total, jax.ShapeDtypeStruct((), jnp.bool_), count=8, every=8)
    scores = jax.ShapeDtypeStruct((rows, heads, slots), jnp.float32)
    return replace(query, probe=probe), replace(held, scores=scores)


def tokens(store_and_attend, held: HeadSlots, query: Query, shared: HeadSlots, steps):
    """A few tokens, as the engine draws them: each is stored, then attended for. held: the arrays
    of the slots that tokens change. shared: the others."""

    def token(held, slot):
        changed = {name: getattr(held, name) for name in CHANGED}
        slots = replace(shared, **changed)
        one_of_group = query.q[:, : held.pool.shape[1]]
        new = NewToken(one_of_group, one_of_group, slot)
        out, slots = store_and_attend(query, slots, new)
        return only(slots, *CHANGED), out

    return jax.lax.scan(token, held, steps)


def stage_arguments(case: str):
    """Pool and scales, queries, and the numbers of the stages."""
    _, kv_dtype, head_dim, slots, queries = case.split("-")
    query, held = token_arguments(f"token-{kv_dtype}-{head_dim}-{slots}")
    count = int(queries[1:])
    dtype = jnp.float32 if count == 1 else query.q.dtype
    q = jax.ShapeDtypeStruct((*query.q.shape[:2], count, query.q.shape[2]), dtype)
    return only(held, "pool", "scale"), q, jax.ShapeDtypeStruct((3,), jnp.int32)


def decisions(held: HeadSlots, queries, stages):
    """As the engine stores: the tokens of a stage in the last 8 slots, which go where the lowest
    scores are."""

    def stage(held, number):
        seen = token_attention.scores(queries, held, first=1, implementation="tpu").mean(2)
        order = jnp.argsort(seen[..., :-8], axis=-1)[..., :8]
        target = jnp.where(order < number, held.pool.shape[2] + order, 1 + order)
        below = held.pool.shape[2] - 8
        return slot_moves.move_all([held], target, below=below, implementation="tpu")[0], seen

    return jax.lax.scan(stage, held, stages)


def pool_and_scores(case: str) -> tuple[jax.ShapeDtypeStruct, int]:
    """The pool, and bytes of the scores that are asked for, in tiles."""
    if case.startswith("token"):
        return token_arguments(case)[1].pool, 0
    held, q, _ = stage_arguments(case)
    rows, heads, slots, _ = held.pool.shape
    return held.pool, 4 * rows * heads * rounded(q.shape[2], 8) * rounded(slots, 128)


def program(case: str):
    """(function, arguments without data, which of them is donated)."""
    operation, *sizes = case.split("-")
    if operation == "sample":
        run = partial(sample, top_k=900, top_p=0.96, implementation="tpu")
        return lambda given: run(**given), [abstract(tuple(map(int, sizes)))], ()
    if operation == "rank":
        shape = tuple(map(int, sizes))
        types = jnp.float32, jnp.int32, jnp.bool_, jnp.bool_
        given = [jax.ShapeDtypeStruct(shape, dtype) for dtype in types]
        return partial(rank, implementation="tpu"), given, ()
    if operation == "token":
        (query, held), steps = token_arguments(case), jax.ShapeDtypeStruct((3,), jnp.int32)
        store = partial(token_kernel.store_and_attend, interpret=False)
        if "stored" not in case:
            store = reference.in_two_steps(partial(token_kernel.attend, interpret=False))
        shared = only(held, "position", "reach", "used")
        return partial(tokens, store), (only(held, *CHANGED), query, shared, steps), 0
    if operation == "stage":
        return decisions, stage_arguments(case), 0
    if operation == "scan":
        return scans, scan_arguments(spec_of(case)), 0
    return globals()[operation], (spec_of(case).abstract(),), 0


def compiled(case: str, chip: str):
    mesh = Mesh(np.array(chips.compile_only_devices(chip)), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    function, arguments, donated = program(case)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        # as generation does: the compiler chooses layouts, so that nothing is copied on the way in
        where = Format(Layout.AUTO, sharding)
        options = {"in_shardings": where, "out_shardings": where}
        jitted = jax.jit(function, donate_argnums=donated, **options)
        return jitted.lower(*arguments).compile()


def copies(text: str, shapes: list[tuple[int, ...]]) -> list[str]:
    """Lines that copy something of these shapes, or move it between memories."""
    dims = "|".join(re.escape(",".join(map(str, shape))) for shape in shapes)
    moved = r"copy|copy-start|slice-start|transpose|dynamic-slice|concatenate"
    pattern = re.compile(rf"= \(?\w+\[({dims})\].* ({moved})\(|S\(1\)\}} .*\[({dims})\]")
    # a kernel's small result may lie in vector memory; what it reads, it reads where that lies
    theirs = re.compile(rf"= \w+\[(?!({dims})\])[\d,]+\]\S* custom-call\(.*tpu_custom_call")
    lines = (line for line in text.splitlines() if not theirs.search(line))
    return [line.strip()[:200] for line in lines if pattern.search(line)]


def turned(text: str, spec: ArgSpec) -> list[str]:
    """Lines that transpose or copy numbers, as many as the queries of all heads: neither pool nor
    weights."""
    width, found = spec.heads * spec.head_dim, []
    pattern = re.compile(r"= b?f\d+\[([\d,]+)\]\S* (copy|transpose)\(")
    for line in text.splitlines():
        size = [int(n) for m in [pattern.search(line)] if m for n in m[1].split(",")]
        others = spec.pool_blocks in size or size[:1] == [width]
        if size and not others and math.prod(size) >= spec.rows * spec.tokens * width:
            found.append(line.strip()[:200])
    return found


def result(case: str, chip: str) -> dict:
    try:
        found = compiled(case, chip)
    except Exception as error:  # whatever the compiler finds is the result
        return {"case": case, "error": f"{type(error).__name__}: {error}"[:2000]}
    if case.startswith("sample"):
        moved = [line for line in found.as_text().splitlines() if MOVED_ROWS.search(line)]
        return {"case": case, "temp": found.memory_analysis().temp_size_in_bytes, "moved": moved}
    if case.startswith("rank"):
        return {"case": case, "temp": found.memory_analysis().temp_size_in_bytes}
    if case.startswith(("token", "stage")):
        pool, seen = pool_and_scores(case)
        return {
            "case": case,
            "temp": found.memory_analysis().temp_size_in_bytes - seen,
            "pool": pool.size * pool.dtype.itemsize,
            "copies": copies(found.as_text(), [pool.shape]),
        }
    spec = spec_of(case)
    blocks = spec.rows, spec.pool_blocks
    shapes = [(*blocks, spec.block_size, 2 * spec.head_dim), (*blocks, 2 * spec.block_size)]
    pool = spec.rows * spec.pool_blocks * spec.block_size * 2 * spec.head_dim
    return {
        "case": case,
        "temp": found.memory_analysis().temp_size_in_bytes,
        "pool": pool * spec.pool_dtype.itemsize,
        "copies": copies(found.as_text(), shapes),
        "turned": turned(found.as_text(), spec),
    }


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(json.dumps(result(name, sys.argv[1])), flush=True)
