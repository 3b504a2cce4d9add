"""Programs of the page: few wait, those that nobody waits for are not compiled."""

import threading

import pytest

from tests.serve.server import batcher_of, small_drawer
from varjax.errors import UserError

pytest.importorskip("fastapi", reason="needs the extra serve")

from experiments.serve import studio as studio_lib  # noqa: E402
from experiments.serve.api import Service  # noqa: E402
from experiments.serve.studio import Choice, Studio, Waiting  # noqa: E402
from experiments.serve.subjects import subjects  # noqa: E402


class SlowGenerator:
    """Compiles until it is told to end."""

    go, compiled = threading.Event(), []

    def __init__(self, model, plan, sampling, size, watch):
        self.plan = plan

    def run_batch(self, *args, **more):
        assert self.go.wait(30)
        self.compiled.append(self.plan.budget)


@pytest.fixture
def studio():
    drawer = small_drawer(sizes=(1,))
    batcher = batcher_of(drawer)
    SlowGenerator.go, SlowGenerator.compiled = threading.Event(), []
    service = Service(
        model=drawer.model,
        subjects=subjects(drawer.model),
        batcher=batcher,
        metrics=batcher.metrics,
    )
    found = Studio(service, SlowGenerator)
    yield found
    SlowGenerator.go.set()
    found.close()


def choice(studio, number):
    return Choice("streaming", 0.6 + number / 100, studio.model.sampling())


def test_what_nobody_waits_for_is_not_compiled(studio):
    """A visitor who moves the budget leaves no line of programs behind."""
    drawings = []
    for number in range(4):
        drawing = studio.draw(choice(studio, number), None, 0)
        assert isinstance(next(drawing), Waiting)
        drawings.append(drawing)
    for drawing in drawings[:3]:  # of these the first is being compiled already
        drawing.close()
    last = studio.program(choice(studio, 3))
    SlowGenerator.go.set()
    last.result(30)
    assert [round(budget, 2) for budget in SlowGenerator.compiled] == [0.6, 0.63]


def test_few_programs_may_wait(studio):
    for number in range(studio_lib.KEPT):
        studio.program(choice(studio, number))
    with pytest.raises(UserError, match="try again"):
        studio.program(choice(studio, studio_lib.KEPT))
    studio.program(choice(studio, 0))  # one that is there already
    SlowGenerator.go.set()
    studio.program(choice(studio, studio_lib.KEPT - 1)).result(30)
    studio.program(choice(studio, studio_lib.KEPT)).result(30)
    assert len(SlowGenerator.compiled) == studio_lib.KEPT + 1


def test_the_end_compiles_nothing_more(studio):
    drawing = studio.draw(choice(studio, 0), None, 0)
    next(drawing)
    waiting = [studio.program(choice(studio, number)) for number in range(1, 4)]
    studio.close()
    assert all(future.cancelled() for future in waiting)
    drawing.close()
