"""Timings of the cache's operations on the device that is there, and of what they compete with.

A candidate is a function that runs an operation once and returns something to feed its next run
with, so that runs follow each other on the device without the host between them: `measure` times a
loop of them and takes the median of several. What a loop does not change is made to depend on its
carry (`_depending_on`), or else the compiler would compute it once, before the loop.

The dense ways attend to a full cache of the same scale, whatever the kernel's heads own: they
are what a compressed cache has to beat.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cache_write, ragged_attention, token_attention
from pallas_kernels.arg_specs import ArgSpec, Arguments
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.token_specs import TokenArguments

FUNCTIONS = {
    "attend": ragged_attention.attend,
    "attention_moments": ragged_attention.attention_moments,
    "write": cache_write.write,
    "attend_token": token_attention.attend,
}
OPERATIONS = tuple(FUNCTIONS)
TOKEN_MODELS = ("llamagen", "janus")  # that draw token by token
DENSE = "dense"
HOLDS_SCORES = ("reference", f"{DENSE} xla")  # ways that hold a matrix of queries by keys
AIM = 0.02  # seconds of a timed loop
MOST_RUNS = 200


@dataclass(frozen=True)
class Candidate:
    """One way to do an operation. step: traced, (carry, arguments) -> carry. result: traced, the
    same arguments -> the array to compare with other ways; None if that is the next carry."""

    name: str
    step: Callable
    carry: jax.Array
    arguments: tuple
    result: Callable | None = None


@dataclass(frozen=True)
class Work:
    """What an operation has to do at least: floating-point operations and bytes of memory."""

    flops: float
    bytes: float


def serves(operation: str, spec: ArgSpec) -> bool:
    """Whether a model of this shape asks for the operation."""
    return operation != "attend_token" or spec.name.startswith(TOKEN_MODELS)


def work(operation: str, spec: ArgSpec, keys: int) -> Work:
    """keys: stored keys that every head owns. Every real token and key is moved once."""
    heads, real = spec.rows * spec.heads, spec.length
    element = jnp.dtype(spec.dtype).itemsize
    stored = 2 * spec.head_dim * spec.pool_dtype.itemsize + (8 if spec.kv_dtype == "int8" else 0)
    token = spec.head_dim * element
    pairs = heads * real * (real + keys)
    if operation == "attend_token":
        positions = 4 * keys
        return Work(
            4 * heads * keys * spec.head_dim, heads * (2 * token + keys * stored + positions)
        )
    if operation == "attend":
        return Work(4 * pairs * spec.head_dim, heads * (4 * real * token + keys * stored))
    if operation == "attention_moments":
        moved = 2 * real * token + 4 * real + keys * stored / 2 + 4 * (real + keys)
        return Work(2 * pairs * spec.head_dim, heads * moved)
    written = min(real, spec.entries * spec.block_size)
    return Work(0, heads * written * (2 * token + stored))


def compressed(spec: ArgSpec, share: float) -> ArgSpec:
    """The call when every head owns that share of the cache, in whole blocks, at least one."""
    return replace(spec, table="full", entries=max(1, round(spec.entries * share)))


# --- candidates ---


def ways(operation: str, spec: ArgSpec, kernel: str) -> list[str]:
    """Names of the ways to do an operation on this device, `kernel` first."""
    found = list(dict.fromkeys([kernel, "reference"]))
    if operation == "attend":
        # what `jax.nn.dot_product_attention` offers here for this type
        on_gpu = jax.default_backend() == "gpu"
        cudnn = on_gpu and spec.dtype in ("bfloat16", "float16")
        found += [f"{DENSE} xla", f"{DENSE} cudnn"] if cudnn else [f"{DENSE} xla"]
    return found


def prepare(operation: str, spec: ArgSpec, share: float, way: str) -> Candidate:
    """One of `ways`; heads own that share of the cache, `DENSE` ones all of it."""
    if way.startswith(DENSE):
        return dense(spec, way.removeprefix(DENSE).strip())
    spec = compressed(spec, share)
    if operation == "attend_token":
        args = TokenArguments.of(spec, sums=False, poison=False)
        return Candidate(way, partial(_token_step, way), args.q, (args,))
    return candidate(operation, spec.arguments(poison=False), way)


def candidate(operation: str, args: Arguments, name: str, run: Callable | None = None) -> Candidate:
    """Our implementation `name`. run: what to call instead of the API's function."""
    run = run or partial(FUNCTIONS[operation], implementation=name)
    rows, heads, tokens, size = args.projection.shape
    if operation == "attend":
        out = jnp.zeros((rows, tokens, heads, size), args.projection.dtype)
        return Candidate(name, partial(_attend_step, run), out, (args,))
    if operation == "write":
        return Candidate(name, partial(_write_step, run), (args.kv_pool, args.kv_scale), (args,))
    log_sum = jnp.full((rows, heads, tokens), np.log(tokens), jnp.float32)
    step, sums = partial(_moments_step, run), partial(_moments, run)
    return Candidate(name, step, jnp.zeros(1), (args, _query_weights(args), log_sum), sums)


def _depending_on(args: Arguments, carry) -> Arguments:
    """The same arguments, but only known once `carry` is."""
    # always 0 (also for NaN), but a result of the carry
    never = (carry.reshape(-1)[0] > jnp.inf).astype(jnp.int32)
    table = replace(args.table, ids=args.table.ids + never)
    # K and V are finished in every run: adding to them would be a pass of its own
    projection, _ = jax.lax.optimization_barrier((args.projection, never))
    return replace(args, projection=projection, table=table, length=args.length + never)


def _attend_step(run, out, args):
    return run(*_depending_on(args, out).attend, kv_scale=args.kv_scale)


def _moments(run, carry, args, weights, log_sum):
    return run(*args.moments(weights, log_sum), kv_scale=args.kv_scale)[0]


def _moments_step(run, carry, args, weights, log_sum):
    found = _moments(run, carry, _depending_on(args, carry), weights, log_sum)
    # times 0 is not removed by the compiler, because NaN times 0 is not 0
    return carry + found.reshape(-1)[0] * 0


def _token_step(name, q, args):
    # of the size of a query, so that the next one is a query as well
    return (q + _attend_token(replace(args, q=q), name)[0]).astype(q.dtype) / 2


def _attend_token(args: TokenArguments, name: str) -> tuple:
    return args.given_to_api(token_attention.attend, implementation=name)


def _write_step(run, carry, args):
    pool, scale = carry
    # K and V do not change: without the barrier, finishing them could be moved out of the loop
    projection, pool = jax.lax.optimization_barrier((args.projection, pool))
    return run(pool, projection, args.writes, kv_scale=scale)


def _query_weights(args: Arguments):
    tokens = jnp.arange(args.projection.shape[2])
    return jnp.where(tokens < args.length, 1.0, 0.0).astype(jnp.float32)


def dense(spec: ArgSpec, name: str) -> Candidate:
    """JAX's attention over a full cache: the stored keys first, then the scale's own."""
    rng = np.random.default_rng(0)
    stored = spec.entries * spec.block_size

    def normal(tokens):
        shape = (spec.rows, tokens, spec.heads, spec.head_dim)
        return jnp.asarray(rng.standard_normal(shape, np.float32), spec.dtype)

    q, k, v = normal(spec.tokens), normal(stored + spec.tokens), normal(stored + spec.tokens)
    length = jnp.full((spec.rows,), stored + spec.length, jnp.int32)

    def step(q, k, v, length):
        return jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=length, scale=1.0, implementation=name
        )

    return Candidate(f"{DENSE} {name}", step, q, (k, v, length))


# --- timing ---


def measure(candidate: Candidate, repeats: int) -> float:
    """Seconds per run: median over `repeats` timed loops, compiled and warmed up before."""

    @jax.jit
    def loop(runs, carry, arguments):
        return jax.lax.fori_loop(0, runs, lambda i, c: candidate.step(c, *arguments), carry)

    def seconds(runs: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(runs, candidate.carry, candidate.arguments))
        return time.perf_counter() - start

    seconds(1)  # compiles; the number of runs is an argument, so that this is the only time
    runs = int(np.clip(AIM / max(seconds(1), 1e-6), 1, MOST_RUNS))
    seconds(runs)
    return statistics.median(seconds(runs) for _ in range(repeats)) / runs


def short(error: Exception, length: int = 100) -> str:
    """An error in one line: its kind, and so many characters of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:length]}"


def fits(spec: ArgSpec, copies: int = 3) -> bool:
    """Whether an implementation that holds all scores in float32 a few times fits this device."""
    scores = spec.rows * spec.heads * spec.tokens * (spec.entries * spec.block_size + spec.tokens)
    # 8 GiB where a backend does not say (CPU)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**33)
    return copies * 4 * scores < limit / 2


def chip(kind: str) -> Chip | None:
    """The chip of a JAX device kind ("NVIDIA H200", "TPU v5 lite"); None if its peak numbers are
    not known, as those of cards with another memory than the table's."""
    kind = kind.lower().replace(" lite", "e").replace("tpu ", "tpu-").replace("rtx ", "rtx")
    kind = {"tpu-v5": "tpu-v5p", "tpu-7x": "tpu7x"}.get(kind, kind)
    words = kind.replace("tpu-", "tpu=").replace("-", " ").replace("=", "-").split()
    if {"pcie", "40gb"} & set(words):  # slower memory than the table's SXM cards with 80 GB
        return None
    return next((found for name, found in CHIPS.items() if name in words), None)


# --- correctness ---


@jax.default_matmul_precision("highest")
def errors(operation: str, spec: ArgSpec, name: str) -> dict[str, float]:
    """Relative Frobenius error of each result of implementation `name` against the reference in
    float32; for `write` of what it stores, in the type of the pool."""
    if operation == "attend_token":
        return _token_errors(TokenArguments.of(spec), name)
    args = spec.arguments(poison=operation != "write")
    exact = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, args)
    if operation == "write":
        found, expected = (
            _stored(*_run(operation, args.write, args, n)) for n in (name, "reference")
        )
        return _relative(("pool",), (found,), (expected,))
    out, lse = _run("attend", exact.attend, exact, "reference", return_lse=True)
    if operation == "attend":
        found = _run("attend", args.attend, args, name, return_lse=True)
        real = ((a[:, : spec.length], b[..., : spec.length]) for a, b in (found, (out, lse)))
        return _relative(("out", "lse"), *real)
    # each with its own log-sum-exp: with that of queries rounded otherwise, weights are no weights
    _, own = _run("attend", args.attend, args, name, return_lse=True)
    found, expected = (
        _run(operation, a.moments(_query_weights(a), sums), a, n, squares=True)
        for a, sums, n in ((args, own, name), (exact, lse, "reference"))
    )
    return _relative(("sums", "squares"), found, expected)


def _token_errors(args: TokenArguments, name: str) -> dict[str, float]:
    found, expected = (
        jax.jit(_attend_token, static_argnums=1)(a, n)
        for a, n in ((args, name), (args.in_float32(), "reference"))
    )
    return _relative(("out", "sums"), found, expected)


def _run(operation: str, given: tuple, args: Arguments, name: str, **options):
    run = jax.jit(partial(FUNCTIONS[operation], implementation=name, **options))
    return run(*given, kv_scale=args.kv_scale)


def _stored(pool, scale):
    """What a pool means, float32."""
    if scale is None:
        return pool
    half = pool.shape[2]
    pool = (
        pool.reshape(*pool.shape[:3], 2, -1)
        * jnp.stack([scale[..., :half], scale[..., half:]], -1)[..., None]
    )
    return pool.astype(jnp.float32)


def _relative(names, found, expected) -> dict[str, float]:
    errors = {}
    for name, *pair in zip(names, found, expected, strict=True):
        a, b = (np.asarray(x, np.float64) for x in pair)
        errors[name] = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))
    return errors
