"""Kernels of token attention against the reference in float32: every option, types and heads of
every size, NaN in empty slots. TPU: interpreted, and simulated with late copies; GPU: simulated
(JAX from 0.11 on). The simulators fill fresh memory with NaN and look for races."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels import implementations, token_attention
from pallas_kernels.arg_specs import SPECS, in_float32
from pallas_kernels.token_attention import mosaic_gpu, mosaic_slots, reference, tpu, tpu_row
from pallas_kernels.token_specs import token_arguments
from tests.pallas_kernels import copy_rules, gpu_simulation
from tests.pallas_kernels.gpu_simulation import UNWAITED, no_races
from tests.pallas_kernels.test_kernels import TOLERANCE, error
from tests.pallas_kernels.token_shapes import abstract_token_arguments
from tests.pallas_kernels.tpu_simulation import CORES, has_races
from tests.pallas_kernels.tpu_simulation import simulated as tpu_simulated

SMALL = replace(SPECS["llamagen-xl-t1"], rows=2, heads=3)
# 105: no multiple of anything, more than one step of the GPU kernel
CASES = {
    "bfloat16": (SMALL, {"slots": 105}),
    "float32-shared": (replace(SMALL, dtype="float32"), {"slots": 70, "shared": True}),
    "int8": (replace(SMALL, kv_dtype="int8"), {"slots": 105}),
    "h100": (replace(SMALL, head_dim=100), {"slots": 41}),
    "h128-no-sums": (replace(SMALL, head_dim=128), {"slots": 105, "sums": False}),
    # the third step of 32 slots begins with one that is used, the fourth has none
    "used": (SMALL, {"slots": 105, "used": 65}),
}
MARKED = [pytest.param(*case, id=name) for name, case in CASES.items()]


def exactly(query, slots):
    """What the reference finds in float32."""
    return reference.attend(*in_float32((query, slots)))


def check(spec, options, attend) -> None:
    query, slots = token_arguments(spec, **options)
    expected, sums = jax.jit(exactly)(query, slots)
    # a function of its own, so that every check traces anew, with what is patched
    out, mass = jax.block_until_ready(jax.jit(lambda *given: attend(*given))(query, slots))
    assert out.dtype == query.q.dtype
    assert error(out, expected) < TOLERANCE[spec.dtype]
    assert (mass is None) == (sums is None)
    if mass is not None:
        changed, right = mass - slots.mass, sums - slots.mass
        assert error(changed, right) < 1e-3  # differences of two sums
        empty = np.broadcast_to(slots.position < 0, mass.shape)
        np.testing.assert_array_equal(mass[empty], slots.mass[empty])


@pytest.mark.parametrize(("spec", "options"), MARKED)
def test_tpu_interpreted(spec, options):
    check(spec, options, partial(tpu.attend, interpret=True))


USED = {
    "bfloat16": (SMALL, 300, 130, None),
    "all-shared": (replace(SMALL, dtype="float32"), 300, 300, None),
    "int8": (replace(SMALL, kv_dtype="int8"), 300, 200, None),
    "h128-heads-apart": (replace(SMALL, head_dim=128, heads=4), 300, 200, 2 * 304 * 512),
}


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "slots", "used", "most"), USED.values(), ids=USED)
def test_tpu_slots_in_use(spec, slots, used, most):
    """Pieces of 128 slots; those that are not used hold NaN."""
    options = {"slots": slots, "used": used, "sums": False, "shared": slots == used}
    more = {} if most is None else {"most_bytes": most}
    check(spec, options, partial(tpu.attend, interpret=True, piece=128, **more))


@pytest.mark.parametrize("cores", CORES)
def test_tpu_slots_in_use_simulated(cores):
    options = {"slots": 300, "used": 130, "sums": False}
    check(SMALL, options, tpu_simulated(tpu.attend, cores, piece=128))
    assert not has_races()


@pytest.mark.parametrize("cores", CORES)
def test_tpu_simulated(cores):
    check(*CASES["bfloat16"], tpu_simulated(tpu.attend, cores))
    assert not has_races()


def test_tpu_what_empty_slots_spoil_is_seen(monkeypatch):
    """Without the second product."""
    options = {"slots": 300, "used": 130, "sums": False}
    run = partial(tpu.attend, interpret=True, piece=128)
    check(SMALL, options, run)
    monkeypatch.setattr(tpu_row, "spoilt", lambda out: False)
    with pytest.raises(AssertionError):
        check(SMALL, options, run)


# --- Mosaic GPU -----------------------------------------------------------------------------------


def simulated(programs: int):
    """The GPU kernel in the simulator, with so many programs."""
    how = {"interpret": gpu_simulation.params(), "step": 32, "programs": programs}
    return partial(mosaic_gpu.attend, **how)


@gpu_simulation.needed
@pytest.mark.parametrize(("spec", "options"), MARKED)
def test_mosaic_simulated(spec, options, monkeypatch, capsys):
    """Two programs of three heads each, the first of which ends with another row's."""
    broken = copy_rules.watch(monkeypatch)
    check(spec, options, simulated(2))
    assert no_races(capsys)
    assert not broken, broken[:3]


@gpu_simulation.needed
@pytest.mark.parametrize("what", ["wait", "release"])
def test_mosaic_mistakes_are_seen(what, monkeypatch, capsys):
    """Without the wait for a step, or without the one for all that still read its place."""
    with pytest.raises(Exception, match=f"{UNWAITED}|assert"):
        with monkeypatch.context() as patch:
            if what == "wait":
                patch.setattr(mosaic_slots.plgpu, "barrier_wait", lambda barrier: None)
            else:
                patch.setattr(mosaic_slots.plgpu, "commit_smem", lambda: None)
            check(*CASES["bfloat16"], simulated(1))
            assert no_races(capsys), "race"


# --- dispatch -------------------------------------------------------------------------------------


def abstract(spec, slots=40, **options):
    return abstract_token_arguments(spec, slots, **options)


def run(given, name):
    return token_attention.attend(*given, implementation=name)


@pytest.mark.parametrize(
    ("kernel", "changes", "slots", "reason"),
    [
        ("mosaic", {"head_dim": 96}, 40, "heads of 64, 100, 128, not 40 slots of heads of 96"),
        ("mosaic", {}, 31, "takes 32 to 4096 slots, not 31"),
        ("mosaic", {"head_dim": 100, "kv_dtype": "int8"}, 40, "multiples of 16 bytes"),
        ("tpu", {"head_dim": 96}, 40, "TPU token attention takes heads of 64, 100, 128"),
        ("tpu", {"dtype": "float16"}, 40, "a pool of float32, bfloat16, int8"),
        ("tpu", {"dtype": "float32", "head_dim": 128}, 4097, "heads of up to 4194304 bytes"),
    ],
)
def test_refused(kernel, changes, slots, reason):
    given = abstract(replace(SMALL, **changes), slots)
    with pytest.raises(NotImplementedError, match=reason) as refusal:
        jax.eval_shape(lambda a: run(a, kernel), given)
    assert "--attention=reference" in str(refusal.value)


def traced(name, platform, capability, monkeypatch, **changes) -> bool:
    """Whether a kernel is in a program for such a chip."""
    monkeypatch.setattr(implementations.target, "platform", lambda: platform)
    monkeypatch.setattr(implementations.target, "capability", lambda: capability)
    given = abstract(replace(SMALL, **changes))
    jaxpr = str(jax.make_jaxpr(lambda a: run(a, name))(given))
    return any(word in jaxpr for word in ("pallas_call", "core_map", "mpmd_map"))


def test_auto_takes_the_kernel_or_says_why_not(monkeypatch, recwarn):
    assert traced(None, "tpu", None, monkeypatch)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="plain JAX reference runs instead: .* heads of 96"):
        assert not traced(None, "tpu", None, monkeypatch, head_dim=96)
