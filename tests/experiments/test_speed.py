"""The line about time: the full cache's counts are those of a plan that keeps everything, and what
it says of released models agrees with the lab."""

import pytest

from experiments import speed
from experiments.generation import ProgramOptions
from pallas_kernels.chips import CHIPS
from varjax.generation import api
from varjax.generation.build import Build
from varjax.generation.mesh import MeshSpec
from varjax.models.loading import describe
from varjax.policies import get_policy

TYPES = dict.fromkeys(("dtype", "weights_dtype", "kv_dtype"), "bfloat16")
PROGRAM = ProgramOptions(**TYPES, build=Build(), mesh=MeshSpec())


@pytest.mark.parametrize("name", ["demo", "demo-llamagen"])
def test_a_policy_that_keeps_everything_saves_nothing(name):
    plan = api.plan(model := describe(name), get_policy("full", None, {"block_size": "1"}))
    assert speed.savings(model, plan, PROGRAM, None)(8) == pytest.approx((0, 0, 0))


@pytest.mark.parametrize(
    ("name", "policy", "chip", "silent"),
    [
        ("var-d30", "streaming", "h200", ()),  # heatkv: 495 for 511 ms at batch 64
        ("llamagen-xl-384", "h2o", "h100", (8, 64)),  # at 64 1.37 times as fast
        ("llamagen-b-256", "headkv", None, (8, 64)),  # a CPU: 8.76 for 8.74 s; at 8 4.14 for 4.48
    ],
)
def test_when_a_smaller_cache_does_not_pay(name, policy, chip, silent):
    plan = api.plan(model := describe(name), policy, 1 / 6)
    said = {n: speed.remark(model, plan, PROGRAM, n, CHIPS.get(chip)) for n in (1, 2, 4, 8, 64)}
    assert [n for n in (1, 8, 64) if not said[n]] == list(silent)
    later = "10% from batches of 4 on" if silent else "10% in none"
    assert later in said[1][0] and later in said[2][0] and bool(said[4]) == (not silent)
