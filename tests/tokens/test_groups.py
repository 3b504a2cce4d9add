"""Query heads that share keys and values: what every policy has to keep, and types of heads.
Oracles of all policies are in `test_policies` and `test_diagonal`, for groups as well."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.often import often
from tests.tokens import stand_in
from tests.tokens.test_policies import CLOSE, EVERY, ROWS
from varjax import policies
from varjax.core import masks
from varjax.core.observation import Observation
from varjax.policies import get_policy


@pytest.mark.slow
@pytest.mark.parametrize("name", often(("headkv", "diagonal"), EVERY))
def test_copies_of_a_query_head_change_nothing(name):
    """A group whose query heads are alike attends and decides as one of them alone, whatever the
    policy does with groups."""
    policy = get_policy(name, 0.4)
    one, four = (stand_in.plan_for(policy, group=group) for group in (1, 4))
    model = stand_in.StandIn.random(one.geometry, ROWS)
    copies = replace(model, q=np.repeat(model.q, 4, axis=2))
    (expected, before), (found, state) = stand_in.run(model, one), stand_in.run(copies, four)
    np.testing.assert_allclose(found, np.repeat(expected, 4, axis=3), atol=CLOSE)
    for ours, theirs in zip(state, before, strict=True):
        np.testing.assert_array_equal(ours.position, theirs.position)
        assert ours.pool.shape == theirs.pool.shape, "memory counts heads of keys"
    assert four.num_bytes(1, "float32") == one.num_bytes(1, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("most", [1024, 2])
@pytest.mark.parametrize("shared", [2, 4])
def test_the_neediest_query_head_counts(shared, most, monkeypatch):
    """A head whose group has a global query head is what it is with copies of that one."""
    monkeypatch.setattr(masks, "MOST_COMPARED", most)
    rng, shape = np.random.default_rng(0), (3, 5, shared, 6)
    mass = rng.dirichlet(np.full(6, 0.3), shape[:-1]).astype(np.float32)
    heads = jnp.zeros(shape[:2], jnp.int32)
    position = rng.permuted(np.broadcast_to(np.arange(6, dtype=np.int32), (3, 5, 6)), axis=-1)
    obs = Observation(jnp.int32(0), jnp.asarray(position > 0), jnp.asarray(position), heads, heads)

    def local(mass, **arguments):
        policy = policies.HeadKV(window=3, threshold=0.8, **arguments)
        name = "group_mass" if mass.ndim == 4 else "newest_mass"
        seen = replace(obs, **{name: jnp.asarray(mass)})
        return np.asarray(policy.rule("tokens").regroup(seen))

    each = np.stack([local(mass[:, :, i]) for i in range(shared)])
    assert (each.min(0) != each.max(0)).any()
    np.testing.assert_array_equal(local(mass), each.min(0))  # 0: global
    assert (local(mass, global_heads=2).sum(-1) == 3).all()
