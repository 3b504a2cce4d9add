"""What training says of the time that is left, on a made-up clock."""

import re
from types import SimpleNamespace

import pytest

from varjax.parallel.stopping import Stop
from varjax.training import loop

STEPS, LOG, VALIDATE, SECOND_PROGRAM = 1000, 20, 100, 250
STEP_S, COMPILE_S, VALIDATION_S, SAVE_S = 1.0, 90.0, 30.0, 5.0
UNITS = {"s": 1, "min": 60, "h": 3600}


class MadeUp:
    """A stage whose steps, validations and compilations take the time that the test says."""

    name, steps, batch_size, new_programs = "vqvae", STEPS, 4, (SECOND_PROGRAM,)
    settings = SimpleNamespace(log_every=LOG, validate_every=VALIDATE, checkpoint_every=200)

    def __init__(self, start):
        self.now, self.compiled = 1000.0, {start, SECOND_PROGRAM}

    def step(self, state, n):
        self.now += STEP_S + COMPILE_S * (n in self.compiled)
        return state, {"loss": 1.0}

    def validate(self, state):
        self.now += VALIDATION_S
        return {"psnr": 20.0}

    def save(self, step, state):
        self.now += SAVE_S

    def kept_window(self, step):
        return []

    def append_history(self, entry):
        pass


@pytest.mark.parametrize("start", [0, 400])
def test_time_left(monkeypatch, capsys, start):
    """From the first line on it is near the truth, or says `at least`: steps, validations, saves
    and the second program, also after a resumption; compiling is no part of the pace."""
    stage, said = MadeUp(start), []
    monkeypatch.setattr(loop.time, "monotonic", lambda: stage.now)
    monkeypatch.setattr(loop, "say", lambda text, quiet: said.append((stage.now, text)))
    loop._loop(stage, stage, {}, start, False, Stop())
    ends = stage.now
    lines = [(now, text) for now, text in said if "validation" not in text]
    assert len(lines) == (STEPS - start) // LOG
    for number, (now, text) in enumerate(lines[:-1]):
        words, value, unit = re.search(r"(about|at least) ([\d.]+) (s|min|h) left", text).groups()
        told, true = float(value) * UNITS[unit], ends - now
        rounding = UNITS[unit] / 2 + 2 * SAVE_S
        if words == "at least":  # no validation was measured yet
            assert number < VALIDATE // LOG and 0.6 * true < told <= true + rounding, text
        else:
            assert told == pytest.approx(true, rel=0.12, abs=rounding), text
