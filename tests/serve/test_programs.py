"""The waiting room and the programs: bounded, in order, nothing that was taken is lost; few
programs wait, few are kept, those that nobody waits for are not compiled."""

import asyncio
import threading
import types
from dataclasses import replace

import numpy as np
import pytest

import varjax
from experiments.budgets import images_at_once
from experiments.serve.drawing import Item
from tests import models_under_test as models
from tests.serve.server import MODEL, FakePrograms, programs_of
from varjax.core.errors import UserError
from varjax.policies import get_policy

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from experiments.serve import programs as programs_lib  # noqa: E402
from experiments.serve.guard import Refused  # noqa: E402
from experiments.serve.programs import Batcher, Programs  # noqa: E402


def items(*seeds, program=None):
    return [Item(np.zeros(1, np.int32), seed, 0, program=program) for seed in seeds]


def run(test, most=8, sizes=(1, 2, 4)):
    """Run a test in a loop, whose batcher is drawing its first image until `drawer.go` is set."""

    async def whole():
        drawer = FakePrograms(sizes)
        batcher = Batcher(drawer, most)
        batcher.start()
        drawer.go.clear()
        with batcher.room(1):
            first = batcher.put(items(0))
            while not drawer.drawing:
                await asyncio.sleep(0)
            await asyncio.wait_for(test(batcher, drawer), 30)
            drawer.go.set()
            assert await seeds_of(first) == [0]
        await asyncio.wait_for(batcher.close(20), 30)
        assert batcher.depth == 0

    asyncio.run(whole())


async def seeds_of(futures):
    return [int((await future).picture[0, 0, 0]) for future in futures]


def test_what_waits_is_drawn_together_and_in_order():
    async def test(batcher, drawer):
        with batcher.room(7):
            found = [batcher.put(items(*seeds)) for seeds in ((1, 2), (3,), (4, 5, 6))]
            alone = batcher.put(items(7, program="its own"))
            drawer.go.set()
            assert [await seeds_of(futures) for futures in found] == [[1, 2], [3], [4, 5, 6]]
            assert await seeds_of(alone) == [7]
        drawn = [[item.seed for item in batch] for batch in drawer.drawn]
        assert drawn == [[0], [1, 2, 3, 4], [5, 6], [7]]

    run(test)


def test_a_full_queue_takes_all_of_a_request_or_nothing():
    async def test(batcher, drawer):
        with batcher.room(2):
            with pytest.raises(Refused) as error, batcher.room(2):
                pass
            assert error.value.status_code == 429 and int(error.value.headers["retry-after"]) >= 1
            with pytest.raises(KeyError), batcher.room(1):
                assert batcher.depth == 3
                raise KeyError("decoding fails")
            assert batcher.depth == 2
            with batcher.room(1):
                last = batcher.put(items(5))
                drawer.go.set()
                assert await seeds_of(last) == [5]
        with pytest.raises(Refused), batcher.room(1, idle=True):
            pass  # the first is still here

    run(test, most=3)


def test_the_end_draws_what_was_taken_and_takes_nothing_more():
    async def test(batcher, drawer):
        with batcher.room(3):
            found = batcher.put(items(1, 2))
            closing = asyncio.create_task(batcher.close(20))
            await asyncio.sleep(0)
            with pytest.raises(Refused) as error, batcher.room(1):
                pass
            assert error.value.status_code == 503
            drawer.go.set()
            assert await seeds_of(found) == [1, 2]
            assert await seeds_of(batcher.put(items(3))) == [3]  # room was kept
        assert not closing.done()

    run(test)


def test_a_batch_that_fails_does_not_end_the_task(caplog):
    async def test(batcher, drawer):
        drawer.go.set()
        with batcher.room(2):
            (failed,) = batcher.put(items(666))
            with pytest.raises(RuntimeError, match="fails"):
                await failed
            assert await seeds_of(batcher.put(items(7))) == [7]

    run(test, sizes=(1,))
    assert "drawing failed" in caplog.text


def test_sizes():
    model = types.SimpleNamespace()
    made = lambda most: Programs(model, None, make=None, plan_of=str, most=most, build=None).sizes  # noqa: E731
    assert made(1) == [1] and made(8) == [1, 2, 4, 8] and made(6) == [1, 2, 4, 6]
    drawer = FakePrograms(sizes=(1, 2, 4, 8))
    # padded where three quarters are full, else a smaller one is filled
    assert [drawer.size_for(n) for n in range(1, 10)] == [1, 2, 4, 4, 4, 8, 8, 8, 8]


def test_bytes_decide_how_many_fit():
    plan = varjax.plan(models.fixture_model(MODEL), "streaming", 0.6)
    one = plan.num_bytes(1, "float32")
    assert images_at_once(plan, "float32", None, 8) == 8
    assert images_at_once(plan, "float32", 3 * one + 1, 8) == 3
    assert images_at_once(plan, "float32", 100 * one, 8) == 8
    with pytest.raises(UserError, match="hold no image"):
        images_at_once(plan, "float32", one - 1, 8)


# --- programs -------------------------------------------------------------------------------------


def choice(programs, number):
    return replace(programs.usual, policy=get_policy("streaming", 0.7 + number / 100))


@pytest.fixture
def slow(monkeypatch):
    """Programs that compile until they are told to end, and what was compiled."""
    go, compiled = threading.Event(), []

    def compile_one(self, choice):
        assert go.wait(30)
        compiled.append(round(choice.policy.budget, 2))
        return types.SimpleNamespace(choice=choice)

    monkeypatch.setattr(Programs, "_new_program", compile_one)
    programs = programs_of(models.fixture_model(MODEL))
    yield programs, go, compiled
    go.set()
    programs.close()


def test_what_nobody_waits_for_is_not_compiled(slow):
    """A visitor who moves the budget leaves no line of programs behind; who waits for the same
    program as somebody who went away still gets it."""
    programs, go, compiled = slow

    async def test():
        waiting = [asyncio.create_task(programs.program(choice(programs, n))) for n in range(4)]
        other = asyncio.create_task(programs.program(choice(programs, 2)))
        await asyncio.sleep(0.1)
        for task in waiting[:3]:  # of these the first is being compiled already
            task.cancel()
        await asyncio.sleep(0.1)
        go.set()
        assert (await other).choice == choice(programs, 2)
        await waiting[3]
        assert compiled == [0.7, 0.72, 0.73]
        await programs.program(choice(programs, 0))  # it was kept
        assert compiled == [0.7, 0.72, 0.73]

    asyncio.run(test())


def test_few_programs_may_wait_and_few_are_kept(slow):
    programs, go, compiled = slow
    kept = programs_lib.KEPT

    async def test():
        waiting = [asyncio.create_task(programs.program(choice(programs, n))) for n in range(kept)]
        await asyncio.sleep(0.1)
        with pytest.raises(Refused) as error:
            await programs.program(choice(programs, kept))
        assert error.value.status_code == 429
        go.set()
        await asyncio.gather(*waiting)
        await programs.program(choice(programs, 0))  # now asked for last
        await programs.program(choice(programs, kept))
        assert len(compiled) == kept + 1
        await programs.program(choice(programs, 0))
        assert len(compiled) == kept + 1
        await programs.program(choice(programs, 1))
        assert len(compiled) == kept + 2

    asyncio.run(test())
