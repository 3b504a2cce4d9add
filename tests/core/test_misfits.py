"""What does not belong together is refused while a program is traced, and named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.core.test_alone import Codec, Config, EqualRoom, MostAttended, Transformer
from varjax import core
from varjax.core.errors import UserError

CONFIG = Config()
GEOMETRY = core.Geometry(
    schedule=CONFIG.schedule, num_layers=2, num_heads=2, head_dim=8, rows_per_image=1
)


def trace(policy=None, plan=None, state=None, config=CONFIG, images=2):
    plan = plan or core.plan_cache(GEOMETRY, policy or MostAttended(budget=0.4))
    rngs, cuts = nnx.Rngs(0), core.plan_segments(CONFIG.schedule)
    params = {"transformer": Transformer(config, rngs), "codec": Codec(config, rngs)}
    steps = tuple(core.cache_step(plan, cut.scales, "reference") for cut in cuts)
    spec = core.ScaleSpec(plan, cuts, steps, core.Sampling(greedy=True), "reference")
    tables = spec.for_images(spec.shared_inputs(params["transformer"]), np.arange(images))
    state = plan.empty_state(images, "float32") if state is None else state
    keys = jax.random.split(jax.random.key(0), images)
    told = params, state, jnp.arange(images), keys, core.Inputs(spec, tables)
    return jax.eval_shape(core.decode, *told)


def test_a_cache_of_another_plan_or_batch_is_refused():
    trace()
    for budget, images in ((0.2, 2), (1.0, 2), (0.4, 3)):
        other = core.plan_cache(GEOMETRY, MostAttended(budget=budget))
        with pytest.raises(UserError, match="the plan needs|a cache for 3 images"):
            trace(state=other.empty_state(images, "float32"))


def test_layers_that_the_plan_does_not_have_are_refused():
    with pytest.raises(UserError, match="3 layers with a plan for 2"):
        trace(config=dataclasses.replace(CONFIG, depth=3))


@pytest.mark.parametrize("shape, first", [((4, 2), 0), ((4, 1, 2), 0), ((4, 2, 2), 1)])
def test_capacities_that_cannot_be_are_refused(shape, first):
    class Wrong(EqualRoom):
        def allocate(self, geometry, budget):
            room = np.full(shape, 1)
            room[0] = first
            return core.RegionAllocation(room)

    class Policy(MostAttended):
        rules = (Wrong,)

    with pytest.raises(UserError, match="region_capacity of shape"):
        core.plan_cache(GEOMETRY, Policy(budget=0.4))


def test_scores_that_needs_does_not_name_are_refused():
    # the type checks that tests switch on would come first if a selection were traced
    with pytest.raises(UserError, match="`needs` must name"):
        core.masks._check(None)


def test_rules_say_what_they_lack():
    class Bare(core.Rule):
        kind = core.SCALES

    class Policy(MostAttended):
        rules = (Bare,)

    with pytest.raises(NotImplementedError, match="Bare has no `minimum_budget`"):
        core.plan_cache(GEOMETRY, Policy(budget=0.4))

    class Ruleless(core.Policy):
        name = "ruleless"

    with pytest.raises(UserError, match="it has no `rules`"):
        core.plan_cache(GEOMETRY, Ruleless(budget=0.4))


def test_layers_need_no_biases():
    transformer = Transformer(CONFIG, nnx.Rngs(0))
    with_biases = transformer.attention_vectors()
    assert set(with_biases) == {"q_bias", "v_bias"}
    transformer.blocks = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert transformer.attention_vectors() == {}
