"""What a plan says of itself."""

from html.parser import HTMLParser

import pytest

import varjax
from varjax.model import describe


class Elements(HTMLParser):
    """Counts elements, and fails where they are not closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("model", "policy", "panels"),
    [("demo", "headkv", 5), ("demo-llamagen", "headkv", 5), ("var-d30", "full", 5)],
)
def test_a_plan_fits_a_screen(model, policy, panels):
    plan = varjax.plan(describe(model), policy)
    lines = repr(plan).splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 120
    assert policy in lines[0] and f"budget {plan.budget:g}" in lines[0]
    assert str(plan.num_bytes(1, "bfloat16")) in repr(plan)
    _, layers, heads = plan.capacity.shape
    seen = Elements(plan._repr_html_()).seen
    legend = 5
    assert seen.count("rect") == panels * layers * heads + legend
    assert {"table", "svg", "pre"} <= set(seen)


def test_the_picture_says_what_a_head_holds():
    plan = varjax.plan(describe("demo"), varjax.policies.Streaming(budget=0.25))
    held = int(plan.capacity[-1, 2, 1])
    share = held / plan.geometry.schedule.persistent_tokens
    assert f"<title>layer 2, head 1: {held} tokens, {share:.0%}</title>" in plan.picture()
    assert f"before scale {len(plan.capacity) - 1}<" in plan.picture()


def test_generators_and_models_fit_a_screen():
    model = describe("demo")
    generator = varjax.Generator(model, "swa", 0.25, batch_size=2)
    for shown in (repr(model), repr(generator), repr(generator.policy)):
        assert len(shown.splitlines()) <= 10 and len(shown) < 1000
    assert "batches of 2" in repr(generator) and "not compiled" in repr(generator)
