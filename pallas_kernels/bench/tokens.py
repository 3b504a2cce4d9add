"""Timings and errors of the operations of models that draw token by token: attention of a token,
with and without storing it, the operations of decisions after a stage, and choosing tokens from
logits.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import rank, slot_moves, token_attention
from pallas_kernels.arg_specs import ArgSpec, in_float32
from pallas_kernels.bench.timing import Candidate, Operation, after, relative, repeated, unequal
from pallas_kernels.rank import api as rank_api
from pallas_kernels.sample import api as sample_api
from pallas_kernels.slot_moves import api as moves_api
from pallas_kernels.token_attention import HeadSlots, NewToken, Query, store_and_attend
from pallas_kernels.token_attention import api as token_api
from pallas_kernels.token_specs import awaiting_token, token_arguments

MODELS = ("llamagen", "janus", "lumina")  # that draw token by token
STAGE = 8  # tokens between two decisions, the last slots of every head
WINDOW = 6  # queries of a window whose scores are checked
# entries to choose from
CODES = {"var": 4096, "llamagen": 16384, "janus": 16384, "lumina": 8192}
FILTERS = {"top_k": 900, "top_p": 0.96}


def slots(spec: ArgSpec) -> int:
    return spec.entries * spec.block_size


# --- attention of a token ---


def _attend_candidate(spec: ArgSpec, name: str) -> Candidate:
    attend = partial(token_attention.attend, implementation=name)
    query, held = token_arguments(spec, sums=False, poison=False)
    once = lambda q, query, held: attend(replace(query, q=q), held)[0]  # noqa: E731
    return repeated(once, query.q, query, held)


def _with_token(spec: ArgSpec, query: Query, held: HeadSlots) -> tuple[Query, HeadSlots, NewToken]:
    """Arguments of storing a token."""
    rng, slot = np.random.default_rng(1), slots(spec) // 2
    query, held = awaiting_token(query, held, slot)
    shape = spec.rows, spec.heads, spec.head_dim
    k, v = (jnp.asarray(rng.standard_normal(shape, np.float32), spec.dtype) for _ in "kv")
    return query, held, NewToken(k, v, jnp.int32(slot))


def _store_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(carry, query, held, token):
        out, pool, scale = carry
        query, token = after(out, (query, token))
        held = replace(held, pool=pool, scale=scale)
        out, held = store_and_attend(query, held, token, implementation=name)
        return out, held.pool, held.scale

    query, held, token = _with_token(spec, *token_arguments(spec, sums=False, poison=False))
    return Candidate(step, (query.q, held.pool, held.scale), (query, held, token))


def _attend_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    given = token_arguments(spec)
    run = jax.jit(token_attention.attend, static_argnames="implementation")
    expected = run(*in_float32(given), implementation="reference")
    return relative(("out", "sums"), run(*given, implementation=name), expected)


def _store_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Errors of attention with the pool that the reference stores, and of what the slots of the
    pool mean; 0 and NaN are the same there."""
    query, held, token = _with_token(spec, *token_arguments(spec))
    run = jax.jit(store_and_attend, static_argnames="implementation")
    out, found = run(query, held, token, implementation=name)
    _, stored = run(query, held, token, implementation="reference")
    exact = in_float32((query, replace(stored, mass=held.mass)))
    expected = token_attention.attend(*exact, implementation="reference")
    errors = relative(("out", "sums"), (out, found.mass), expected)
    meant = (_meant(found.pool, found.scale),), (_meant(stored.pool, stored.scale),)
    return errors | relative(("pool",), *meant)


def _meant(pool, scale):
    """The keys and values that a pool stands for, float32, 0 for NaN."""
    pool = pool.astype(jnp.float32)
    if scale is not None:
        halves = pool.reshape(*pool.shape[:-1], 2, -1) * jnp.moveaxis(scale, 1, -1)[..., None]
        pool = halves.reshape(pool.shape)
    return jnp.nan_to_num(pool)


# --- decisions ---


def _scores(q, held: HeadSlots, name: str):
    """Scores of all slots but the condition's."""
    first = min(1, held.pool.shape[2] - 1)
    return token_attention.scores(q, held, first=first, implementation=name)


def _queries(spec: ArgSpec, count: int, dtype: str):
    rng = np.random.default_rng(2)
    shape = (spec.rows, spec.heads * spec.queries_per_head, count, spec.head_dim)
    return jnp.asarray(rng.standard_normal(shape, np.float32) * spec.head_dim**-0.5, dtype)


def _scores_candidate(spec: ArgSpec, name: str) -> Candidate:
    _, held = token_arguments(spec, sums=False, poison=False)
    return repeated(partial(_scores, name=name), _queries(spec, 1, "float32"), held)


def _scores_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Errors for a mean query, and for those of a window."""
    given, errors = token_arguments(spec, sums=False, poison=False), {}
    (_, held), (_, exact) = given, in_float32(given)
    run = jax.jit(_scores, static_argnums=2)
    for what, count, dtype in (("mean", 1, "float32"), ("window", WINDOW, spec.dtype)):
        q = _queries(spec, count, dtype)
        expected = run(q.astype(jnp.float32), exact, "reference")
        errors |= relative((what,), (run(q, held, name),), (expected,))
    return errors


def _move(held: HeadSlots, target, name: str) -> HeadSlots:
    below = held.pool.shape[2] - target.shape[-1]
    return slot_moves.move_all([held], target, below=below, implementation=name)[0]


def _places(spec: ArgSpec):
    """Targets of the last slots: anywhere in front of them, or nowhere."""
    rng, last = np.random.default_rng(3), min(STAGE, slots(spec))
    every = np.tile(np.arange(slots(spec)), (spec.rows, spec.heads, 1))
    found = rng.permuted(every, axis=-1)[..., :last]
    return jnp.asarray(np.where(found < slots(spec) - last, found, found + last), jnp.int32)


def _move_candidate(spec: ArgSpec, name: str) -> Candidate:
    def step(carry, target):
        pool, scale = carry
        moved = _move(HeadSlots(pool, scale=scale), target, name)
        return moved.pool, moved.scale

    held = _stored(spec, poison=False)
    return Candidate(step, (held.pool, held.scale), (_places(spec),))


def _stored(spec: ArgSpec, poison: bool) -> HeadSlots:
    """The arrays that move: keys, values and their scales."""
    _, held = token_arguments(spec, sums=False, poison=poison)
    return HeadSlots(held.pool, scale=held.scale)


def _move_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    held, run = _stored(spec, poison=True), jax.jit(_move, static_argnums=2)
    found, expected = (run(held, _places(spec), n) for n in (name, "reference"))
    errors = unequal("pool", found.pool, expected.pool)
    if held.scale is None:
        return errors
    return errors | unequal("scale", found.scale, expected.scale)


def _ranked(spec: ArgSpec) -> tuple:
    """Arguments of `rank`, with few different scores, so that ties decide."""
    rng, shape = np.random.default_rng(4), (spec.rows, spec.heads, slots(spec))
    tie = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
    among, part = rng.random((2, *shape)) < 0.6
    scores = np.float32(rng.integers(-9, 10, shape))
    return tuple(map(jnp.asarray, (scores, np.int32(tie), among, part)))


def _rank_candidate(spec: ArgSpec, name: str) -> Candidate:
    score, tie, *masks = _ranked(spec)
    once = lambda tie, score, *masks: rank.rank(score, tie, *masks, implementation=name)  # noqa: E731
    return repeated(once, tie, score, *masks)


def _rank_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    run = jax.jit(rank.rank, static_argnames="implementation")
    given = _ranked(spec)
    found, expected = (run(*given, implementation=n) for n in (name, "reference"))
    return unequal("ranks", found, expected)


# --- choosing tokens ---


def _logits(spec: ArgSpec) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Logits, noise, and the strength of guidance, None where the number of rows is odd."""
    rng, guided = np.random.default_rng(5), spec.rows % 2 == 0
    codes = CODES[spec.name.partition("-")[0]]
    shape = (spec.rows // (1 + guided), spec.tokens, codes)
    logits = 3 * rng.standard_normal((spec.rows, *shape[1:]), np.float32)
    noise = jnp.asarray(rng.gumbel(size=shape), jnp.float32)
    return jnp.asarray(logits), noise, jnp.float32(1.3) if guided else None


def _sample(logits, noise, strength, name: str, zero=0):
    tau, strength = jnp.float32(0.7) + zero, None if strength is None else strength + zero
    return sample_api.sample(
        logits, noise, tau=tau, strength=strength, **FILTERS, implementation=name
    )


def _sample_candidate(spec: ArgSpec, name: str) -> Candidate:
    once = lambda zero, *given: _sample(*given, name, zero)  # noqa: E731
    return repeated(once, jnp.int32(0), *_logits(spec))


def _sample_errors(spec: ArgSpec, name: str) -> dict[str, float]:
    """Share of tokens that differ, among 32 or more with guidance and as many without."""
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
    "attend_token": Operation(token_api.MODULES, _attend_candidate, _attend_errors, MODELS),
    "store_token": Operation(token_api.MODULES, _store_candidate, _store_errors, MODELS),
    "token_scores": Operation(token_api.SCORES, _scores_candidate, _scores_errors, MODELS),
    "move_slots": Operation(moves_api.MODULES, _move_candidate, _move_errors, MODELS),
    "rank": Operation(rank_api.MODULES, _rank_candidate, _rank_errors, MODELS),
    "sample": Operation(
        sample_api.MODULES, _sample_candidate, _sample_errors, tuple(CODES), of_cache=False
    ),
}
