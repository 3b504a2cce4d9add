"""Batches behind one another: the device draws while the host fetches and writes."""

from dataclasses import replace

import numpy as np

from tests import models_under_test as models
from varjax import policies


def test_next_batch_is_started_before_one_is_handed_out():
    """Five images in batches of two: the same pictures as one by one, and times of three batches.
    No cache is made before the last batch is done, so that there are never two."""
    model = models.fixture_model("c_k5_nol2norm")
    generator = models.built(model, policies.HeadKV(budget=0.3), batch_size=2, segments=1)
    condition = models.condition(model, np.array([3, 7, 1, 9, 0], np.int32))
    generator.compile()
    program, done = generator.program, []

    def empty_state():
        assert all(pictures.is_ready() for pictures in pending)
        return program.empty_state()

    def pixels(*given):
        done.append("started")
        pending.append(program.pixels(*given))
        return pending[-1]

    pending = []
    generator.program = replace(program, empty_state=empty_state, pixels=pixels)
    found = []
    for index, results in generator.batches(condition, seed=5):
        done.append("handed out")
        found.append(results["images"])
        assert len(index) == len(results["images"])
    assert done == ["started", *["started", "handed out"] * 2, "handed out"]
    assert len(generator.timing.runs) == 3 and min(generator.timing.runs) > 0
    found = np.concatenate(found)
    assert len(found) == 5
    for i in (0, 3, 4):
        alone = generator.draw(condition, np.array([i]), seed=5)["images"]
        np.testing.assert_allclose(found[i : i + 1], alone, atol=1e-5)
