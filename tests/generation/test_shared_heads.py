"""A model whose query heads share keys and values (a small Lumina-mGPT), through the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.test_prompt_models import LUMINA, prompt
from tests.often import often
from tests.tokens.test_policies import EVERY
from varjax.cache.allocation import Geometry
from varjax.cache.planner import plan_cache
from varjax.engine.tokens import TokenSpec, generate_tokens
from varjax.models.lumina.transformer import Lumina
from varjax.policies import get_policy
from varjax.sampling import Sampling

GREEDY = Sampling(cfg=2.0, greedy=True)
PROMPTS = [[1, 2, 30, 34, 33], [1, 2, 3, 5, 30, 34, 33]]


@functools.cache
def model() -> Lumina:
    """Two heads of keys and values, each of two query heads. Weights are larger than at the
    beginning of training, so that it matters who attends to what."""
    made = Lumina(LUMINA, rngs=nnx.Rngs(0))
    return jax.tree.map(lambda a: 6 * a if a.ndim > 2 else a, made)


def geometry(config=LUMINA) -> Geometry:
    return Geometry(
        schedule=model().sequence(),
        num_layers=config.depth,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        queries_per_head=config.queries_per_head,
    )


def draw(plan, rows=PROMPTS, attention="reference"):
    """Tokens [B, N] and guided logits [B, N, V], new lines included, and the final caches."""
    spec = TokenSpec.of(plan, GREEDY, LUMINA, attention, keep_logits=True)
    keys = jax.random.split(jax.random.key(0), len(rows))
    inputs = () if plan.static_content else plan.policy_inputs(np.arange(len(rows))) or ()

    @jax.jit
    def program(transformer, state):
        networks = {"transformer": transformer}
        condition = prompt(rows, LUMINA.prompt_tokens)
        return generate_tokens(networks, state, condition, keys, None, inputs, spec=spec)

    results, state = program(model(), plan.empty_state(len(rows), "float32"))
    return np.asarray(results["tokens"]), np.asarray(results["logits"]), state


def test_the_full_cache_is_teacher_forcing():
    tokens, logits, state = draw(plan_cache(geometry(), get_policy("full")))
    assert state[0].pool.shape[1] == 2 < LUMINA.num_attention_heads
    context = model().encode_condition(prompt(PROMPTS, LUMINA.prompt_tokens), guided=True)
    plain = model().teacher_forced(context, jnp.asarray(tokens[:, :-1]))
    cond, uncond = np.split(np.asarray(plain), 2)
    drawn = model().sequence().places
    expected = (uncond + GREEDY.cfg * (cond - uncond))[:, drawn]
    np.testing.assert_allclose(logits[:, drawn], expected, atol=1e-4)
    assert len(np.unique(tokens)) > 3, "all tokens are alike: the test says little"


@pytest.mark.parametrize("name", often(("headkv", "rkv"), EVERY))
def test_every_policy(name):
    """It draws, the pool has heads of keys only, and an image does not depend on the others."""
    plan = plan_cache(geometry(), get_policy(name, 0.75))
    tokens, logits, state = draw(plan)
    assert np.isfinite(logits).all()
    held = sum(layer.pool.nbytes for layer in state)
    assert held == plan.num_bytes(len(PROMPTS), "float32") <= 0.75 * plan.dense_bytes(2, "float32")
    alone, own, _ = draw(plan, PROMPTS[1:])
    np.testing.assert_array_equal(alone[0], tokens[1])
    np.testing.assert_allclose(own[0], logits[1], atol=1e-4)
