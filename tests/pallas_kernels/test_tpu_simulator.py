"""TPU kernels of ragged attention, cache writes and the sampler in the TPU simulator; one core and
two."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.cache_write import tpu as tpu_write
from pallas_kernels.cache_write.tpu import StoredEntries
from pallas_kernels.ragged_attention import tpu
from pallas_kernels.ragged_attention.config import TPUConfig
from pallas_kernels.sample import tpu as tpu_sample
from pallas_kernels.shared import tpu_projection
from tests.often import often
from tests.pallas_kernels import tpu_simulation
from tests.pallas_kernels.test_kernels import (
    SHAPES,
    TOLERANCE,
    assert_stored,
    attend,
    error,
    in_float32,
    moments,
    tables,
    write,
    written,
)
from tests.pallas_kernels.test_sample import numbers, runs
from tests.pallas_kernels.test_tpu_edges import sharing
from tests.pallas_kernels.tpu_simulation import has_races

SMALL = ArgSpec(
    name="small", rows=2, heads=2, head_dim=64, tokens=21, length=13, entries=5, dtype="float32"
)
# With --slow shapes of models, which compile for minutes.
CASES = often([SMALL], [SMALL, *SHAPES.values()])
# two groups of entries, so that a buffer is used while another is filled
SMALL_TILES = TPUConfig(block_q=128, copy_keys=32, own_keys=64)


def simulated(operation, cores: int = 1, **options):
    """In the simulator, as one program for all numbers."""
    return jax.jit(tpu_simulation.simulated(operation, cores, **options))


def check_attend(run, args, tolerance: float, length: int):
    found = jax.block_until_ready(run(*args.attend, args.kv_scale))
    assert not has_races()
    exact = in_float32(args)
    expected = attend(*exact.attend, kv_scale=args.kv_scale, implementation="reference")
    (out, lse), (expected, expected_lse), real = found, expected, slice(0, length)
    assert error(out[:, real], expected[:, real]) < tolerance
    assert error(lse[..., real], expected_lse[..., real]) < tolerance


def check_write(run, args):
    found = run(*args.write, args.kv_scale)
    jax.block_until_ready(found[0])
    assert not has_races()
    expected = write(*args.write, kv_scale=args.kv_scale, implementation="reference")
    assert_stored(found, expected, args.projection)


@pytest.mark.parametrize("shape", CASES, ids=lambda spec: spec.name)
def test_attend(shape):
    run = simulated(tpu.attend, return_lse=True)
    for spec in tables(shape):
        check_attend(run, spec.arguments(), TOLERANCE[spec.dtype], spec.length)


@pytest.mark.parametrize("shape", CASES, ids=lambda spec: spec.name)
def test_write(shape):
    run = simulated(tpu_write.write)
    for spec in written(shape):
        check_write(run, spec.arguments(poison=False))


@pytest.mark.parametrize("shape", CASES, ids=lambda spec: spec.name)
def test_attention_moments(shape):
    run = simulated(tpu.attention_moments)
    for spec in tables(shape):
        args = spec.arguments()
        exact = in_float32(args)
        options = dict(kv_scale=args.kv_scale, implementation="reference")
        _, lse = attend(*exact.attend, **options)
        # of the queries as they are rounded: with that of others, what rounding changes would count
        _, given = attend(*args.attend, **options)
        weights = jnp.where(jnp.arange(spec.tokens) < spec.length, 1.0, 0.0)
        found = jax.block_until_ready(
            run(*args.moments(weights, given, squares=True), args.kv_scale)
        )
        assert not has_races()
        expected = moments(*exact.moments(weights, lse, squares=True), **options)
        for power, (a, b) in enumerate(zip(found, expected, strict=True), 1):
            assert error(a, b) < power * TOLERANCE[spec.dtype], spec.name


@pytest.mark.slow
def test_two_cores():
    """The grid is divided: nothing that one core leaves may be needed by the other."""
    run = simulated(tpu.attend, cores=2, return_lse=True, config=SMALL_TILES)
    check_attend(run, SMALL.arguments(), TOLERANCE["float32"], SMALL.length)
    run = simulated(tpu_write.write, cores=2)
    for case in written(SMALL):
        check_write(run, case.arguments(poison=False))


@pytest.mark.slow
@pytest.mark.parametrize("at_once", often([1], [1, 1024]))
def test_heads_share_blocks(monkeypatch, at_once):
    """A block is read again when what another head stored in it has arrived; in one grid step and
    in several."""
    monkeypatch.setattr(tpu_projection, "TOKENS_AT_ONCE", at_once)
    spec = replace(SMALL, heads=4, block_size=8, tokens=2, length=2)  # in one block of 8
    check_write(simulated(tpu_write.write, cores=2), sharing(spec))


def test_sample():
    """Programs on two cores; the last one has rows that are not there."""
    logits, noise, options = numbers((3, 3, 1000))
    filters = {"top_k": 900, "top_p": 0.96}
    found = simulated(tpu_sample.sample, cores=2, **filters)(logits, noise, **options)
    assert not has_races()
    expected = runs("reference")(logits, noise, **options, **filters)
    np.testing.assert_array_equal(found, expected)


# --- mistakes that the simulator has to see -------------------------------------------------------


def test_a_missing_wait_for_stored_blocks_is_seen(monkeypatch):
    """Without it a block is put together where the last one is still being copied from, and the
    grid step ends with copies under way."""
    monkeypatch.setattr(StoredEntries, "wait_stored", lambda self, buffer: None)
    args = SMALL.arguments(poison=False)
    found, _ = simulated(tpu_write.write, stops=False)(*args.write, args.kv_scale)
    expected, _ = write(*args.write, implementation="reference")
    assert has_races() or not np.array_equal(found, expected)
