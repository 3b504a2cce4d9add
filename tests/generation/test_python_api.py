"""What the Python API refuses, and the calibration it takes by itself."""

import dataclasses

import numpy as np
import pytest

import varjax
from varjax import policies
from varjax.calibration import files as calibrations
from varjax.errors import UserError


@pytest.fixture(scope="module")
def demo():
    return varjax.load()


def test_the_folder_serves_its_calibration(demo):
    plan = varjax.plan(demo, policy="heatkv", budget=0.2)
    assert plan.num_bytes(1, "float32") <= 0.2 * plan.dense_bytes(1, "float32")
    with pytest.raises(UserError, match="needs measurements"):
        varjax.plan(demo.geometry, policy="heatkv", budget=0.2)


def test_a_calibration_of_other_weights_is_refused(demo):
    own = calibrations.load(calibrations.beside(demo.directory), demo.geometry)
    other = dataclasses.replace(own, model_digest="0" * 64)
    for use in (varjax.plan, lambda *a, **k: varjax.generate(a[0], [1], **k)):
        with pytest.raises(UserError, match="other weights"):
            use(demo, policy="heatkv", calibration=other)
    with pytest.raises(UserError, match="guidance"):
        varjax.generate(demo, [1], policy="heatkv", sampling=demo.sampling(cfg=4.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": None}, "give a policy or a name"),
        ({"policy": "headkv", "budget": "0.1"}, "not a number"),
        ({"policy": "headkv", "budget": True}, "not a number"),
        ({"policy": policies.HeadKV(), "budget": 0.5}, "budget to the policy itself"),
        ({"policy": "headkv", "kv_dtype": "int3"}, "kv_dtype"),
        ({"progress": 3}, r"progress=3: give True, False, or a function"),
    ],
)
def test_refused(demo, arguments, message):
    with pytest.raises(UserError, match=message):
        varjax.generate(demo, [1, 2], **arguments)


def test_progress(demo, monkeypatch, capfd):
    """Silent unless asked; a function gets the images that are done and all of them."""

    def run_images(self, condition, index, **options):
        return {"images": np.zeros((len(index), 2, 2, 3), np.float32)}, None

    monkeypatch.setattr(varjax.Generator, "run_images", run_images)
    seen = []
    assert len(varjax.generate(demo, range(5), batch_size=2)) == 5
    assert capfd.readouterr() == ("", "")
    varjax.generate(demo, range(5), batch_size=2, progress=lambda *given: seen.append(given))
    assert seen == [(0, 5), (2, 5), (4, 5), (5, 5)]
    varjax.Generator(demo, batch_size=4)(range(5), progress=True)
    out, err = capfd.readouterr()
    assert not out and [line.split()[1] for line in err.splitlines()] == ["0/5", "4/5", "5/5"]
