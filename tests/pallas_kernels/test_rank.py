"""Ranks: the reference against counting one by one, the kernel against the reference, number for
number."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import implementations
from pallas_kernels.rank import rank, reference, tpu
from tests.pallas_kernels.tpu_simulation import has_races, simulated

# rows, heads, slots: more slots than a step has of its own, no multiple of 8, one; more rows than
# lanes, and than a grid step has
CASES = [((2, 3, 95), "float", True), ((130, 1, 8), "none", False), ((1, 2, 1), "integer", True)]
CASES += [pytest.param((515, 1, 13), "integer", False, marks=pytest.mark.slow)]
SCORES = ["none", "float", "integer"]
SPECIAL = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0])


def arguments(shape, score: str, part: bool, seed: int = 0):
    """Few different scores, so that ties decide; what is outside has any score, NaN included."""
    random = np.random.default_rng(seed)
    tie = random.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1).astype(np.int32)
    scores = random.integers(-3, 4, shape)
    given = {"none": None, "integer": np.int32(scores)}
    special = random.choice(SPECIAL, shape)
    given["float"] = np.where(random.random(shape) < 0.3, special, np.float32(scores))
    among, parts = random.random((2, *shape)) < 0.6
    found = given[score], tie, among, parts if part else None
    return jax.tree.map(jnp.asarray, found)


def counted(score, tie, among, part):
    """Token by token."""
    score, tie, among, part = jax.tree.map(np.asarray, (score, tie, among, part))
    found = np.zeros(tie.shape, np.int32)
    score = np.zeros(tie.shape) if score is None else score
    part = np.ones(tie.shape, bool) if part is None else part
    for *head, own, other in np.ndindex(*tie.shape, tie.shape[-1]):
        i, j = (*head, own), (*head, other)
        first = score[j] < score[i] or (score[j] == score[i] and tie[j] < tie[i])
        found[i] += bool(among[j] and part[j] == part[i] and first)
    return found


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_the_reference_counts(score, part):
    given = arguments((2, 2, 23), score, part)
    np.testing.assert_array_equal(rank(*given, implementation="reference"), counted(*given))


@pytest.mark.parametrize("slots", [23, 2**15])
def test_short_numbers_on_gpus(slots, monkeypatch):
    """Where a head has few slots. None of it is seen from outside."""
    monkeypatch.setattr(reference.target, "platform", lambda: "gpu")
    shape = 1, 1, slots
    given = [jax.ShapeDtypeStruct(shape, t) for t in (jnp.int32, bool)]
    run = partial(rank, None, implementation="reference")
    assert ("i16[" in str(jax.make_jaxpr(run)(*given))) == (slots == 23)
    assert jax.eval_shape(run, *given).dtype == jnp.int32
    if slots == 23:
        given = arguments(shape, "float", True)
        np.testing.assert_array_equal(rank(*given, implementation="reference"), counted(*given))


@pytest.mark.parametrize(("shape", "score", "part"), CASES)
def test_the_kernel_counts_the_same(shape, score, part):
    given = arguments(shape, score, part)
    expected = rank(*given, implementation="reference")
    found = rank(*given, implementation="tpu-interpret")
    assert found.dtype == expected.dtype == jnp.int32
    np.testing.assert_array_equal(found, expected)


def test_in_the_simulator():
    """Fresh memory is NaN there, and rows beyond the last one are."""
    given = arguments((130, 1, 20), "float", True)
    found = jax.jit(simulated(tpu.rank, cores=2))(*given)
    assert not has_races()
    np.testing.assert_array_equal(found, rank(*given, implementation="reference"))


def test_what_the_kernel_cannot_take():
    given = arguments((1, 1, tpu.MOST + 1), "none", False)
    with pytest.raises(NotImplementedError, match="up to 1536 slots, not 1537"):
        rank(*given, implementation="tpu-interpret")
    with pytest.raises(NotImplementedError, match="does not exist"):
        rank(*given, implementation="cuda")
    assert implementations.first_choice("mosaic", {"reference": None, "tpu": None}) == "reference"
