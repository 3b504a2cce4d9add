"""What devices exchange: nothing where only images are divided, two sums per layer with `model`."""

import json
import os
import subprocess
import sys

import pytest

from tests import models_under_test as models
from tests.generation import collectives


def counted() -> dict[str, dict]:
    found = subprocess.run(
        [sys.executable, "-m", "tests.generation.collectives"],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.slow
def test_what_devices_exchange():
    found = counted()
    assert len(found) == len(collectives.CASES)
    for name, programs in found.items():
        model, mesh = name.split()
        assert programs["pixels"] == {}, name
        if "model" not in mesh:
            assert programs["codes"] == {}, name
            continue
        depth = models.fixture_model(model).config.depth
        # layers of the model that draws by scales are scanned: a body for every segment
        bodies = programs["segments"] or depth
        assert programs["codes"].pop("all-reduce") % (2 * bodies) == 0, name
        # what is modulated, once per image
        assert programs["codes"] == ({"all-gather": 1} if programs["segments"] else {}), name
