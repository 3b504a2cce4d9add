"""The example of docs/compress.md is a working policy."""

import pathlib
import re

import numpy as np
import pytest

from tests import models_under_test as models
from varjax.policies import registry

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setattr(registry, "POLICIES", dict(registry.POLICIES))
    code = re.search(r"```python\n(.*?)```", (DOCS / "compress.md").read_text("utf-8"), re.DOTALL)
    namespace = {"__name__": "example"}
    exec(compile(code[1], "compress.md", "exec", dont_inherit=True), namespace)
    return registry.get_policy("best_attended", 0.3)


def test_it_fits_its_budget_and_changes_little(example):
    model = models.fixture_model("b_k6_sharedaln")
    generator = models.greedy_generator(model, example)
    results, state = generator.run_batch([3, 7], [0, 1])
    assert state.kv_pool.nbytes <= 0.3 * generator.plan.dense_bytes(2, "float32")
    held = (np.asarray(state.position) >= 0).sum(1)
    assert (held == generator.plan.capacity[-1].sum()).all()
    full, _ = models.greedy_generator(model).run_batch([3, 7], [0, 1])
    assert 0.3 < (np.asarray(results["tokens"]) == np.asarray(full["tokens"])).mean() < 1
