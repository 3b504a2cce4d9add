"""Training on several devices gives the losses of one, and goes on with another number of them."""

import os
import subprocess
import sys

import pytest

from experiments.training import session
from experiments.training.mesh import TrainingMesh
from varjax.core.errors import UserError


@pytest.mark.slow
def test_losses_of_one_device(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    found = subprocess.run(
        [sys.executable, "-m", "tests.experiments.training.sharded", str(tmp_path)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.count("same losses") == 3


def test_meshes():
    assert TrainingMesh.parse("data=2,fsdp=-1", 8) == TrainingMesh(2, 4)
    assert TrainingMesh.parse(None, 8) == TrainingMesh()
    for text, message in (
        ("model=2", "choose data .* or fsdp"),
        ("data=16", "this machine has 8"),
        ("fsdp=0", "is no number of devices"),
    ):
        with pytest.raises(UserError, match=message):
            TrainingMesh.parse(text, 8)


def test_batches_that_cannot_be_divided_are_refused(tiny, tmp_path):
    with pytest.raises(UserError, match="var_batch_size=6 cannot be split evenly"):
        session.train(tiny(var_batch_size=6), "both", tmp_path / "out", mesh=TrainingMesh(data=4))
    assert not (tmp_path / "out").exists()
