"""Operations of models that draw token by token: attention of a token with and without storing it,
and what decisions after a stage take. And choosing tokens from logits, of one or of many at once.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import rank, slot_moves, token_attention
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.bench.scales import slots, stored_bytes
from pallas_kernels.bench.timing import Candidate, Operation, Work, never, relative, unequal
from pallas_kernels.rank import api as rank_api
from pallas_kernels.sample import api as sample_api
from pallas_kernels.slot_moves import api as moves_api
from pallas_kernels.token_attention import api as token_api
from pallas_kernels.token_specs import TokenArguments

MODELS = ("llamagen", "janus")  # that draw token by token
STAGE = 8  # tokens between two decisions, the last slots of every head
WINDOW = 6  # queries of a window whose scores are checked
CODES = {"var": 4096, "llamagen": 16384, "janus": 16384}  # entries to choose from
FILTERS = {"top_k": 900, "top_p": 0.96}


def _heads(spec: ArgSpec) -> int:
    return spec.rows * spec.heads


# --- attention of a token ---


def _attend_work(spec: ArgSpec) -> Work:
    token = 2 * spec.head_dim * jnp.dtype(spec.dtype).itemsize
    moved = token + slots(spec) * (stored_bytes(spec) + 4)  # 4: positions
    return Work(4 * _heads(spec) * slots(spec) * spec.head_dim, _heads(spec) * moved)


def _store_work(spec: ArgSpec) -> Work:
    """With a key and a value that are read and stored."""
    least, token = _attend_work(spec), 2 * spec.head_dim * jnp.dtype(spec.dtype).itemsize
    return replace(least, bytes=least.bytes + _heads(spec) * (token + stored_bytes(spec)))


def _attend(args: TokenArguments, name: str) -> tuple:
    return args.given_to_api(token_attention.attend, implementation=name)


def _store(args: TokenArguments, k, v, slot, name: str) -> tuple:
    def run(q, *rest, **options):
        return token_attention.store_and_attend(q, k, v, slot, *rest, **options)

    return args.given_to_api(run, implementation=name)


def _halfway(q, out):
    """Of the size of a query, so that the next one is a query as well."""
    return (q + out).astype(q.dtype) / 2


def _attend_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(q, args):
        return _halfway(q, _attend(replace(args, q=q), name)[0])

    args = TokenArguments.of(spec, sums=False, poison=False)
    return Candidate(name, step, args.q, (args,))


def _with_token(spec: ArgSpec, **options) -> tuple:
    """Arguments, key, value and slot of a token to store."""
    rng, slot = np.random.default_rng(1), slots(spec) // 2
    args = TokenArguments.of(spec, **options).with_token(slot)
    k, v = (jnp.asarray(rng.standard_normal(args.q.shape, np.float32), spec.dtype) for _ in "kv")
    return args, k, v, jnp.int32(slot)


def _store_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(carry, args, k, v, slot):
        q, pool, scale = carry
        args = replace(args, q=q, pool=pool, scale=scale)
        out, _, pool, scale = _store(args, k, v, slot, name)
        return _halfway(q, out), pool, scale

    args, *token = _with_token(spec, sums=False, poison=False)
    return Candidate(name, step, (args.q, args.pool, args.scale), (args, *token))


def _attend_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    args = TokenArguments.of(spec)
    run = jax.jit(_attend, static_argnums=1)
    return relative(("out", "sums"), run(args, name), run(args.in_float32(), "reference"))


def _store_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Of the pool, what its slots mean; 0 and NaN are the same there."""
    args, k, v, slot = _with_token(spec)
    run = jax.jit(_store, static_argnums=4)
    out, sums, *found = run(args, k, v, slot, name)
    stored = run(args, k, v, slot, "reference")[2:]
    expected = _attend(replace(args, pool=stored[0], scale=stored[1]).in_float32(), "reference")
    errors = relative(("out", "sums"), (out, sums), expected)
    return errors | relative(("pool",), (_meant(*found),), (_meant(*stored),))


def _meant(pool, scale):
    """What a pool means, float32, 0 for NaN."""
    pool = pool.astype(jnp.float32)
    if scale is not None:
        halves = pool.reshape(*pool.shape[:-1], 2, -1) * jnp.moveaxis(scale, 1, -1)[..., None]
        pool = halves.reshape(pool.shape)
    return jnp.nan_to_num(pool)


# --- decisions ---


def _scores_work(spec: ArgSpec) -> Work:
    """Of a float32 query: keys are read, scores written."""
    keys = slots(spec) - _condition(spec)
    moved = 4 * spec.head_dim + keys * (stored_bytes(spec) / 2 + 4)
    return Work(2 * _heads(spec) * keys * spec.head_dim, _heads(spec) * moved)


def _condition(spec: ArgSpec) -> int:
    """Slots that are not scored: one, unless there is no other."""
    return min(1, slots(spec) - 1)


def _scores(q, args: TokenArguments, name: str):
    """Of all slots but the condition's."""
    first = min(1, args.pool.shape[2] - 1)
    options = {"pool_scale": args.scale, "first": first, "implementation": name}
    return token_attention.scores(q, args.pool, **options)


def _queries(spec: ArgSpec, count: int, dtype: str):
    rng = np.random.default_rng(2)
    shape = (spec.rows, spec.heads, count, spec.head_dim)
    return jnp.asarray(rng.standard_normal(shape, np.float32) * spec.head_dim**-0.5, dtype)


def _scores_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(found, args, q):
        return _scores(q + never(found), args, name)

    args = TokenArguments.of(spec, sums=False, poison=False)
    keys = slots(spec) - _condition(spec)
    found = jnp.zeros((spec.rows, spec.heads, 1, keys), jnp.float32)
    return Candidate(name, step, found, (args, _queries(spec, 1, "float32")))


def _scores_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Of a mean query and of a window's."""
    args, errors = TokenArguments.of(spec, sums=False, poison=False), {}
    run = jax.jit(_scores, static_argnums=2)
    for what, count, dtype in (("mean", 1, "float32"), ("window", WINDOW, spec.dtype)):
        q = _queries(spec, count, dtype)
        expected = run(q.astype(jnp.float32), args.in_float32(), "reference")
        errors |= relative((what,), (run(q, args, name),), (expected,))
    return errors


def _move_work(spec: ArgSpec) -> Work:
    """Slots that move are read and written; what goes nowhere is only looked up."""
    places = np.asarray(_places(spec))
    moved = int((places < slots(spec)).sum())
    return Work(0, 2 * moved * stored_bytes(spec) + 4 * places.size)


def _move(pool, scale, slot, name: str) -> tuple:
    return slot_moves.move(pool, slot, pool_scale=scale, implementation=name)


def _places(spec: ArgSpec):
    """Anywhere, or nowhere."""
    rng, last = np.random.default_rng(3), min(STAGE, slots(spec))
    every = np.tile(np.arange(slots(spec) + last), (spec.rows, spec.heads, 1))
    return jnp.asarray(rng.permuted(every, axis=-1)[..., :last], jnp.int32)


def _move_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(carry, slot):
        return _move(*carry, slot, name)

    args = TokenArguments.of(spec, sums=False, poison=False)
    return Candidate(name, step, (args.pool, args.scale), (_places(spec),))


def _move_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    args, slot = TokenArguments.of(spec, sums=False), _places(spec)
    run = jax.jit(_move, static_argnums=3)
    found, expected = (run(args.pool, args.scale, slot, n) for n in (name, "reference"))
    errors = unequal("pool", found[0], expected[0])
    return errors if args.scale is None else errors | unequal("scale", found[1], expected[1])


def _rank_work(spec: ArgSpec) -> Work:
    """A score, a tie and two masks are read, a rank written."""
    return Work(0, _heads(spec) * slots(spec) * (4 + 4 + 1 + 1 + 4))


def _ranked(spec: ArgSpec) -> tuple:
    """Few different scores, so that ties decide."""
    rng, shape = np.random.default_rng(4), (spec.rows, spec.heads, slots(spec))
    tie = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
    among, part = rng.random((2, *shape)) < 0.6
    scores = np.float32(rng.integers(-9, 10, shape))
    return tuple(map(jnp.asarray, (scores, np.int32(tie), among, part)))


def _rank_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(found, score, tie, *masks):
        return rank.rank(score, tie + never(found), *masks, implementation=name)

    given = _ranked(spec)
    return Candidate(name, step, jnp.zeros(given[0].shape, jnp.int32), given)


def _rank_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    run = jax.jit(rank.rank, static_argnames="implementation")
    given = _ranked(spec)
    found, expected = (run(*given, implementation=n) for n in (name, "reference"))
    return unequal("ranks", found, expected)


# --- choosing tokens ---


def _logits(spec: ArgSpec) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Logits, noise, and guidance where rows are even."""
    rng, guided = np.random.default_rng(5), spec.rows % 2 == 0
    codes = CODES[spec.name.partition("-")[0]]
    shape = (spec.rows // (1 + guided), spec.tokens, codes)
    logits = 3 * rng.standard_normal((spec.rows, *shape[1:]), np.float32)
    noise = jnp.asarray(rng.gumbel(size=shape), jnp.float32)
    return jnp.asarray(logits), noise, jnp.float32(1.3) if guided else None


def _sample_work(spec: ArgSpec) -> Work:
    logits, noise, _ = jax.eval_shape(lambda: _logits(spec))
    return Work(0, 4 * (logits.size + noise.size))


def _sample(logits, noise, strength, name: str, zero=0):
    options = {"tau": jnp.float32(0.7) + zero}
    if strength is not None:
        options["strength"] = strength + zero
    return sample_api.sample(logits, noise, **options, **FILTERS, implementation=name)


def _sample_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(found, logits, noise, strength):
        return _sample(logits, noise, strength, name, never(found))

    given = _logits(spec)
    return Candidate(name, step, jnp.zeros(given[1].shape[:2], jnp.int32), given)


def _sample_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Share of tokens that are others, of 32 or more with guidance and as many without."""
    spec = replace(spec, rows=2 * -(-32 // spec.tokens))
    (logits, noise, strength), run = _logits(spec), jax.jit(_sample, static_argnums=3)
    found = {}
    for what, *given in (
        ("tokens", logits, noise, strength),
        ("unguided", logits[: len(noise)], noise, None),
    ):
        chosen, expected = (np.asarray(run(*given, n)) for n in (name, "reference"))
        found[what] = float(np.mean(chosen != expected))
    return found


TOKENS = {
    "attend_token": Operation(
        token_api.MODULES, _attend_work, _attend_candidate, _attend_errors, MODELS
    ),
    "store_token": Operation(
        token_api.MODULES, _store_work, _store_candidate, _store_errors, MODELS
    ),
    "token_scores": Operation(
        token_api.SCORES, _scores_work, _scores_candidate, _scores_errors, MODELS
    ),
    "move_slots": Operation(moves_api.MODULES, _move_work, _move_candidate, _move_errors, MODELS),
    "rank": Operation(rank_api.MODULES, _rank_work, _rank_candidate, _rank_errors, MODELS),
    "sample": Operation(
        sample_api.MODULES, _sample_work, _sample_candidate, _sample_errors, tuple(CODES), False
    ),
}
