"""Moves of slots: the reference against a loop, the TPU kernel against the reference, bit by bit;
interpreted, and simulated with late copies. Slots hold random bytes, so also NaN and -0."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import implementations, slot_moves
from pallas_kernels.slot_moves import mosaic_gpu, reference, tpu
from pallas_kernels.token_attention import HeadSlots
from tests.pallas_kernels import copy_rules, gpu_simulation
from tests.pallas_kernels.tpu_simulation import CORES, has_races, simulated

# (type, rows, heads, slots, numbers of a slot, slots that move)
CASES = {
    "bfloat16": ("bfloat16", 2, 3, 105, 128, 8),
    "float32": ("float32", 1, 2, 70, 128, 8),
    "int8": ("int8", 3, 2, 105, 256, 8),
    "h100": ("bfloat16", 2, 2, 41, 200, 6),
}
WAYS = ("some", "none", "every", "within", "back")
EACH = [(name, "some") for name in CASES] + [("float32", way) for way in WAYS[1:]]


def bits(array):
    return np.asarray(array).view(np.uint8)


def with_plain_nan(numbers):
    """XLA's programs for CPUs know one NaN of bfloat16, of either sign."""
    if numbers.dtype != jnp.bfloat16:
        return numbers
    number = numbers.view(np.uint16)
    nan = number & 0x7FFF > 0x7F80
    return np.where(nan, number & 0x8000 | 0x7FC0, number).view(numbers.dtype)


def problem(dtype, rows, heads, slots, width, last, way="some", seed=0):
    """Pool, where slots go, and scales, of which some are NaN."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    random = rng.integers(0, 256, (rows, heads, slots, width * dtype.itemsize), np.uint8)
    pool, scale = with_plain_nan(random.view(dtype)), None
    if dtype == jnp.int8:
        scale = rng.random((rows, 2, heads, slots), np.float32)
        scale[rng.random(scale.shape) < 0.1] = np.nan
    return pool, places(rng, way, rows, heads, slots, last), scale


def places(rng, way: str, rows: int, heads: int, slots: int, last: int):
    """Targets of every head's last slots. some: anywhere or out of the array. none: all out of it.
    every: into slots of others, as far as these suffice. within: one into the slot of another one.
    back: where they are, or out. apart: into slots of others, or out."""

    def of_head():
        if way == "some":
            return rng.permutation(slots + last)[:last]
        if way == "none":
            return slots + np.arange(last)
        if way == "every":
            return rng.permutation(max(last, slots - last))[:last]
        if way == "apart":
            found = rng.permutation(slots)[:last]
            return np.where(found < slots - last, found, found + last)
        if way == "within":
            return slots - 1 - rng.permutation(last)
        return slots - last + np.arange(last) + last * rng.integers(0, 2, last)

    found = [of_head() for _ in range(rows * heads)]
    return np.reshape(found, (rows, heads, last)).astype(np.int32)


def by_hand(pool, slot, scale):
    found, rows, last = pool.copy(), pool.shape[0], slot.shape[-1]
    scales = None if scale is None else scale.copy()
    for r, n, p in np.ndindex(rows, pool.shape[1], last):
        to, begin = slot[r, n, p], pool.shape[2] - last
        if to < pool.shape[2]:
            found[r, n, to] = pool[r, n, begin + p]
            if scale is not None:
                scales[r, :, n, to] = scale[r, :, n, begin + p]
    return found, scales


def check(case, run, way="some") -> None:
    pool, slot, scale = problem(*case, way)
    moved = jax.jit(lambda pool, scale, slot: run([HeadSlots(pool, scale=scale)], slot))
    [slots] = jax.block_until_ready(moved(pool, scale, slot))
    found, scales = slots.pool, slots.scale
    expected, expected_scales = by_hand(pool, slot, scale)
    assert found.dtype == pool.dtype
    np.testing.assert_array_equal(bits(found), bits(expected))
    assert (scales is None) == (scale is None)
    if scale is not None:
        np.testing.assert_array_equal(bits(scales), bits(expected_scales))


interpreted = partial(tpu.move_all, interpret=True)


@pytest.mark.parametrize("way", WAYS)
def test_reference(way):
    check(CASES["int8"], reference.move_all, way)


@pytest.mark.parametrize(("name", "way"), EACH)
def test_interpreted(name, way):
    check(CASES[name], interpreted, way)


def test_every_bit_moves():
    """All numbers of two bytes, once; -0, infinities and NaN among them."""
    dtype = "bfloat16"
    pool = np.arange(2**16, dtype=np.uint16).reshape(1, 4, 128, 128).view(np.uint8)
    pool = np.concatenate([np.zeros_like(pool), pool], axis=2)
    pool = np.repeat(pool, jnp.dtype(dtype).itemsize, axis=-1)[..., ::2].copy().view(dtype)
    pool = with_plain_nan(pool)
    pool[..., 128:, :] = pool[..., 128:, ::-1]
    slot = np.random.default_rng(0).permuted(np.tile(np.arange(128), (1, 4, 1)), axis=-1)
    [found] = interpreted([HeadSlots(jnp.asarray(pool))], jnp.asarray(slot, jnp.int32))
    expected, _ = by_hand(pool, slot, None)
    np.testing.assert_array_equal(bits(found.pool), bits(expected))


def test_heads_of_a_row_in_several_steps():
    most = 2 * 112 * 256
    pool = jax.ShapeDtypeStruct((2, 4, 105, 128), jnp.bfloat16)
    assert tpu.tpu_slots.steps(pool, "", most) == (1, 2)
    check(("bfloat16", 2, 4, 105, 128, 8), partial(interpreted, most_bytes=most))


@pytest.mark.parametrize("cores", CORES)
def test_simulated(cores):
    check(CASES["int8"], simulated(tpu.move_all, cores))
    assert not has_races()


@pytest.mark.parametrize("name", ["bfloat16", "float32", "int8"])
def test_slots_that_nothing_comes_to_need_not_be_written(name):
    """Up to a whole tile behind the last place that a slot may come to."""
    dtype, _, _, slots, width, last = CASES[name]
    pool = jax.ShapeDtypeStruct((2, 2, slots, width), dtype)
    written = tpu._written(pool, slots - last, None)
    assert slots - last <= written < slots or dtype == "int8"
    assert tpu._written(pool, None, None) == tpu._written(pool, slots - last, True) == slots
    check(CASES[name], simulated(tpu.move_all, below=slots - last), "every")
    assert not has_races()


# --- several layers -------------------------------------------------------------------------------


def several(case, way, layers=3):
    """Problems of some layers, with targets of their own: their slots, all targets, and what is
    right."""
    found = [problem(*case, way, seed=s) for s in range(layers)]
    slots = [HeadSlots(*jax.tree.map(jnp.asarray, (p, None, s))) for p, _, s in found]
    target = jnp.concatenate([target for _, target, _ in found])
    return slots, target, [by_hand(pool, target, scale) for pool, target, scale in found]


def check_several(case, run, way="some", layers=3) -> None:
    slots, target, expected = several(case, way, layers)
    found = jax.block_until_ready(jax.jit(run)(slots, target))
    for ours, (pool, scale) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits(ours.pool), bits(pool))
        if scale is not None:
            np.testing.assert_array_equal(bits(ours.scale), bits(scale))


@pytest.mark.parametrize("name", ["reference", "tpu-interpret"])
@pytest.mark.parametrize("case", ["float32", "int8"])
def test_several_layers(case, name):
    check_several(CASES[case], partial(slot_moves.move_all, implementation=name))


# --- Mosaic GPU -----------------------------------------------------------------------------------


def in_simulator(case, **options):
    """Moves into slots in front of the last ones. What goes among these goes nowhere."""
    _, _, _, slots, _, last = case
    how = {"below": slots - last, "interpret": gpu_simulation.params(), **options}
    return partial(mosaic_gpu.move_all, **how)


@gpu_simulation.needed
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_mosaic_simulated(name, monkeypatch, capsys):
    """Three layers in two calls; NaN moves bit by bit."""
    case, broken = CASES[name], copy_rules.watch(monkeypatch)
    check_several(case, in_simulator(case, most=2), "apart")
    assert gpu_simulation.no_races(capsys)
    assert not broken, broken[:3]


# --- dispatch -------------------------------------------------------------------------------------


def traced(name, platform, monkeypatch, dtype="bfloat16", width=128, slots=40) -> bool:
    """Whether a kernel is in a program for such a chip."""
    monkeypatch.setattr(implementations.target, "platform", lambda: platform)
    monkeypatch.setattr(implementations.target, "capability", lambda: "9.0")
    pool = jax.ShapeDtypeStruct((2, 3, slots, width), dtype)
    slot = jax.ShapeDtypeStruct((2, 3, 8), jnp.int32)

    def run(pool, slot):
        below = pool.shape[2] - slot.shape[2]
        return slot_moves.move_all([HeadSlots(pool)], slot, below=below, implementation=name)

    return has_kernel(jax.make_jaxpr(run)(pool, slot))


def has_kernel(jaxpr) -> bool:
    return any(word in str(jaxpr) for word in ("pallas_call", "core_map", "mpmd_map"))


def test_tpus_take_the_kernel_or_say_why_not(monkeypatch, recwarn):
    assert traced(None, "tpu", monkeypatch)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="plain JAX reference runs instead: TPU moves of slots"):
        assert not traced(None, "tpu", monkeypatch, width=192)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 192}, "heads of 64, 100, 128, not 40 slots of heads of 96"),
        ({"dtype": "float16"}, "a pool of float32, bfloat16, int8"),
        ({"dtype": "int8", "slots": 8193}, "heads of up to 1048576 bytes"),
    ],
)
def test_refused(changes, reason, monkeypatch):
    with pytest.raises(NotImplementedError, match=reason) as refusal:
        traced("tpu", "tpu", monkeypatch, **changes)
    assert "--attention=reference" in str(refusal.value)


@pytest.mark.parametrize("name", [None, "triton"])
def test_hopper_takes_the_kernel(name, monkeypatch, recwarn):
    assert traced(name, "gpu", monkeypatch) == (name is None)
    assert not recwarn.list
