"""Which tokens heads hold: read from what a program returns, against the final cache."""

import numpy as np
import pytest

from tests import models_under_test as models
from tests.often import often
from varjax.core.errors import UserError
from varjax.generation.generator import Generator
from varjax.generation.mesh import MeshSpec

LABELS = [1, 2]


def drawn(model, policy, **options):
    generator = models.built(model, policy, 0.6, batch_size=2, **options)
    arrays, index = models.arrays_of(model, LABELS), np.arange(2, dtype=np.int32)
    return generator, *generator.run_batch(arrays, index, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["headkv", "h2o"])
def test_what_a_policy_decided_by_scales(policy):
    """Where the last scale has a segment of its own, the final cache still says what it read."""
    model = models.fixture_model("c_k5_nol2norm")
    scales = model.config.schedule.num_scales
    generator, results, state = drawn(model, policy, segments=scales, keep_contents=True)
    plan, g = generator.plan, generator.plan.geometry
    whole = np.asarray(state.position)
    for row in range(2 * len(LABELS)):
        found = plan.at_the_end(results["contents"], row)
        expected = np.zeros_like(found)
        for layer, head in np.ndindex(g.num_layers, g.num_heads):
            region = head if state.regions is None else int(state.regions[layer, row, head])
            entries = (a[scales - 1, layer, region] for a in (plan.ids, plan.start, plan.stop))
            for block, start, stop in zip(*entries, strict=True):
                for slot in range(block * plan.block_size + start, block * plan.block_size + stop):
                    if whole[row, slot] >= 0:
                        expected[layer, head, whole[row, slot]] = True
        np.testing.assert_array_equal(found, expected)
        assert found.any() and not found.all()
        assert (found.sum(-1) <= plan.capacity[-1].max()).all()
    # however the loop over scales is cut, and without changing what is drawn
    _, other, _ = drawn(model, policy, segments=1, keep_contents=True)
    np.testing.assert_array_equal(
        plan.at_the_end(other["contents"]), plan.at_the_end(results["contents"])
    )
    _, plain, _ = drawn(model, policy, segments=1)
    np.testing.assert_array_equal(plain["tokens"], other["tokens"])
    assert "contents" not in plain


def test_contents_known_beforehand_need_no_program():
    model = models.fixture_model("c_k5_nol2norm")
    plan = Generator(model, "streaming", 0.6, batch_size=1).plan
    found = plan.at_the_end(None)
    np.testing.assert_array_equal(found.sum(-1), plan.capacity[-1])
    assert Generator(model, "full", batch_size=1).plan.at_the_end(None).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", often(("h2o",), ("streaming", "h2o")))
def test_token_by_token(policy):
    """The final cache says it: as many tokens as heads have slots for, the newest among them."""
    model = models.fixture_model("llamagen_c2i")
    generator, _, state = drawn(model, policy)
    plan = generator.plan
    found = plan.at_the_end(state, row=1)
    assert found.shape[-1] == plan.sequence.steps and found[..., -1].all()
    most = plan.allocation.slots[:, None]
    assert (found.sum(-1) <= most).all() and (found.sum(-1) >= most - plan.allocation.period).all()
    if policy == "h2o":
        held = np.asarray(state[0].position)[1]
        condition = plan.sequence.condition
        for head, kept in enumerate(found[0]):
            tokens = held[head][held[head] >= condition] - condition
            assert set(np.flatnonzero(kept)) == {t for t in tokens if t < plan.sequence.steps}


def test_one_device():
    model = models.fixture_model("c_k5_nol2norm")
    with pytest.raises(UserError, match="one device"):
        models.built(model, "full", batch_size=2, keep_contents=True, mesh=MeshSpec(data=2))
