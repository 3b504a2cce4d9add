"""The loop of a training stage: steps, log lines, history, validation, checkpoints, resuming."""

import math
import sys
import time
from collections.abc import Mapping

import jax

from varjax.errors import UserError
from varjax.training.stage import Stage
from varjax.training.stage_folder import StageFolder


def run(stage: Stage, out, quiet: bool = False) -> dict:
    """Train `stage` to its last step in `out`, from its newest checkpoint if there is one.

    Returns the final state.

    Raises:
      UserError: the loss is no longer a number. The last checkpoint stays.
    """
    with StageFolder(out, stage.name, stage.settings.of_stage(stage.name)) as folder:
        state, start = folder.restore(stage.initial_state())
        if start:
            say(f"{stage.name}: resuming after step {start} of {stage.steps}", quiet)
        folder.keep_history(start)
        return _loop(stage, folder, state, start, quiet)


def _loop(stage: Stage, folder: StageFolder, state: dict, start: int, quiet: bool) -> dict:
    """The last step logs, validates and saves whatever the intervals are."""
    begin = last = time.monotonic()
    window, settings = [], stage.settings
    for n in range(start, stage.steps):
        state, metrics = stage.step(state, n)
        window.append(metrics)
        done, final = n + 1, n + 1 == stage.steps
        if final or done % settings.log_every == 0:
            entry = {"step": done, **_means(stage, window, done)}
            now, count = time.monotonic(), len(window)
            entry["images_per_second"] = round(count * stage.batch_size / (now - last), 2)
            left = (now - begin) / (done - start) * (stage.steps - done)
            window, last = [], now
            say(f"{stage.name} {_line(entry, stage.steps)}  about {left:.0f} s left", quiet)
            if final or done % settings.validate_every == 0:
                entry["validation"] = stage.validate(state)
                say(f"{stage.name} validation {_numbers(entry['validation'])}", quiet)
                last = time.monotonic()
            folder.append_history(entry)
        if final or done % settings.checkpoint_every == 0:
            folder.save(done, state)
    return state


def _means(stage: Stage, window: list[Mapping], done: int) -> dict[str, float]:
    """Mean of each metric since the last log line, over the steps that have it."""
    window = jax.device_get(window)
    means = {}
    names = {name for metrics in window for name in metrics}
    for name in sorted(names, key=lambda name: (name != "loss", name)):
        values = [float(metrics[name]) for metrics in window if name in metrics]
        means[name] = sum(values) / len(values)
        if not math.isfinite(means[name]):
            raise UserError(
                f"{stage.name}: {name} is {means[name]} at step {done}, training has diverged:"
                f" start again with a lower {stage.name}_lr in another folder"
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
