"""The queue: bounded, in order, nothing that was taken is lost."""

import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

import varjax
from experiments.serve.batcher import Closed, QueueFull
from experiments.serve.drawer import Drawer, Item, fitting, ladder
from tests import models_under_test as models
from tests.serve.server import FakeDrawer, batcher_of
from varjax.errors import UserError


def items(*seeds):
    return [Item(np.zeros(1, np.int32), seed, 0) for seed in seeds]


def seeds_of(futures):
    return [int(future.result(30)[0, 0, 0]) for future in futures]


def held(most=8, sizes=(1, 2, 4)):
    """A batcher whose first image is being drawn until `drawer.go` is set."""
    drawer = FakeDrawer(sizes)
    drawer.go.clear()
    batcher = batcher_of(drawer, most)
    batcher.start()
    first = batcher.submit(items(0))
    while batcher.depth:
        time.sleep(0.005)
    return batcher, drawer, first


def test_what_waits_is_drawn_together_and_in_order():
    batcher, drawer, first = held()
    found = [batcher.submit(items(*seeds)) for seeds in ((1, 2), (3,), (4, 5, 6))]
    drawer.go.set()
    assert seeds_of(first) == [0]
    assert [seeds_of(futures) for futures in found] == [[1, 2], [3], [4, 5, 6]]
    assert [[i.seed for i in batch] for batch in drawer.batches] == [[0], [1, 2, 3, 4], [5, 6]]
    batcher.close()


def test_a_full_queue_takes_all_of_a_request_or_nothing():
    batcher, drawer, _ = held(most=3)
    batcher.submit(items(1, 2))
    with pytest.raises(QueueFull) as error:
        batcher.submit(items(3, 4))
    assert error.value.seconds >= 1 and batcher.depth == 2
    last = batcher.submit(items(5))
    drawer.go.set()
    assert seeds_of(last) == [5]
    batcher.close()


def test_places_before_images():
    """Places count as soon as they are kept; what is not filled is given back; the end waits for
    what is not filled yet."""
    batcher, drawer, first = held(most=3)
    with batcher.reserve(2) as places:
        assert batcher.depth == 2
        with pytest.raises(QueueFull):
            batcher.submit(items(1, 2))
        with pytest.raises(KeyError), batcher.reserve(1):
            raise KeyError("decoding fails")
        assert batcher.depth == 2
        closing = threading.Thread(target=batcher.close)
        closing.start()
        drawer.go.set()
        seeds_of(first)
        with pytest.raises(Closed):
            while True:
                batcher.submit(items(9))[0].cancel()
        found = places.fill(items(4, 5))
    closing.join(30)
    assert not closing.is_alive() and seeds_of(found) == [4, 5] and batcher.depth == 0


def test_images_of_a_client_that_went_away_make_room():
    batcher, drawer, _ = held(most=2)
    gone = batcher.submit(items(1, 2))
    assert all(future.cancel() for future in gone)
    found = batcher.submit(items(3, 4))
    drawer.go.set()
    assert seeds_of(found) == [3, 4]
    with pytest.raises(CancelledError):
        gone[0].result(1)
    assert [1, 2] not in [[i.seed for i in batch] for batch in drawer.batches]
    batcher.close()


def test_closing_draws_what_was_taken():
    batcher, drawer, _ = held()
    found = batcher.submit(items(*range(1, 8)))
    closing = threading.Thread(target=batcher.close)
    closing.start()
    with pytest.raises(Closed):
        while True:  # until the other thread has come so far
            batcher.submit(items(9))[0].cancel()
    drawer.go.set()
    closing.join(30)
    assert not closing.is_alive() and seeds_of(found) == list(range(1, 8))


def test_a_batch_that_fails_does_not_end_the_thread():
    drawer = FakeDrawer(sizes=(1,))
    batcher = batcher_of(drawer)
    batcher.start()
    with pytest.raises(RuntimeError, match="fails"):
        batcher.submit(items(666))[0].result(30)
    assert seeds_of(batcher.submit(items(7))) == [7]
    with pytest.raises(ZeroDivisionError):
        batcher.run(lambda: 1 / 0).result(30)
    assert batcher.run(lambda: 5).result(30) == 5
    batcher.close()


def test_other_work_waits_its_turn():
    batcher, drawer, _ = held(most=3)
    order = []
    one, other = batcher.submit(items(1)), batcher.run(lambda: order.append("work"))
    later = batcher.submit(items(2))
    with pytest.raises(QueueFull):
        batcher.run(lambda: None)
    drawer.go.set()
    assert seeds_of(one + later) == [1, 2] and other.result(30) is None and order == ["work"]
    batcher.close()


def test_many_threads_lose_nothing():
    drawer = FakeDrawer()
    batcher = batcher_of(drawer, most=10_000)
    batcher.start()
    found = {}

    def client(number):
        for i in range(40):
            seed = (number * 40 + i) % 251
            found[number, i] = (seed, batcher.submit(items(seed))[0])

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batcher.close()
    assert len(found) == 320
    assert all(seeds_of([future]) == [seed] for seed, future in found.values())
    assert sum(map(len, drawer.batches)) == 320 and max(map(len, drawer.batches)) <= 4


def test_sizes():
    assert ladder(1) == (1,) and ladder(8) == (1, 2, 4, 8) and ladder(6) == (1, 2, 4, 6)
    drawer = FakeDrawer(sizes=(1, 2, 4, 8))
    # padded where three quarters are full, else a smaller one is filled
    expected = [1, 2, 4, 4, 4, 8, 8, 8, 8]
    assert [Drawer.size_for(drawer, n) for n in range(1, 10)] == expected


def test_bytes_decide_how_many_fit():

    plan = varjax.plan(models.fixture_model("c_k5_nol2norm"), "streaming", 0.6)
    one = plan.num_bytes(1, "float32")
    assert fitting(plan, "float32", None, 8) == 8
    assert fitting(plan, "float32", 3 * one + 1, 8) == 3
    assert fitting(plan, "float32", 100 * one, 8) == 8
    with pytest.raises(UserError, match="hold no image"):
        fitting(plan, "float32", one - 1, 8)
