"""AMS-KV on the device against the host."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies.amskv_cases import DEMO, calibration
from varjax.core.allocation import Geometry
from varjax.core.observation import Observation
from varjax.policies.amskv import AMSKV


class Device:
    """One layer's cache driven through `update_state` and `select`, as the engine does: slots in
    any order, own tokens padded; as many for all scales."""

    def __init__(self, policy: AMSKV, geometry: Geometry, rows: int, found=None):
        self.schedule, self.rows = geometry.schedule, rows
        self.policy = policy.rule("scales").prepare(geometry, found)
        self.rule = self.policy.rule("scales")
        self.allocation = self.rule.allocate(geometry, self.policy.budget)
        self.inputs = self.rule.inputs(geometry, self.allocation, np.arange(rows // 2))
        self.state = self.rule.init_state(geometry, rows)
        self.held = [np.zeros(0, int)] * rows

    def step(self, s: int, similarity: np.ndarray) -> list[np.ndarray]:
        """Sorted positions that every row holds after scale s; two heads must agree."""
        own = np.arange(self.schedule.starts[s], self.schedule.ends[s])
        slots, most = self.schedule.persistent_tokens + 3, max(self.schedule.tokens)
        position = np.zeros((self.rows, 2, slots + most + 2), np.int32)
        live = np.zeros(position.shape, bool)
        for row, held in enumerate(self.held):
            mixed = np.random.default_rng(s).permutation(held)
            position[row, :, : held.size], live[row, :, : held.size] = mixed, True
        position[:, :, slots : slots + own.size] = own
        live[:, :, slots : slots + own.size] = True
        following = self.allocation.region_capacity[s + 1, 0, :2]
        obs = Observation(
            scale=jnp.int32(s),
            live=jnp.asarray(live),
            own=jnp.asarray(np.arange(live.shape[-1]) >= slots),
            position=jnp.asarray(position),
            capacity=jnp.asarray(np.broadcast_to(following, (self.rows, 2))),
            regions=jnp.zeros((self.rows, 2), jnp.int32),
            inputs=jnp.asarray(self.inputs[s, 0]),
            state=self.state,
            key_similarity=jnp.asarray(similarity, jnp.float32),
        )
        obs = dataclasses.replace(obs, state=self.rule.update_state(obs))
        self.state, keep = obs.state, np.asarray(self.rule.select(obs))
        assert not (keep & ~live).any() and (keep.sum(-1) <= following).all()
        assert (keep[:, 0] == keep[:, 1]).all()
        self.held = [np.sort(p[k]) for p, k in zip(position[:, 0], keep[:, 0], strict=True)]
        return self.held


ONLINE = {
    "given": {"cmin": 20, "cmax": 50},
    "narrow, no condensed": {"cmin": 7, "cmax": 12, "condensed": 0},
    "filled": {"cmin": 20, "cmax": 30, "oversize": "fill"},
    "budget": {"budget": 0.4},
}


@pytest.mark.parametrize("name", ONLINE)
def test_device_equals_host(name):
    """Rows turn demanding at different scales; each follows Algorithm 1 on its own."""
    policy = AMSKV(mode="online", theta=-1.0, **ONLINE[name])
    tokens, last = DEMO.schedule.tokens, DEMO.schedule.num_scales - 1
    below = np.random.default_rng(3).random((8, last + 1)) < 0.3
    below[0], below[1, :], below[:, 0] = False, True, False
    device = Device(policy, DEMO, rows=8)
    sizes = device.policy.sizes(DEMO, device.policy.budget)
    expected = [sizes.contents(tokens, row)[0] for row in below]
    for s in range(last):
        held = device.step(s, np.where(below[:, s], -1.5, -0.5))
        for row in range(8):
            np.testing.assert_array_equal(held[row], np.flatnonzero(expected[row][s]))


def test_an_assumed_threshold_is_said():
    """The policy cannot know the norm of the model's keys."""

    def said(found=None, **arguments):
        policy = AMSKV(mode="online", **arguments).rule("scales").prepare(DEMO, found)
        policy = policy.rule("scales").prepare(DEMO, found)
        return [line for line in policy.rule("scales").plan_lines(DEMO) if "keys of norm 1" in line]

    (line,) = said()
    assert line.startswith("theta     -1 is assumed") and "calibrate it or give theta=" in line
    assert not said(theta=-1.0) and not said(calibration(DEMO))


def test_threshold_from_a_calibration():
    found = calibration(DEMO)
    theta = AMSKV(mode="online", demanding=3).rule("scales").prepare(DEMO, found).theta
    assert (-found.key_discrepancy[:, 1:].mean(1) < theta).sum() == 3
    assert AMSKV(mode="online").rule("scales").prepare(DEMO, None).theta == -1
