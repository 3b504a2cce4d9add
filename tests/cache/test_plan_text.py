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
    ("model", "policy"), [("demo", "headkv"), ("demo-llamagen", "headkv"), ("var-d30", "full")]
)
def test_a_plan_fits_a_screen(model, policy):
    plan = varjax.plan(describe(model), policy)
    lines = repr(plan).splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 120
    assert policy in lines[0] and f"budget {plan.budget:g}" in lines[0]
    assert str(plan.num_bytes(1, "bfloat16")) in repr(plan)
    assert {"table", "pre"} <= set(Elements(plan._repr_html_()).seen)


def test_generators_and_models_fit_a_screen():
    model = describe("demo")
    generator = varjax.Generator(model, "swa", 0.25, batch_size=2)
    for shown in (repr(model), repr(generator), repr(generator.policy)):
        assert len(shown.splitlines()) <= 10 and len(shown) < 1000
    assert "batches of 2" in repr(generator) and "not compiled" in repr(generator)
