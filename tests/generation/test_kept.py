"""Which tokens heads keep: read from what a program returns, against plans, caches, and a run that
is told to keep exactly these."""

import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.often import often
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.generation import kept
from varjax.generation.generator import Generator
from varjax.generation.mesh import MeshSpec
from varjax.policies import get_policy

LABELS = [1, 2]


def drawn(model, policy, budget=0.6, **options):
    options = {"segments": 1} | options if model.geometry.kind == "scales" else options
    generator = models.built(model, policy, budget, batch_size=2, **options)
    arrays, index = models.arrays_of(model, LABELS), np.arange(2, dtype=np.int32)
    return generator, *generator.run_batch(arrays, index, seed=3)


def table(tmp_path, keep):
    """The policy that keeps exactly this: [K, L, (rows,) N, T]."""
    np.savez(tmp_path / "keep.npz", keep_token=keep)
    return get_policy("table", None, {"path": str(tmp_path / "keep.npz"), "accounting": "tokens"})


@pytest.mark.parametrize(
    ("name", "policy"),
    often(
        (("c_k5_nol2norm", "headkv"), ("llamagen_c2i", "h2o")),
        [
            *(("c_k5_nol2norm", policy) for policy in ("headkv", "h2o", "snapkv")),
            # of headkv's local heads each token sees others, whatever is stored
            *(("llamagen_c2i", policy) for policy in ("h2o", "rkv")),
        ],
    ),
)
def test_a_run_that_keeps_just_these_tokens_draws_the_same(name, policy, tmp_path):
    """And heads hold as many as is planned, and nothing comes back."""
    model = models.fixture_model(name)
    generator, results, state = drawn(model, policy, 0.5, keep_contents=True)
    plan = generator.plan
    condition = getattr(plan.geometry.schedule, "condition", 0)
    rows = [kept.of_image(plan, results["contents"], row) for row in range(2 * len(LABELS))]
    keep = np.stack(rows, 2)
    # heads may change places in their layer; the first entry finds no condition yet
    held, room = np.sort(keep.sum(-1)[1:]), np.sort(plan.capacity)[1:, :, None] - condition
    assert (held == room).all() and not keep[0].any() and not keep[-1].all()
    first = np.array(kept.layout(plan)["drawn"])[:, None] > np.arange(keep.shape[-1])
    back = keep[1:] & ~keep[:-1] & first[:-1, None, None, None]
    assert not back.any() and not (keep & ~first[:, None, None, None]).any()
    again, replayed, _ = drawn(model, table(tmp_path, keep), None)
    np.testing.assert_array_equal(replayed["tokens"], results["tokens"])
    assert again.plan.policy.name == "table"
    mine = generator.kept(LABELS, seed=3)
    np.testing.assert_array_equal(mine, np.stack(rows[:2]))


@pytest.mark.parametrize("name", ["c_k5_nol2norm", "llamagen_c2i"])
def test_contents_known_beforehand_need_no_program(name, tmp_path):
    model = models.fixture_model(name)
    generator = Generator(model, "streaming", 0.6, batch_size=1)
    plan, (keep, same) = generator.plan, generator.kept(LABELS)
    np.testing.assert_array_equal(keep, same)
    assert generator.program is None
    condition = getattr(plan.geometry.schedule, "condition", 0)
    np.testing.assert_array_equal(keep.sum(-1)[1:] + condition, plan.capacity[1:])
    if not condition:
        found = plan_cache(plan.geometry, table(tmp_path, keep)).allocation
        np.testing.assert_array_equal(found.last_use, plan.allocation.last_use)
    assert kept.at_the_end(Generator(model, "full", batch_size=1).plan, None).all()
    end = kept.at_the_end(plan, None)
    assert (end.sum(-1) + condition == plan.capacity[-1]).all() and end[..., -1].all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["headkv", "h2o"])
def test_the_final_cache_by_scales(policy):
    """Where the last scale has a segment of its own, the final cache still says what it read."""
    model = models.fixture_model("c_k5_nol2norm")
    scales = model.config.schedule.num_scales
    generator, results, state = drawn(model, policy, segments=scales, keep_contents=True)
    plan, g = generator.plan, generator.plan.geometry
    whole = np.asarray(state.position)
    for row in range(2 * len(LABELS)):
        found = kept.at_the_end(plan, results["contents"], row)
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
    # however the loop over scales is cut, and without changing what is drawn
    _, other, _ = drawn(model, policy, keep_contents=True)
    ends = (kept.at_the_end(plan, r["contents"]) for r in (other, results))
    np.testing.assert_array_equal(*ends)
    _, plain, _ = drawn(model, policy)
    np.testing.assert_array_equal(plain["tokens"], other["tokens"])
    assert "contents" not in plain


@pytest.mark.slow
def test_the_final_cache_token_by_token():
    """It names the tokens of every head."""
    model = models.fixture_model("llamagen_c2i")
    generator, results, state = drawn(model, "h2o", keep_contents=True)
    plan = generator.plan
    found = kept.at_the_end(plan, results["contents"], row=1)
    assert found.shape[-1] == plan.sequence.steps and found[..., -1].all()
    for layer, cache in enumerate(state):
        held = np.asarray(cache.position)[1] - plan.sequence.condition
        for head, mine in enumerate(found[layer]):
            tokens = held[head][(held[head] >= 0) & (held[head] < plan.sequence.steps)]
            assert set(np.flatnonzero(mine)) == set(tokens)


def test_the_picture(unchecked):
    """A token that all later scales see shows the image, one that none sees nearly the colour of
    what is dropped; the last map is not shown."""
    model = models.fixture_model("c_k5_nol2norm")
    plan = Generator(model, "full", batch_size=1).plan
    g, count = plan.geometry, len(plan.capacity)
    keep = np.zeros((count, g.num_layers, g.num_heads, g.schedule.total_tokens), bool)
    keep[1:, 1, 1, 0] = True  # the single token of the first map
    image = np.full((16, 16, 3), 255, np.uint8)
    found = varjax.kept_picture(plan, keep, image, layers=[1])
    white = (found[kept.LINE + 8] == 255).all(-1)
    shown = np.flatnonzero(white[kept.MARGIN :])
    strip = (found.shape[1] - kept.MARGIN) // g.num_heads
    assert (shown // strip == 1).all() and shown.size == shown.max() - shown.min() + 1
    for wrong, words in (({"keep": keep[0]}, "one image"), ({"layers": [9]}, "no layer 9")):
        with pytest.raises(UserError, match=words):
            varjax.kept_picture(**({"plan": plan, "keep": keep, "image": image} | wrong))
    with pytest.raises(UserError, match="one picture"):
        varjax.kept_picture(plan, keep, image[0])


def test_one_device():
    model = models.fixture_model("c_k5_nol2norm")
    with pytest.raises(UserError, match="one device"):
        models.built(model, "full", batch_size=2, keep_contents=True, mesh=MeshSpec(data=2))
