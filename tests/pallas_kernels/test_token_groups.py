"""Groups of query heads that share keys and values, against a loop in float64: the shape of
Lumina-mGPT-34B made smaller, 8 query heads on 1 and on 2 heads of keys and values."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import implementations
from pallas_kernels.arg_specs import SPECS
from pallas_kernels.token_attention import HeadSlots, NewToken, attend, scores, store_and_attend
from pallas_kernels.token_specs import PROTECTED, awaiting_token, token_arguments

QUERY_HEADS = 8
FLOAT = replace(SPECS["llamagen-xl-t1"], rows=2, dtype="float32")
# more slots in use than one block of the reference on CPUs has
OPTIONS = {
    "sums": {"slots": 41},
    "used": {"slots": 150, "used": 77, "sums": False},
    "used-shared": {"slots": 150, "used": 140, "sums": False, "shared": True},
}
CASES = [(1, "used"), (2, "sums")]
IMPLEMENTATIONS = ("reference", "tpu-interpret")


def problem(heads: int, kv_dtype: str | None = None, **options):
    spec = replace(FLOAT, heads=heads, kv_dtype=kv_dtype)
    return token_arguments(spec, group=QUERY_HEADS // heads, **options)


def keys_and_values(slots: HeadSlots):
    """What the slots hold in float64, heads by slots by columns, 0 where they are empty."""
    pool = np.asarray(slots.pool, np.float64)
    k, v = np.split(pool, 2, axis=-1)
    if slots.scale is not None:
        factor = np.asarray(slots.scale, np.float64)[..., None]
        k, v = k * factor[:, 0], v * factor[:, 1]
    empty = np.broadcast_to(np.asarray(slots.position) < 0, slots.pool.shape[:3])[..., None]
    return np.where(empty, 0, k), np.where(empty, 0, v)


def by_hand(query, slots: HeadSlots):
    """Outputs of all query heads one by one, and the masses afterwards."""
    (k, v), q = keys_and_values(slots), np.asarray(query.q, np.float64)
    rows, heads, count, _ = slots.pool.shape
    position = np.broadcast_to(np.asarray(slots.position), (rows, heads, count))
    mass = None if slots.mass is None else np.array(slots.mass, np.float64)
    out, group = np.zeros_like(q), q.shape[1] // heads
    for r, i in np.ndindex(q.shape[:2]):
        head = i // group
        place = position[r, head]
        seen = place >= 0
        if query.newest is not None:
            begin = int(query.newest) - int(slots.reach[r, head])
            seen &= (place <= int(query.newest)) & ((place < PROTECTED) | (place > begin))
        found = k[r, head] @ q[r, i]
        if query.first_bias is not None:
            found[0] += float(query.first_bias[r])
        found = np.where(seen, found, -np.inf)
        weights = np.exp(found - found.max())
        weights /= weights.sum()
        out[r, i] = weights @ v[r, head]
        if mass is not None:
            mass[r, head] += float(query.mass_weight) * weights
    return out, mass


ATTENTION = [(1, "sums", None), (2, "used", None), (1, "used-shared", "int8")]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "options", "kv_dtype"), ATTENTION)
def test_attention(heads, options, kv_dtype, implementation):
    query, slots = problem(heads, kv_dtype, **OPTIONS[options])
    expected, sums = by_hand(query, slots)
    out, mass = jax.jit(partial(attend, implementation=implementation))(query, slots)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert (mass is None) == (sums is None)
    if mass is not None:
        np.testing.assert_allclose(mass, sums, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "options"), CASES)
def test_storing(heads, options, implementation):
    """One key and one value per head, whatever the number of its queries."""
    query, slots = awaiting_token(*problem(heads, **OPTIONS[options]), 7)
    shape = (len(slots.pool), heads, FLOAT.head_dim)
    k, v = jax.random.normal(jax.random.key(1), (2, *shape))
    run = jax.jit(partial(store_and_attend, implementation=implementation))
    out, found = run(query, slots, NewToken(k, v, jnp.int32(7)))
    np.testing.assert_array_equal(found.pool[:, :, 7], jnp.concatenate([k, v], axis=-1))
    expected, sums = by_hand(query, replace(slots, pool=found.pool))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    if sums is not None:
        np.testing.assert_allclose(found.mass, sums, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "count"), [(1, 3), (2, 1)])
def test_scores(heads, implementation, count):
    """Kernels, too: queries of a group are queries of the same keys."""
    _, slots = problem(heads, slots=41, sums=False, poison=False)
    shape = (len(slots.pool), QUERY_HEADS, count, FLOAT.head_dim)
    q = jax.random.normal(jax.random.key(2), shape)
    found = jax.jit(partial(scores, first=5, implementation=implementation))(q, slots)
    k = np.repeat(np.asarray(slots.pool)[..., : FLOAT.head_dim], QUERY_HEADS // heads, axis=1)
    expected = np.einsum("rnqh,rnch->rnqc", np.asarray(q, np.float64), k[:, :, 5:])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_query_heads_that_cannot_share():
    query, slots = token_arguments(replace(FLOAT, heads=3), 41)
    q = jnp.ones((2, 8, FLOAT.head_dim))
    with pytest.raises(ValueError, match="8 query heads cannot share 3 heads"):
        attend(replace(query, q=q), slots)
    with pytest.raises(ValueError, match="2 query heads cannot share 3 heads"):
        scores(q[:, :2, None], slots)


def traced(name, platform, monkeypatch) -> bool:
    """Whether a kernel is in a program for such a chip."""
    monkeypatch.setattr(implementations.target, "platform", lambda: platform)
    monkeypatch.setattr(implementations.target, "capability", lambda: "9.0")
    given = problem(2, slots=41)
    jaxpr = jax.make_jaxpr(lambda *given: attend(*given, implementation=name))(*given)
    return "pallas_call" in str(jaxpr)


def test_dispatch(monkeypatch, recwarn):
    """Nobody has to name the reference where the kernel does not serve groups; one that is named is
    refused."""
    assert traced(None, "tpu", monkeypatch)
    assert not traced(None, "gpu", monkeypatch)
    assert not traced(None, "cpu", monkeypatch)
    assert not recwarn.list
    with pytest.raises(NotImplementedError, match="Mosaic token attention serves one query per"):
        traced("mosaic", "gpu", monkeypatch)
