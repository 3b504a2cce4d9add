"""Operations of models that draw by scales: attention over the cache and the scale's own tokens,
its moments, finishing keys and values, cache writes, attention over a text; and JAX's attention to
compare with.

The dense ways attend to a full cache of the same scale, however little the kernel's heads own. A
compressed cache has to beat them.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cache_write, cross_attention, implementations, ragged_attention
from pallas_kernels.arg_specs import FILLINGS, ArgSpec, Arguments
from pallas_kernels.bench.timing import Candidate, Operation, Work, after, never, relative
from pallas_kernels.cache_write import api as write_api
from pallas_kernels.cross_attention import TextKeys
from pallas_kernels.cross_attention import api as text_api
from pallas_kernels.projection import K, Projection, V
from pallas_kernels.ragged_attention import api as attend_api

FUNCTIONS = {
    "attend": ragged_attention.attend,
    "attention_moments": ragged_attention.attention_moments,
    "store_and_attend": ragged_attention.store_and_attend,
    "write": cache_write.write,
}
FINISH = {
    name: partial(importlib.import_module, f"pallas_kernels.{module}")
    for name, module in (("reference", "projection"), ("mosaic", "mosaic_projection"))
}
DENSE = "dense"
TEXT = 256  # tokens of a text, which has two layers; the call is that of the last


def slots(spec: ArgSpec) -> int:
    return spec.entries * spec.block_size


# --- what has to be done at least: every real token and key is moved once ---


def _token_bytes(spec: ArgSpec) -> int:
    return spec.head_dim * jnp.dtype(spec.dtype).itemsize


def stored_bytes(spec: ArgSpec) -> int:
    """Bytes of a slot, scales included."""
    return 2 * spec.head_dim * spec.pool_dtype.itemsize + (8 if spec.kv_dtype == "int8" else 0)


def _attend_work(spec: ArgSpec) -> Work:
    heads, real, keys = spec.rows * spec.heads, spec.length, slots(spec)
    moved = 4 * real * _token_bytes(spec) + keys * stored_bytes(spec)
    return Work(4 * heads * real * (real + keys) * spec.head_dim, heads * moved)


def _moments_work(spec: ArgSpec) -> Work:
    heads, real, keys = spec.rows * spec.heads, spec.length, slots(spec)
    sums = 4 * real + 4 * (real + keys)
    moved = 2 * real * _token_bytes(spec) + keys * stored_bytes(spec) / 2 + sums
    return Work(2 * heads * real * (real + keys) * spec.head_dim, heads * moved)


def _write_work(spec: ArgSpec) -> Work:
    written = min(spec.length, slots(spec))
    return Work(0, spec.rows * spec.heads * written * (2 * _token_bytes(spec) + stored_bytes(spec)))


def _both_work(spec: ArgSpec) -> Work:
    """Storing reads nothing that attention does not read."""
    attend, written = _attend_work(spec), min(spec.length, slots(spec))
    stored = spec.rows * spec.heads * written * stored_bytes(spec)
    return Work(attend.flops, attend.bytes + stored)


def _finish_work(spec: ArgSpec) -> Work:
    """Keys and values are read and written."""
    numbers = spec.rows * spec.heads * spec.length * spec.head_dim
    return Work(0, 4 * numbers * jnp.dtype(spec.dtype).itemsize)


def _text_work(spec: ArgSpec) -> Work:
    heads, real = spec.rows * spec.heads, spec.length
    moved = (2 * real + 2 * TEXT) * _token_bytes(spec)
    return Work(4 * heads * real * TEXT * spec.head_dim, heads * moved)


def fits(spec: ArgSpec, copies: int = 3) -> bool:
    """Whether an implementation that holds all scores in float32 `copies` times fits this
    device."""
    scores = spec.rows * spec.heads * spec.tokens * (slots(spec) + spec.tokens)
    # 8 GiB where a backend does not say (CPU)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**33)
    return copies * 4 * scores < limit / 2


# --- candidates ---


def candidate(operation: str, args: Arguments, name: str, run: Callable | None = None) -> Candidate:
    """Our implementation `name`. run: a function to call in place of the API's."""
    run = run or partial(FUNCTIONS[operation], implementation=name)
    rows, heads, tokens, size = args.projection.shape
    out = jnp.zeros((rows, tokens, heads, size), args.projection.dtype)
    if operation == "attend":
        return Candidate(name, partial(_attend_step, run), out, (args,))
    if operation == "store_and_attend":
        carry = (out, args.kv_pool, args.kv_scale)
        return Candidate(name, partial(_both_step, run), carry, (args,))
    if operation == "write":
        return Candidate(name, partial(_write_step, run), (args.kv_pool, args.kv_scale), (args,))
    log_sum = jnp.full((rows, heads, tokens), np.log(tokens), jnp.float32)
    step, sums = partial(_moments_step, run), partial(_moments, run)
    return Candidate(name, step, jnp.zeros(1), (args, _query_weights(args), log_sum), sums)


def _of_spec(operation: str, spec: ArgSpec, name: str) -> Candidate:
    if operation == "store_and_attend":
        spec = replace(spec, apart=True)
    return candidate(operation, spec.arguments(poison=False), name)


def _depending_on(args: Arguments, carry) -> Arguments:
    """The same arguments, which the compiler takes to be known only once `carry` is."""
    zero = never(carry)
    table = replace(args.table, ids=args.table.ids + zero)
    # Q, K and V get a barrier: adding zero to them would be a pass of its own
    projection = after(carry, args.projection)
    if projection.layer is not None:
        projection = replace(projection, layer=projection.layer + zero)
    return replace(args, projection=projection, table=table, length=args.length + zero)


def _attend_step(run, out, args):
    return run(*_depending_on(args, out).attend, kv_scale=args.kv_scale)


def _both_step(run, carry, args):
    out, pool, scale = carry
    args = replace(_depending_on(args, out), kv_pool=pool)
    return run(*args.attend, args.writes, kv_scale=scale)


def _moments(run, carry, args, weights, log_sum):
    return run(*args.moments(weights, log_sum), kv_scale=args.kv_scale)[0]


def _moments_step(run, carry, args, weights, log_sum):
    found = _moments(run, carry, _depending_on(args, carry), weights, log_sum)
    # times 0 is not removed by the compiler, because NaN times 0 is not 0
    return carry + found.reshape(-1)[0] * 0


def _write_step(run, carry, args):
    pool, scale = carry
    # K and V do not change: without the barrier, finishing them could be moved out of the loop
    projection, pool = jax.lax.optimization_barrier((args.projection, pool))
    return run(pool, projection, args.writes, kv_scale=scale)


def _finish(projection: Projection, name: str) -> jax.Array:
    """Finished keys and values [R, T, 2 N H]."""
    found = implementations.run(name, FINISH, "finished", projection, (K, V))
    return found[:, : projection.shape[2]]


def _finish_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(out, args):
        return _finish(_depending_on(args, out).projection, name)

    args = spec.arguments(poison=False)
    rows, heads, tokens, size = args.projection.shape
    out = jnp.zeros((rows, tokens, 2 * heads * size), args.projection.dtype)
    return Candidate(name, step, out, (args,))


def _query_weights(args: Arguments):
    tokens = jnp.arange(args.projection.shape[2])
    return jnp.where(tokens < args.length, 1.0, 0.0).astype(jnp.float32)


def _text(spec: ArgSpec, name: str, dtype: str) -> tuple[jax.Array, TextKeys]:
    """Queries and texts. The first text is shorter than the others."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), spec.dtype).astype(dtype)

    q = normal(spec.rows, spec.tokens, spec.heads, spec.head_dim)
    k, v = (normal(2, spec.rows, spec.heads, TEXT, spec.head_dim) for _ in range(2))
    length = jnp.asarray([TEXT - 7] + [TEXT] * (spec.rows - 1), jnp.int32)
    return q, TextKeys.of(k, v, length, name)


def _text_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(q, text):
        return cross_attention.attend_text(q, text, 1)

    q, text = _text(spec, name, spec.dtype)
    return Candidate(name, step, q, (text,))


def dense(spec: ArgSpec, name: str) -> Candidate:
    """JAX's attention over a full cache: stored keys first, then the scale's own keys."""
    rng = np.random.default_rng(0)

    def normal(tokens):
        shape = (spec.rows, tokens, spec.heads, spec.head_dim)
        return jnp.asarray(rng.standard_normal(shape, np.float32), spec.dtype)

    keys = slots(spec) + spec.tokens
    q, k, v = normal(spec.tokens), normal(keys), normal(keys)
    length = jnp.full((spec.rows,), slots(spec) + spec.length, jnp.int32)

    def step(q, k, v, length):
        return jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=length, scale=1.0, implementation=name
        )

    return Candidate(f"{DENSE} {name}", step, q, (k, v, length))


# --- correctness ---


def _exact(args: Arguments) -> Arguments:
    return jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, args)


def _attend_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    args = spec.arguments()
    found, expected = (
        _run("attend", a.attend, a, n, "return_lse")
        for a, n in ((args, name), (_exact(args), "reference"))
    )
    real = ((a[:, : spec.length], b[..., : spec.length]) for a, b in (found, expected))
    return relative(("out", "lse"), *real)


def _moments_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Errors of the moments. Each implementation takes its own log-sum-exp: that of queries which
    are rounded otherwise would not make the weights add up to 1."""
    args, results = spec.arguments(), []
    for a, n in ((args, name), (_exact(args), "reference")):
        _, sums = _run("attend", a.attend, a, n, "return_lse")
        given = a.moments(_query_weights(a), sums, squares=True)
        results.append(_run("attention_moments", given, a, n))
    return relative(("sums", "squares"), *results)


def _write_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Errors of the stored numbers. Both implementations store in the type of the pool."""
    args = spec.arguments(poison=False)
    found, expected = (_stored(*_run("write", args.write, args, n)) for n in (name, "reference"))
    return relative(("pool",), (found,), (expected,))


def _both_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Errors of the attention and of the stored numbers, where both lie apart."""
    args = replace(spec, apart=True).arguments(poison=False)
    out, *stored = _run("store_and_attend", (*args.attend, args.writes), args, name)
    exact = _exact(args)
    found = out[:, : spec.length], _stored(*stored)
    expected = (
        _run("attend", exact.attend, exact, "reference")[:, : spec.length],
        _stored(*_run("write", args.write, args, "reference")),
    )
    return relative(("out", "pool"), found, expected)


def _finish_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    args, run = spec.arguments(), jax.jit(_finish, static_argnums=1)
    given = (args.projection, name), (_exact(args).projection, "reference")
    found, expected = (run(*how)[:, : spec.length] for how in given)
    return relative(("out",), (found,), (expected,))


def _text_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    run = jax.jit(cross_attention.attend_text)
    given = ((name, spec.dtype), ("reference", "float32"))
    found, expected = (run(*_text(spec, *how), 1) for how in given)
    return relative(("out",), (found,), (expected,))


def _run(operation: str, given: tuple, args: Arguments, name: str, *options: str):
    return _compiled(given, args.kv_scale, operation, name, options)


# One function, so that tables of one shape that are filled differently share a compiled program.
@partial(jax.jit, static_argnames=("operation", "name", "options"))
def _compiled(given: tuple, kv_scale, operation: str, name: str, options: tuple[str, ...]):
    flags = dict.fromkeys(options, True)
    return FUNCTIONS[operation](*given, kv_scale=kv_scale, implementation=name, **flags)


def _stored(pool, scale):
    """The keys and values that a pool stands for; an int8 pool's are float32."""
    if scale is None:
        return pool
    half = pool.shape[2]
    pool = (
        pool.reshape(*pool.shape[:3], 2, -1)
        * jnp.stack([scale[..., :half], scale[..., half:]], -1)[..., None]
    )
    return pool.astype(jnp.float32)


def _operation(name: str, modules, work, errors, **options) -> Operation:
    return Operation(modules, work, partial(_of_spec, name), errors, fillings=FILLINGS, **options)


SCALES = {
    "attend": _operation(
        "attend", attend_api.MODULES, _attend_work, _attend_errors, holds_scores=True
    ),
    "attention_moments": _operation(
        "attention_moments", attend_api.MODULES, _moments_work, _moments_errors, holds_scores=True
    ),
    "write": replace(
        _operation("write", write_api.MODULES, _write_work, _write_errors, of_cache=False),
        fillings=("random", "shared"),
    ),
    "store_and_attend": replace(
        _operation(
            "store_and_attend", attend_api.MODULES, _both_work, _both_errors, holds_scores=True
        ),
        fillings=("random", "shared"),
    ),
    "finish": Operation(FINISH, _finish_work, _finish_candidate, _finish_errors, of_cache=False),
    "attend_text": Operation(
        text_api.MODULES,
        _text_work,
        _text_candidate,
        _text_errors,
        models=("infinity",),
        of_cache=False,
    ),
}
