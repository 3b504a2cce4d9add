"""When many processes ask each other whether to end, by a clock that the test moves."""

import numpy as np
import pytest

from varjax.parallel import processes, stopping
from varjax.parallel.stopping import Ending, Stop


@pytest.fixture
def questions(monkeypatch):
    """questions(seconds of a step, steps, wait, ahead): times of the questions of process 0 of two.

    wait: seconds of the first step, which compiles. ahead: so many steps are started at once, and
    only a question, or the last of them, waits for the device.
    """

    def asked(step_s, steps, compile_s=0.0, ahead=1):
        clock, device, times = [0.0], [0.0], []

        def say_all(said):
            clock[0] = max(clock[0], device[0])
            times.append(clock[0])
            return np.stack([said, said])

        monkeypatch.setattr(processes, "count", lambda: 2)
        monkeypatch.setattr(processes, "say_all", say_all)
        monkeypatch.setattr(stopping.time, "monotonic", lambda: clock[0])
        ending = Ending(Stop())
        for n in range(1, steps + 1):
            device[0] = max(clock[0], device[0]) + step_s + compile_s * (n == 1)
            if n % ahead == 0:
                clock[0] = device[0]
            assert not ending.after_step()
        return np.array(times)

    return asked


@pytest.mark.parametrize("ahead", [1, 20, 1000])
@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.25, 1.0, 7.0])
def test_about_every_two_seconds(questions, step_s, ahead):
    times = questions(step_s, 3000, compile_s=30.0, ahead=ahead)
    apart = np.diff(times)
    assert apart.max() < 1.5 * max(Ending.SECONDS, step_s), apart
    assert np.median(apart) > 0.7 * Ending.SECONDS


def test_who_was_asked_ends_all(questions, monkeypatch):
    stop = Stop()
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "say_all", lambda said: np.stack([said, [True, 0.0]]))
    assert Ending(stop).after_step()
    monkeypatch.setattr(processes, "say_all", lambda said: np.stack([said, [False, 1000.0]]))
    monkeypatch.setattr(Ending, "SECONDS", 1000.0)
    ending = Ending(stop)
    assert not ending.after_step() and not ending.after_step()
    stop.asked = True
    assert ending.after_step(last=True)  # whatever the interval is


def test_who_is_silent_is_lost(monkeypatch):
    """Who has ended, or not begun, may be silent."""
    clock, texts = [0.0], ["0 5", "1 7", "2 over"]
    monkeypatch.setattr(processes, "posted", lambda topic: texts)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock[0])
    pulse = stopping.Pulse()
    for beat in range(10):
        clock[0], texts[0] = 4.0 * beat, f"0 {beat}"
        if clock[0] <= pulse.LOST_S:
            pulse.check()
            continue
        with pytest.raises(processes.LostProcess, match="process 1 has said nothing for 28 s"):
            pulse.check()
        break
    texts[1] = "1 8"
    pulse.check()
