"""What the Python API refuses, and the calibration it takes by itself."""

import dataclasses
import sys

import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from varjax import policies
from varjax.calibration import files as calibrations
from varjax.core.errors import UserError


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
        *(({"seed": s}, "^seed=.*choose 0 to 2147483647") for s in (-1, 2**31)),
        ({"seed": 1.0}, "^seed=.*must be a whole number"),
        *(({"labels": x}, r"^labels\[0\]=") for x in ([1.7], [True], [[1]])),
        *(({"labels": x}, "^labels=.*list of class") for x in (np.array([True]), np.ones((1, 2)))),
        ({"labels": range(10**12)}, "^labels holds 1000000000000 numbers: at most"),
        ({"labels": [2**70]}, "outside the model's 44 classes"),
        ({"labels": []}, "no labels given"),
        ({"model": 3}, "^model=3: give a model"),
        ({"policy": policies.HeadKV}, "give a policy"),
        ({"budget": float("nan")}, "budget=nan is outside"),
        ({"policy": "headkv", "budget": True}, "must be a number"),
        ({"policy": policies.HeadKV(), "budget": 0.5}, "budget to the policy itself"),
        ({"progress": 3}, r"progress=3: give True, False, or a function"),
        ({"sampling": "x"}, "^sampling='x': give Sampling"),
        ({"sampling": varjax.Sampling(cfg=float("nan"))}, "^cfg=nan"),
        ({"calibration": 5, "policy": "hack"}, "^calibration=5: give a path"),
        ({"kv_dtype": 7}, "unknown kv_dtype 7"),
        ({"decode_dtype": None}, "unknown decode_dtype None"),
        ({"as_pil": "yes"}, "^as_pil='yes'"),
        ({"batch_size": 0}, "^batch_size=0: choose 1 to 1000000"),
    ],
)
def test_nonsense_is_refused(demo, monkeypatch, arguments, message):
    monkeypatch.setattr(varjax.Generator, "compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(UserError, match=message):
        varjax.generate(**{"model": demo, "labels": [1], "policy": "swa"} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": "data=2"}, "^mesh='data=2': give a MeshSpec"),
        ({"segments": 1.5}, "^segments=1.5 is not valid"),
        ({"decode_batch": 0}, "^decode_batch=0: choose 1"),
        ({"decode_dtype": "tf32"}, "^decode_dtype=tf32: a CPU has no TF32.*choose auto"),
        ({"attention": "tpu"}, "tpu needs a TPU"),
        ({"matmul_precision": 3}, "unknown matmul_precision 3"),
        ({"keep_logits": "no"}, "^keep_logits='no': it must be true or false"),
        ({"calibration": "x" * 10**6, "policy": "hack"}, r"^calibration=.{,100} bytes$"),
        ({"plan": 3}, "^plan=3: give a plan"),
    ],
)
def test_nonsense_for_a_generator_is_refused(demo, arguments, message):
    with pytest.raises(UserError, match=message):
        models.built(demo, **arguments)


def test_pictures_of_pillow(demo, monkeypatch):
    """Rounded to bytes; without pillow it is said before anything is compiled."""
    image = np.linspace(0, 1, 12, dtype=np.float32).reshape(1, 2, 2, 3)
    drawn = [(np.arange(1), {"images": image})]
    monkeypatch.setattr(varjax.Generator, "compile", lambda *_: None)
    monkeypatch.setattr(varjax.Generator, "batches", lambda *_, **__: drawn)
    [picture] = varjax.generate(demo, [1], as_pil=True)
    assert picture.mode == "RGB" and picture.size == (2, 2)
    np.testing.assert_array_equal(picture, np.round(255 * image[0]))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setattr(varjax.Generator, "compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(UserError, match="pictures needs the package PIL.*pip install"):
        varjax.generate(demo, [1], as_pil=True)


def test_names():
    """They are those that `describe` and `generate` take."""
    assert {"demo", "demo-llamagen", "var-d16"} <= set(varjax.models.names())
    assert varjax.policies.names() == list(policies.POLICIES)
    assert varjax.describe(varjax.models.names()[2]).is_abstract


def test_a_plan_of_another_model_is_refused(demo):
    other = dataclasses.replace(demo.geometry, num_heads=2)
    with pytest.raises(UserError, match="the plan is for another model: its num_heads is 2"):
        varjax.Generator(demo, plan=varjax.plan(other))
    with pytest.raises(UserError, match="2 rows per image"):
        varjax.Generator(demo, plan=varjax.plan(demo), sampling=demo.sampling(cfg=0.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: varjax.load(3), "^model=3: give a path"),
        (lambda: varjax.load(dtype=3), "unknown dtype 3"),
        (lambda: varjax.load(on_disk="no"), "^on_disk='no'"),
        *(
            (lambda wrong=wrong: varjax.describe("infinity-2b", aspect=wrong), "^aspect .* is not")
            for wrong in ("x", True, b"1", np.ones(1), 10**400)
        ),
        (lambda: varjax.load("\ud800"), "^model="),
        (lambda: varjax.describe("x" * 10**6), "^model=.*less than 4096 bytes"),
        (lambda: varjax.plan(3), "^model=3: give a model"),
        (lambda: varjax.describe().sampling(cgf=2.0), "unknown setting 'cgf'.*did you mean 'cfg'"),
        (lambda: varjax.plan(varjax.describe()).num_bytes(1, None), "unknown dtype None"),
        (lambda: varjax.plan(varjax.describe()).num_bytes(-1, "int8"), "^batch_size=-1"),
    ],
)
def test_nonsense_elsewhere_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_progress(demo, monkeypatch, capfd):
    """Silent unless asked; a function gets the images that are done and all of them."""

    def batches(self, condition, **options):
        for first in range(0, len(condition), self.batch_size):
            index = np.arange(first, min(first + self.batch_size, len(condition)))
            yield index, {"images": np.zeros((len(index), 2, 2, 3), np.float32)}

    monkeypatch.setattr(varjax.Generator, "batches", batches)
    monkeypatch.setattr(varjax.Generator, "compile", lambda *_: None)
    seen = []
    assert len(varjax.generate(demo, range(5), batch_size=2)) == 5
    assert capfd.readouterr() == ("", "")
    varjax.generate(demo, range(5), batch_size=2, progress=lambda *given: seen.append(given))
    assert seen == [(0, 5), (2, 5), (4, 5), (5, 5)]
    varjax.Generator(demo, batch_size=4)(range(5), progress=True)
    out, err = capfd.readouterr()
    assert not out and [line.split()[1] for line in err.splitlines()] == ["0/5", "4/5", "5/5"]
