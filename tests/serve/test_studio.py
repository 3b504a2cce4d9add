"""Programs of the page: few wait, few are kept, those that nobody waits for are not compiled."""

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.serve.process import users_environment
from tests.serve.server import batcher_of, small_drawer
from varjax.errors import UserError
from varjax.generator import Generator

pytest.importorskip("fastapi", reason="needs the extra serve")

from experiments.serve import studio as studio_lib  # noqa: E402
from experiments.serve.api import Service  # noqa: E402
from experiments.serve.studio import Choice, Preview, Studio, Waiting  # noqa: E402
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
    batcher.start()
    drawer.warm = lambda: None
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
    batcher.close(30)


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


def test_programs_that_are_forgotten_are_freed(studio, monkeypatch):
    """Generator, executables and plan, also while JAX still remembers how they were traced; and
    its traces are forgotten after as many programs as are kept."""
    monkeypatch.setattr(studio_lib, "KEPT", 1)
    forgotten, held, model = [], [], studio.model
    monkeypatch.setattr(studio_lib.memory, "forget_traces", lambda: forgotten.append(len(held)))

    def make(model, plan, sampling, size, watch):
        found = Generator(model, plan=plan, batch_size=1, segments=1, watch=watch)
        held.append((weakref.ref(found), weakref.ref(plan)))
        return found

    studio._make = make
    condition = studio.service.subjects.of("1", None)

    def draw(number):
        *seen, found = studio.draw(choice(studio, number), condition, 7)
        assert any(isinstance(one, Preview) for one in seen)
        return found.pixels

    first = draw(0)
    held.append((weakref.ref(studio.program(choice(studio, 0)).result().generator.compiled),))
    draw(10)
    gc.collect()
    assert [one() for one in (*held[0], *held[1])] == [None] * 3
    assert held[2][0]() is not None and len(forgotten) == 2
    np.testing.assert_array_equal(draw(0), first)
    assert model is studio.model


@pytest.mark.slow
def test_memory_has_a_bound():
    """The resident memory of a process that draws with many more choices than are kept. At first
    freed pieces that others do not fit are added; that ends (docs/lab/serving.md)."""
    command = [sys.executable, "-m", "tests.serve.page_memory", "48", "small"]
    environment = users_environment()
    done = subprocess.run(
        command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    sizes = [float(line.split()[1]) for line in done.stdout.splitlines() if line[:1].isdigit()]
    kept, whole = studio_lib.KEPT, len(sizes)
    assert whole == 48
    # just after traces were forgotten: between these times it rises and falls
    grown = sizes[5 * kept] - sizes[4 * kept]
    assert grown < 6, sizes  # MiB, over eight choices; 3.3 were measured


def test_the_end_compiles_nothing_more(studio):
    drawing = studio.draw(choice(studio, 0), None, 0)
    next(drawing)
    waiting = [studio.program(choice(studio, number)) for number in range(1, 4)]
    studio.close()
    assert all(future.cancelled() for future in waiting)
    with pytest.raises(UserError, match="the server ends"):
        studio.program(choice(studio, 4))
    drawing.close()
