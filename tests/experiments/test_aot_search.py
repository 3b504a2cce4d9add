"""The search for the largest batch, with a compiler that is a formula."""

import pytest

from experiments.aot.worker import Trial, largest_batch


def search(need, memory, first=8, step=1, refused=None):
    """need, refused: bytes of a program that is compiled, that the compiler refuses."""
    refused = refused or need

    def attempt(batch):
        assert batch >= step and batch % step == 0
        fits = need(batch) <= memory
        return Trial(batch, need(batch) if fits else refused(batch), fits)

    return largest_batch(attempt, memory, first, step)


@pytest.mark.parametrize("first", [1, 8, 64, 1000])
@pytest.mark.parametrize("memory", [1150, 2000, 16000, 80000])
@pytest.mark.parametrize("wobble", [0, 37])
def test_growing_almost_in_proportion(first, memory, wobble):
    def need(batch):
        return 1000 + 100 * batch + wobble * (batch % 3)

    found, trials = search(need, memory, first)
    best = max(n for n in range(1000) if need(n) <= memory or n == 0)
    assert best * 0.99 - 1 <= found <= best
    assert len(trials) <= 8
    assert len({t.batch for t in trials}) == len(trials)
    assert any(t.batch == found and t.fits for t in trials)
    assert any(found < t.batch <= found * 1.01 + 1 and not t.fits for t in trials)


def test_nothing_fits():
    found, trials = search(lambda n: 1000 + n, 500)
    assert found == 0 and min(t.batch for t in trials) == 1


def test_devices_split_the_batch():
    found, trials = search(lambda n: 1000 + 10 * n, 1890, first=8, step=8)
    assert found == 88 and all(t.batch % 8 == 0 for t in trials)
