"""The token attention that stores its token first, against storing and attending by the reference:
every slot, options, types and heads of every size; NaN in the token's slot before, and in empty
ones. Slots that are not the token's come out as they went in, bit by bit."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arg_specs import SPECS, in_float32
from pallas_kernels.token_attention import (
    NewToken,
    mosaic_gpu,
    mosaic_slots,
    reference,
    tpu,
    tpu_call,
)
from pallas_kernels.token_specs import awaiting_token, token_arguments
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
OFTEN = ("bfloat16", "int8")
MARKED = [
    pytest.param(*case, id=name, marks=[] if name in OFTEN else [pytest.mark.slow])
    for name, case in CASES.items()
]
# slots, of which so many are in use, in pieces of 128; the token's; bytes of a step
USED = {
    "bfloat16": (SMALL, 300, 130, (0, 127, 128, 129), None),
    "int8": (replace(SMALL, kv_dtype="int8"), 300, 200, (199,), None),
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
    exact = jax.jit(lambda query, held: reference.attend(*in_float32((query, held))))
    for slot in slots:
        (_, held), token = awaiting_token(query, before, slot), token_of(query, slot)
        out, found = jax.block_until_ready(run(query, held, token))
        new = reference.store(held, token.k[:, :, None], token.v[:, :, None], token.slot)
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


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "slots", "used", "those", "most"), USED.values(), ids=USED)
def test_tpu_slots_in_use(spec, slots, used, those, most):
    options = {"slots": slots, "used": used, "sums": False, "shared": slots == used}
    more = {} if most is None else {"most_bytes": most}
    run = partial(tpu.store_and_attend, interpret=True, piece=128, **more)
    check(spec, options, those, run)


# --- Mosaic GPU -----------------------------------------------------------------------------------


@gpu_simulation.needed
@pytest.mark.parametrize(("spec", "options", "slots"), MARKED)
def test_mosaic_simulated(spec, options, slots, monkeypatch, capsys):
    """Two programs of three heads each, in steps of 32 slots."""
    broken = copy_rules.watch(monkeypatch)
    how = {"interpret": gpu_simulation.params(), "step": 32, "programs": 2}
    check(spec, options, slots, partial(mosaic_gpu.store_and_attend, **how))
    assert gpu_simulation.no_races(capsys)
    assert not broken, broken[:3]


@gpu_simulation.needed
def test_mosaic_place_taken_too_early_is_seen(monkeypatch, capsys):
    """Without waiting until the token has left shared memory."""
    spec, options, slots = CASES["bfloat16"]
    how = {"interpret": gpu_simulation.params(), "step": 32, "programs": 1}
    with pytest.raises(Exception, match=f"{gpu_simulation.RACE}|assert|AssertionError"):
        with monkeypatch.context() as patch:
            patch.setattr(mosaic_slots.plgpu, "commit_smem", lambda: None)
            check(spec, options, slots[:1], partial(mosaic_gpu.store_and_attend, **how))
            assert gpu_simulation.no_races(capsys), "race"


# --- TPU, in several steps ------------------------------------------------------------------------


SIMULATED = {
    "all": (replace(SMALL, rows=3), {"slots": 40}, (8, 39), {}),
    "heads-apart": (replace(FLOAT, heads=4), {"slots": 24}, (23,), {"most_bytes": 2 * 24 * 512}),
    "used": (SMALL, {"slots": 256, "used": 130, "sums": False}, (5, 129), {"piece": 128}),
}


@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("case", often(("used",), SIMULATED))
def test_tpu_simulated(case, cores):
    spec, options, slots, more = SIMULATED[case]
    check(spec, options, slots, simulated(tpu.store_and_attend, cores, **more))
    assert not has_races()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "slots"),
    [
        pytest.param(SMALL, 41, id="bfloat16"),
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


# --- mistakes that are seen ---


def fails(case: str) -> None:
    spec, options, slots, more = SIMULATED[case]
    with pytest.raises(AssertionError):
        check(spec, options, slots, simulated(tpu.store_and_attend, **more))


def test_a_pool_that_is_not_aliased_is_seen(monkeypatch):
    found = tpu_call.aliases

    def without(numbers, given, results):
        return dict(list(found(numbers, given, results).items())[:-1])  # the pool is the last

    monkeypatch.setattr(tpu_call, "aliases", without)
    fails("all")
