"""What plans, models and policies say of themselves."""

import pytest

import varjax
from varjax.models.loading import describe


@pytest.mark.parametrize(("model", "policy"), [("demo-llamagen", "headkv"), ("var-d30", "full")])
def test_a_plan_fits_a_screen(model, policy):
    plan = varjax.plan(describe(model), policy)
    lines = repr(plan).splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 120
    assert policy in lines[0] and f"budget {plan.budget:g}" in lines[0]
    assert str(plan.num_bytes(1, "bfloat16")) in repr(plan)


def test_models_and_policies_fit_a_screen():
    model = describe("demo")
    policy = varjax.policies.SlidingWindow(budget=0.25)
    for shown in (repr(model), repr(policy)):
        assert len(shown.splitlines()) <= 10 and len(shown) < 1000
