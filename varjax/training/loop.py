"""The training loop that both stages share: steps, log lines, history, validation, checkpoints,
resuming.

A stage is an object with

    name, settings, steps, batch_size
    initial_state() -> dict of arrays
    step(state, n) -> (state, metrics)     step n, counted from 0; metrics are scalars on the device
    validate(state) -> dict of numbers

where everything random in step n follows from the seed and n. So a state and its step are all that
a checkpoint needs, and a resumed run repeats exactly what an uninterrupted one does.
"""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax

from varjax.errors import UserError
from varjax.training.run_folder import StageFolder


class Stage(Protocol):
    """What `run` needs; see the module."""

    name: str
    settings: Mapping
    steps: int
    batch_size: int

    def initial_state(self) -> dict: ...

    def step(self, state: dict, n: int) -> tuple[dict, Mapping]: ...

    def validate(self, state: dict) -> dict: ...


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """In steps: log lines, checkpoints, validations. The last step does all three."""

    log: int = 20
    checkpoint: int = 200
    validate: int = 500

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"--{name}_every={value} given: it must be at least 1")
        for name in ("checkpoint", "validate"):
            if getattr(self, name) % self.log:  # else a resumed log line would average other steps
                raise UserError(
                    f"--{name}_every={getattr(self, name)} must be a multiple of"
                    f" --log_every={self.log}"
                )


def run(stage: Stage, out, intervals: Intervals, quiet: bool = False) -> dict:
    """Train `stage` to its last step in `out`, from its newest checkpoint if there is one.

    Returns the final state.

    Raises:
      UserError: the loss is no longer a number. The last checkpoint stays.
    """
    folder = StageFolder(out, stage.name, stage.settings)
    try:
        state, start = stage.initial_state(), folder.latest_step()
        if start:
            state = folder.restore(state)
            say(f"{stage.name}: resuming after step {start} of {stage.steps}", quiet)
        folder.keep_history(start)
        return _loop(stage, folder, state, start, intervals, quiet)
    finally:
        folder.close()


def _loop(stage, folder: StageFolder, state, start: int, intervals: Intervals, quiet: bool) -> dict:
    begin = last = time.monotonic()
    window = []
    for n in range(start, stage.steps):
        state, metrics = stage.step(state, n)
        window.append(metrics)
        done, final = n + 1, n + 1 == stage.steps
        if final or done % intervals.log == 0:
            entry = {"step": done, **_means(stage, window, done)}
            now, count = time.monotonic(), len(window)
            entry["images_per_second"] = round(count * stage.batch_size / (now - last), 2)
            left = (now - begin) / (done - start) * (stage.steps - done)
            window, last = [], now
            say(f"{stage.name} {_line(entry, stage.steps)}  about {left:.0f} s left", quiet)
            if final or done % intervals.validate == 0:
                entry["validation"] = stage.validate(state)
                say(f"{stage.name} validation {_numbers(entry['validation'])}", quiet)
                last = time.monotonic()
            folder.append_history(entry)
        if final or done % intervals.checkpoint == 0:
            folder.save(done, state)
    return state


def _means(stage: Stage, window: list[Mapping], done: int) -> dict[str, float]:
    """Mean of each metric since the last log line, over the steps that have it."""
    window = jax.device_get(window)
    names = {name: None for metrics in window for name in metrics}
    names = sorted(names, key=lambda name: (name != "loss", name))
    means = {}
    for name in names:
        values = [float(metrics[name]) for metrics in window if name in metrics]
        means[name] = sum(values) / len(values)
        if not math.isfinite(means[name]):
            raise UserError(
                f"{stage.name}: {name} is {means[name]} at step {done}, training has diverged:"
                f" start again with a lower --{stage.name}_lr in another --out"
            )
    return means


def _line(entry: Mapping, steps: int) -> str:
    numbers = {k: v for k, v in entry.items() if k not in ("step", "images_per_second")}
    return (
        f"{entry['step']}/{steps}  {_numbers(numbers)}  {entry['images_per_second']:.1f} images/s"
    )


def _numbers(values: Mapping) -> str:
    parts = []
    for name, value in values.items():
        listed = value if isinstance(value, list) else [value]
        parts.append(f"{name} {' '.join(f'{v:.4g}' for v in listed)}")
    return "  ".join(parts)


def say(text: str, quiet: bool) -> None:
    """One line on standard error."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)
