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

from pallas_kernels import cache_write, implementations, ragged_attention
from pallas_kernels.arg_specs import FILLINGS, ArgSpec, Arguments, in_float32
from pallas_kernels.bench.timing import Candidate, Operation, after, never, relative, repeated
from pallas_kernels.cache_write import api as write_api
from pallas_kernels.cross_attention import TextKeys, attend_text
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
    for name, module in (("reference", "projection"), ("mosaic", "shared.mosaic_projection"))
}
TEXT = 256  # tokens of a text, which has two layers; the call is that of the last


# --- candidates ---


def candidate(operation: str, args: Arguments, name: str, run: Callable | None = None) -> Candidate:
    """Our implementation `name`, or `run`, a function to call in place of the API's. What runs
    carry is what attention returns, or the sums of the moments, or the pool that they update."""
    run = run or partial(FUNCTIONS[operation], implementation=name)
    rows, heads, tokens, size = args.projection.shape
    if operation == "attend":
        once = lambda args: run(*args.attend, kv_scale=args.kv_scale)  # noqa: E731
        return repeated(once, args, depending=_depending_on)
    if operation == "attention_moments":
        log_sum = jnp.full((rows, heads, tokens), np.log(tokens), jnp.float32)
        sums = lambda a, *more: run(*a.moments(*more), kv_scale=a.kv_scale)[0]  # noqa: E731
        return repeated(sums, args, _query_weights(args), log_sum, depending=_depending_on)
    out = jnp.zeros((rows, tokens, heads, size), args.projection.dtype)

    def step(carry, rest):
        out, pool, scale = carry
        args = replace(_depending_on(out, rest), kv_pool=pool, kv_scale=scale)
        if operation == "store_and_attend":
            return run(*args.attend, args.writes, kv_scale=scale)
        pool, scale = run(*args.write, kv_scale=scale)
        return pool[0, 0, 0, :1].astype(out.dtype), pool, scale

    out = out if operation == "store_and_attend" else out.reshape(-1)[:1]
    carry = out, args.kv_pool, args.kv_scale
    return Candidate(step, carry, (replace(args, kv_pool=None, kv_scale=None),))


def _depending_on(carry: jax.Array, args: Arguments) -> Arguments:
    """The same arguments, which the compiler takes to be known only once `carry` is."""
    zero = never(carry)
    table = replace(args.table, ids=args.table.ids + zero)
    # Q, K and V get a barrier: adding zero to them would be a pass of its own
    projection = after(carry, args.projection)
    if projection.layer is not None:
        projection = replace(projection, layer=projection.layer + zero)
    return replace(args, projection=projection, table=table, length=args.length + zero)


def _of_spec(operation: str, spec: ArgSpec, name: str) -> Candidate:
    if operation == "store_and_attend":
        spec = replace(spec, apart=True)
    return candidate(operation, spec.arguments(poison=False), name)


def _finish(projection: Projection, name: str) -> jax.Array:
    """Finished keys and values [R, T, 2 N H]."""
    found = implementations.run(name, FINISH, "finished", projection, (K, V))
    return found[:, : projection.shape[2]]


def _finish_candidate(spec: ArgSpec, name: str) -> Candidate:
    args = spec.arguments(poison=False)
    return repeated(lambda a: _finish(a.projection, name), args, depending=_depending_on)


def _query_weights(args: Arguments):
    tokens = jnp.arange(args.projection.shape[2])
    return jnp.where(tokens < args.length, 1.0, 0.0).astype(jnp.float32)


def _normal(spec: ArgSpec, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Random arrays in the type of the call."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), spec.dtype) for shape in shapes]


def _text(spec: ArgSpec, name: str, dtype: str) -> tuple[jax.Array, TextKeys]:
    """Queries and texts. The first text is shorter than the others."""
    queries = (spec.rows, spec.tokens, spec.heads, spec.head_dim)
    keys = (2, spec.rows, spec.heads, TEXT, spec.head_dim)
    q, k, v = (a.astype(dtype) for a in _normal(spec, queries, keys, keys))
    length = jnp.asarray([TEXT - 7] + [TEXT] * (spec.rows - 1), jnp.int32)
    return q, TextKeys.of(k, v, length, name)


def dense(spec: ArgSpec, name: str) -> Candidate:
    """JAX's attention over a full cache: stored keys first, then the scale's own keys."""
    stored = spec.entries * spec.block_size
    tokens = (spec.tokens, stored + spec.tokens, stored + spec.tokens)
    q, k, v = _normal(spec, *((spec.rows, n, spec.heads, spec.head_dim) for n in tokens))
    length = jnp.full((spec.rows,), stored + spec.length, jnp.int32)

    attend = partial(jax.nn.dot_product_attention, scale=1.0, implementation=name)
    run = lambda q, k, v, n: attend(q, k, v, key_value_seq_lengths=n)  # noqa: E731
    return repeated(run, q, k, v, length)


# --- correctness ---


# One function, so that tables of one shape that are filled differently share a compiled program.
@partial(jax.jit, static_argnames=("operation", "name", "return_lse"))
def _run(operation: str, given: tuple, kv_scale, name: str, return_lse: bool = False):
    flags = {"return_lse": True} if return_lse else {}
    return FUNCTIONS[operation](*given, kv_scale=kv_scale, implementation=name, **flags)


def _attend_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    args = spec.arguments()
    found, expected = (
        _run("attend", a.attend, a.kv_scale, n, return_lse=True)
        for a, n in ((args, name), (in_float32(args), "reference"))
    )
    real = ((a[:, : spec.length], b[..., : spec.length]) for a, b in (found, expected))
    return relative(("out", "lse"), *real)


def _moments_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Errors of the moments. Each implementation takes its own log-sum-exp: that of queries which
    are rounded otherwise would not make the weights add up to 1."""
    args, results = spec.arguments(), []
    for a, n in ((args, name), (in_float32(args), "reference")):
        _, sums = _run("attend", a.attend, a.kv_scale, n, return_lse=True)
        given = a.moments(_query_weights(a), sums, squares=True)
        results.append(_run("attention_moments", given, a.kv_scale, n))
    return relative(("sums", "squares"), *results)


def _write_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Errors of the stored numbers. Both implementations store in the type of the pool."""
    args = spec.arguments(poison=False)
    stored = (_run("write", args.write, args.kv_scale, n) for n in (name, "reference"))
    found, expected = (_stored(*arrays) for arrays in stored)
    return relative(("pool",), (found,), (expected,))


def _both_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Errors of the attention and of the stored numbers, where both lie apart."""
    args = replace(spec, apart=True).arguments(poison=False)
    exact, given = in_float32(args), (*args.attend, args.writes)
    out, *stored = _run("store_and_attend", given, args.kv_scale, name)
    found = out[:, : spec.length], _stored(*stored)
    expected = (
        _run("attend", exact.attend, exact.kv_scale, "reference")[:, : spec.length],
        _stored(*_run("write", args.write, args.kv_scale, "reference")),
    )
    return relative(("out", "pool"), found, expected)


def _finish_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    args, run = spec.arguments(), jax.jit(_finish, static_argnums=1)
    given = (args.projection, name), (in_float32(args).projection, "reference")
    found, expected = (run(*how)[:, : spec.length] for how in given)
    return relative(("out",), (found,), (expected,))


def _text_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    run = jax.jit(attend_text)
    given = ((name, spec.dtype), ("reference", "float32"))
    found, expected = (run(*_text(spec, *how), 1) for how in given)
    return relative(("out",), (found,), (expected,))


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


ATTEND, SHARED = attend_api.MODULES, ("random", "shared")
SCALES = {
    "attend": Operation(ATTEND, partial(_of_spec, "attend"), _attend_errors, fillings=FILLINGS),
    "attention_moments": Operation(
        ATTEND, partial(_of_spec, "attention_moments"), _moments_errors, fillings=FILLINGS
    ),
    "write": Operation(
        write_api.MODULES, partial(_of_spec, "write"), _write_errors, ("",), False, SHARED
    ),
    "store_and_attend": Operation(
        ATTEND, partial(_of_spec, "store_and_attend"), _both_errors, fillings=SHARED
    ),
    "finish": Operation(FINISH, _finish_candidate, _finish_errors, of_cache=False),
    "attend_text": Operation(
        text_api.MODULES,
        lambda spec, name: repeated(partial(attend_text, layer=1), *_text(spec, name, spec.dtype)),
        _text_errors,
        ("infinity",),
        of_cache=False,
    ),
}
