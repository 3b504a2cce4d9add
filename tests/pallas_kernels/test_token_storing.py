"""The token attention that stores its token first, against storing and attending by the reference:
every slot, options, types and heads of every size; NaN in the token's slot before, and in empty
ones. Slots that are not the token's come out as they went in, bit by bit."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import token_attention, tpu_slots
from pallas_kernels.arg_specs import SPECS
from pallas_kernels.token_attention import (
    NewToken,
    mosaic_gpu,
    mosaic_slots,
    reference,
    storing,
    tpu,
    tpu_call,
    tpu_token,
)
from pallas_kernels.token_specs import (
    abstract_token_arguments,
    awaiting_token,
    in_float32,
    token_arguments,
)
from tests.often import often
from tests.pallas_kernels import copy_rules, gpu_simulation
from tests.pallas_kernels.test_kernels import TOLERANCE, error
from tests.pallas_kernels.tpu_simulation import CORES, has_races, simulated, simulator

SMALL = replace(SPECS["llamagen-xl-t1"], rows=2, heads=3)
FLOAT = replace(SMALL, dtype="float32")
# the first and the last of a tile of 8 and of the array
CASES = {
    "bfloat16": (SMALL, {"slots": 104}, (0, 7, 8, 103)),
    "float32-shared": (FLOAT, {"slots": 41, "shared": True}, (0, 1, 31, 32, 39, 40)),
    "int8": (replace(SMALL, kv_dtype="int8"), {"slots": 41}, (0, 40)),
    "h100": (replace(SMALL, head_dim=100), {"slots": 105}, (50, 104)),
    "many-rows": (replace(SMALL, rows=8), {"slots": 33}, (0, 32)),
}
MORE = {
    "h128-no-sums": (replace(SMALL, head_dim=128), {"slots": 105, "sums": False}, (1, 104)),
    "one-row": (replace(FLOAT, rows=1, heads=1), {"slots": 13}, tuple(range(13))),
    "h100-float32": (replace(FLOAT, head_dim=100), {"slots": 22}, tuple(range(22))),
    "h128-float32": (replace(FLOAT, head_dim=128), {"slots": 70, "sums": False}, (63, 64, 69)),
    "bfloat16-pool": (replace(FLOAT, kv_dtype="bfloat16"), {"slots": 64}, (9, 63)),
    "float32-pool": (replace(SMALL, kv_dtype="float32"), {"slots": 37}, (35, 36)),
    "fewer-than-a-tile": (SMALL, {"slots": 5}, tuple(range(5))),
    "int8-h128": (replace(SMALL, head_dim=128, kv_dtype="int8"), {"slots": 33}, (32,)),
}
MARKED = [pytest.param(*case, id=name) for name, case in CASES.items()]
MARKED += [pytest.param(*c, id=name, marks=pytest.mark.slow) for name, c in MORE.items()]
# slots, of which so many are in use, in pieces of 128; the token's; bytes of a step
USED = {
    "bfloat16": (SMALL, 300, 130, (0, 127, 128, 129), None),
    "whole": (replace(SMALL, dtype="float32"), 300, 300, (255, 256, 295, 296, 299), None),
    "one": (SMALL, 300, 1, (0,), None),
    "int8": (replace(SMALL, kv_dtype="int8"), 300, 200, (199,), None),
    "h100": (replace(SMALL, head_dim=100), 257, 257, (256,), None),
    "heads-apart": (replace(SMALL, head_dim=128, heads=4), 300, 200, (3, 199), 2 * 304 * 512),
}


def in_bits(array) -> np.ndarray:
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def token_of(query, slot: int) -> NewToken:
    k, v = jax.random.normal(jax.random.key(1), (2, *query.q.shape), query.q.dtype)
    return NewToken(k, v, jnp.int32(slot))


def check(spec, options, slots, store_and_attend) -> None:
    """One program for all slots."""
    query, before = token_arguments(spec, **options)
    # a function of its own, so that every check traces anew, with what is patched
    run = jax.jit(lambda *given: store_and_attend(*given))
    exact = jax.jit(lambda query, held: reference.attend(*in_float32(query, held)))
    for slot in slots:
        (_, held), token = awaiting_token(query, before, slot), token_of(query, slot)
        out, found = jax.block_until_ready(run(query, held, token))
        new = storing.store(held, token.k[:, :, None], token.v[:, :, None], token.slot)
        for ours, right in ((found.pool, new.pool), (found.scale, new.scale)):
            if right is not None:
                assert ours.dtype == right.dtype
                np.testing.assert_array_equal(in_bits(ours), in_bits(right))
        expected, sums = exact(query, new)
        assert out.dtype == query.q.dtype
        assert error(out, expected) < TOLERANCE[spec.dtype]
        assert (found.mass is None) == (sums is None)
        if sums is not None:
            # differences of two sums
            assert error(found.mass - held.mass, sums - held.mass) < 1e-3


@pytest.mark.parametrize(("spec", "options", "slots"), MARKED)
def test_tpu_interpreted(spec, options, slots):
    check(spec, options, slots, partial(tpu.store_and_attend, interpret=True))


@pytest.mark.parametrize(
    ("spec", "slots", "used", "those", "most"),
    [
        pytest.param(*USED[n], id=n, marks=[pytest.mark.slow] * (n in ("whole", "one")))
        for n in USED
    ],
)
def test_tpu_slots_in_use(spec, slots, used, those, most):
    options = {"slots": slots, "used": used, "sums": False, "shared": slots == used}
    more = {} if most is None else {"most_bytes": most}
    run = partial(tpu.store_and_attend, interpret=True, piece=128, **more)
    check(spec, options, those, run)


# --- Mosaic GPU -----------------------------------------------------------------------------------

ENOUGH = [p for p in MARKED if p.values[1]["slots"] >= 32]


@gpu_simulation.needed
@pytest.mark.parametrize(("spec", "options", "slots"), ENOUGH)
def test_mosaic_simulated(spec, options, slots, monkeypatch, capsys):
    """Two programs of three heads each, in steps of 32 slots."""
    few, broken = mosaic_slots.Steps(32, programs=2), copy_rules.watch(monkeypatch)
    how = {"interpret": gpu_simulation.params(), "steps": few}
    check(spec, options, slots, partial(mosaic_gpu.store_and_attend, **how))
    assert gpu_simulation.no_races(capsys)
    assert not broken, broken[:3]


@gpu_simulation.needed
def test_mosaic_place_taken_too_early_is_seen(monkeypatch, capsys):
    """Without waiting until the token has left shared memory."""
    spec, options, slots = CASES["bfloat16"]
    few = mosaic_slots.Steps(32, programs=1)
    how = {"interpret": gpu_simulation.params(), "steps": few}
    with pytest.raises(Exception, match=f"{gpu_simulation.RACE}|assert|AssertionError"):
        with monkeypatch.context() as patch:
            patch.setattr(mosaic_slots.plgpu, "commit_smem", lambda: None)
            check(spec, options, slots[:1], partial(mosaic_gpu.store_and_attend, **how))
            assert gpu_simulation.no_races(capsys), "race"


# --- TPU, in several steps ------------------------------------------------------------------------

HEADS_APART = {"most_bytes": 2 * 112 * 256}


def test_tpu_heads_of_a_row_in_several_steps():
    spec = replace(SMALL, heads=4)
    _, held = abstract_token_arguments(spec, 105)
    assert tpu_slots.steps(held.pool, "takes", HEADS_APART["most_bytes"]) == (1, 2)
    run = partial(tpu.store_and_attend, interpret=True, **HEADS_APART)
    check(spec, {"slots": 105}, (0, 64, 103, 104), run)


SIMULATED = {
    "all": (replace(SMALL, rows=3), {"slots": 40}, (8, 39), {}),
    "heads-apart": (replace(FLOAT, heads=4), {"slots": 24}, (23,), {"most_bytes": 2 * 24 * 512}),
    "used": (SMALL, {"slots": 256, "used": 130, "sums": False}, (5, 129), {"piece": 128}),
}


@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("case", often(("heads-apart", "used"), SIMULATED))
def test_tpu_simulated(case, cores):
    spec, options, slots, more = SIMULATED[case]
    check(spec, options, slots, simulated(tpu.store_and_attend, cores, **more))
    assert not has_races()


@pytest.mark.parametrize(
    ("spec", "slots"),
    [
        pytest.param(SMALL, 41, id="bfloat16"),
        pytest.param(replace(FLOAT, head_dim=100), 22, id="h100", marks=pytest.mark.slow),
        pytest.param(replace(SMALL, kv_dtype="int8"), 41, id="int8"),
    ],
)
def test_tpu_cut_off_tile_simulated(spec, slots, monkeypatch):
    """Memory has whole tiles, also of the chip that is not there to be asked for them. The
    interpreter has none that is cut off, but the whole array for a tile."""

    def whole_tiles(shape, dtype):
        tile = 32 // dtype.itemsize if dtype.itemsize < 2 else 8
        return (*shape[:-2], -(-shape[-2] // tile) * tile, shape[-1]) if shape[1:] else shape

    monkeypatch.setattr(simulator, "_get_padded_shape", whole_tiles)
    run = simulated(tpu.store_and_attend, bounds="padded")
    check(spec, {"slots": slots}, (8, slots - 2, slots - 1), run)
    assert not has_races()


def test_dispatch():
    """By every name, on a CPU."""
    query, held = awaiting_token(*token_arguments(FLOAT, 41), 3)
    given = query, held, token_of(query, 3)

    def run(name):
        out, slots = token_attention.store_and_attend(*given, implementation=name)
        return out, slots.mass, slots.pool

    expected, slots = reference.store_and_attend(*given)
    for name in (None, "reference", "triton"):
        for found, right in zip(run(name), (expected, slots.mass, slots.pool), strict=True):
            np.testing.assert_array_equal(found, right)
    assert error(run("tpu-interpret")[0], expected) < TOLERANCE["float32"]
    with pytest.raises(NotImplementedError, match="does not exist"):
        run("other")


def test_gpus_store_by_xla():
    """What the kernel does not store: heads of 100, int8. Then it attends, as it does without a
    token to store."""
    query, held = awaiting_token(*token_arguments(FLOAT, 41), 3)
    seen = []
    after = storing.in_two_steps(lambda *given, **more: seen.append((given, more)) or (0, None))
    _, found = after(query, held, token_of(query, 3), interpret=False)
    ((given, options),) = seen
    assert given[1].pool is found.pool and options == {"interpret": False}
    assert mosaic_gpu._in_two_steps.__code__ is after.__code__


# --- mistakes that are seen ---


def fails(case: str) -> None:
    spec, options, slots, more = SIMULATED[case]
    with pytest.raises(AssertionError):
        check(spec, options, slots, simulated(tpu.store_and_attend, **more))


def test_what_the_slot_held_is_seen(monkeypatch):
    """If the token is only stored, and not put into what is attended."""
    put = tpu_token.put

    def into_a_copy(rows_ref, first, slot, pool, tile_ref):
        held = pool[...]
        put(rows_ref, first, slot, pool, tile_ref)
        pool[...] = held

    monkeypatch.setattr(tpu_token, "put", into_a_copy)
    fails("all")


def test_a_pool_that_is_not_aliased_is_seen(monkeypatch):
    found = tpu_call.aliases

    def without(numbers, given, results):
        return dict(list(found(numbers, given, results).items())[:-1])  # the pool is the last

    monkeypatch.setattr(tpu_call, "aliases", without)
    fails("all")


def test_a_tile_of_all_steps_is_seen(monkeypatch):
    """The tile of a row's first heads for all of them: the last ones' contents would remain."""
    spec = tpu_token.tile_spec

    def first_heads(*given):
        right = spec(*given)
        return replace(right, index_map=lambda r, n, *rest: right.index_map(r, 0, *rest))

    monkeypatch.setattr(tpu_token, "tile_spec", first_heads)
    fails("heads-apart")


def test_a_token_in_another_piece_is_seen(monkeypatch):
    """Put into every piece that is in use, at the same place."""
    put = tpu_token.put

    def first(rows_ref, heads, slot, *rest):
        put(rows_ref, heads, jnp.zeros_like(slot), *rest)

    monkeypatch.setattr(tpu_token, "put", first)
    fails("used")
