"""The loop of a training stage, and its folder: settings, history and resumable checkpoints.

    OUT/STAGE/settings.json     what the stage was started with
    OUT/STAGE/history.jsonl     one JSON object per log step; history.csv: the same as a table
    OUT/STAGE/events/           the same for TensorBoard (`curves.Events`)
    OUT/STAGE/checkpoints/N     Orbax checkpoint after N steps
    OUT/STAGE/records.json      sizes and checksums of their files, metrics not in the history

A run that was killed continues from its last sound checkpoint. History after that step is dropped,
so that every step appears once. Many processes share the folder: all write their parts of the
checkpoints, the first one writes the rest.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from experiments import processes
from experiments.output import say
from experiments.processes import Stopped
from experiments.training import curves
from experiments.training.stage import TrainingStage
from varjax.core.errors import UserError, some
from varjax.generation import hosts
from varjax.generation.progress import Progress
from varjax.storage import arrays, checksums, lock, manifest, ordinary
from varjax.storage.atomic import write_text

SETTINGS, HISTORY, CHECKPOINTS = "settings.json", "history.jsonl", "checkpoints"
RECORDS = "records.json"
LARGEST_HISTORY = 2**30  # bytes
SILENCE = 10  # seconds without a log line, after which a line says how far the stage is
# (state, folder of the stage, step) -> path: draws a sheet of pictures (`sheets`)
Draw = Callable[[dict, Path, int], Path]


def check_folder(out: Path, settings: Mapping[str, Mapping]) -> None:
    """Check that stages may start or go on in the folder `out`. `UserError` if `out` holds
    something else, or a stage with other settings.

    settings: {stage: {name: value}}.
    """
    begun = [stage for stage in settings if (out / stage / SETTINGS).is_file()]
    if not begun and {path.name for path in out.iterdir()} - {lock.NAME}:
        raise UserError(
            f"out={out} is not empty and holds no training run to resume: choose another folder"
        )
    for stage, wanted in settings.items():
        folder = out / stage
        if stage not in begun:
            if (folder / CHECKPOINTS).exists():
                raise UserError(
                    f"{folder} holds checkpoints but no {SETTINGS}, which says what was trained:"
                    " put it back, or choose another folder"
                )
            continue
        stored = manifest.read_json(folder / SETTINGS)
        if not isinstance(stored, dict):
            path = folder / SETTINGS
            raise UserError(f"{path} is damaged: it must hold a JSON object. Choose another folder")
        if not hosts.is_first():
            # another machine may have the pictures elsewhere; their content is compared
            stored["data"] = wanted.get("data")
        names = [n for n in {**stored, **wanted} if stored.get(n) != wanted.get(n)]
        if names:
            changes = some(f"{n:.40} was {stored.get(n)!s:.60}, now {wanted.get(n)}" for n in names)
            raise UserError(
                f"the run in {folder} has other settings: {changes}. Repeat the original settings"
                " to resume it, or choose another folder"
            )


class StageFolder(contextlib.AbstractContextManager):
    """The files of one stage. As a context it closes the checkpoints and the events.

    It creates the folder; `check_folder` must have passed before.
    """

    def __init__(self, out: str | os.PathLike, stage: str, settings: Mapping):
        self.path = Path(out).absolute() / stage
        self._checkpoints = self.path / CHECKPOINTS
        self._events = None
        self._advice = f"to train this stage from its start, remove {self.path}"
        with processes.together():
            if hosts.is_first():
                self._checkpoints.mkdir(parents=True, exist_ok=True)
                write_text(self.path / SETTINGS, json.dumps(settings, indent=1))
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        with arrays.failed_reading(self._checkpoints, self._advice):
            self._manager = ocp.CheckpointManager(self._checkpoints, options=options)

    def __exit__(self, *error) -> None:
        self._manager.close()
        if self._events:
            self._events.__exit__(*error)

    def restore(self, like: dict) -> tuple[dict | None, int]:
        """Return the newest sound checkpoint and its steps; None and 0 without checkpoints.
        `UserError` if all checkpoints are damaged; they stay.

        like: a state, or shapes with the shardings of its arrays: the run may have begun on other
          devices.

        Damaged checkpoints that are newer are removed and reported.
        """
        damaged: dict[int, UserError] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            folder = self._checkpoints / str(step)
            try:
                with processes.together():  # all go on from the same one
                    if hosts.is_first() and (known := self._records().get(str(step))):
                        checksums.check_files(folder, known["files"], self._advice)
                with arrays.failed_reading(folder, self._advice):
                    ordinary.check_folder(folder)
                    found = self._manager.restore(step, args=ocp.args.StandardRestore(like))
            except UserError as error:
                damaged[step] = error
                continue
            for newer, error in damaged.items():
                say(f"{error}. Going on from step {step}")
                self._manager.delete(newer)
            return found, step
        if damaged:
            raise next(iter(damaged.values()))
        return None, 0

    def _records(self) -> dict:
        """Return {step: records of its files, and its window}; nothing where that is not usable."""
        try:
            found = manifest.read_json(self.path / RECORDS)
            for step, record in found.items():
                checksums.check_records(step, record["files"])
                record["window"] = [{n: float(v) for n, v in m.items()} for m in record["window"]]
        except (UserError, LookupError, AttributeError, TypeError, ValueError):
            return {}  # the file is missing, or damaged itself
        return found

    def save(self, step: int, state: dict, window: Sequence[Mapping] = ()) -> None:
        """Write a checkpoint and keep the two newest. All processes call it.

        window: metrics of steps that no line of the history has.

        `OSError` if it cannot be written; earlier checkpoints stay.
        """
        values = [{name: float(value) for name, value in metrics.items()} for metrics in window]
        folder = self._checkpoints / str(step)
        with arrays.failed_writing(folder):
            self._manager.save(step, args=ocp.args.StandardSave(state))
        if hosts.is_first():
            own = {"files": checksums.file_records(folder), "window": values}
            known = self._records() | {str(step): own}
            steps = map(str, self._manager.all_steps())
            write_text(self.path / RECORDS, json.dumps({n: known[n] for n in steps if n in known}))

    def window(self, step: int) -> list[dict]:
        """Return the metrics that were saved with the checkpoint after a step."""
        return self._records().get(str(step), {}).get("window", [])  # or a mean of fewer steps

    def keep_history(self, up_to: int) -> None:
        """Drop entries of steps after `up_to`, and lines that are damaged or were cut short; the
        curves go on from there."""
        if not hosts.is_first():
            return
        path, kept = self.path / HISTORY, []
        data = ordinary.read_file(path, LARGEST_HISTORY) if path.exists() else b""
        for line in data.decode("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                kept += [line] if manifest.parse_json(line)["step"] <= up_to else []
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._events = curves.Events(self.path / curves.EVENTS, up_to)

    def append_history(self, entry: Mapping) -> None:
        """Add one line to the history, and to its curves."""
        if hosts.is_first():
            with ordinary.opened(self.path / HISTORY, "ab") as file:
                file.write(json.dumps(entry).encode() + b"\n")
            self._events.add(entry)

    def write_table(self) -> None:
        """Write the history as history.csv."""
        if hosts.is_first():
            lines = ordinary.read_file(self.path / HISTORY, LARGEST_HISTORY).splitlines()
            curves.write_csv(self.path / curves.CSV, lines)


def run(
    stage: TrainingStage,
    out: str | os.PathLike,
    quiet: bool = False,
    *,
    goes_on: bool = False,
    draw: Draw | None = None,
) -> dict:
    """Train a stage to its last step in `out`, from its newest checkpoint if there is one.
    `Stopped` if the system asked to end, by SIGTERM: a checkpoint is written. `UserError` if the
    loss has become NaN or infinite: the last checkpoint stays.

    goes_on: another stage follows, so that who asks during the last step wants that one not begun.
    draw: draws a sheet every `sample_every` steps, and after the last one.

    Returns the final state.
    """
    with StageFolder(out, stage.name, stage.settings.deciding(stage.name)) as folder:
        placed = jax.tree.map(
            lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
            stage.shapes,
            stage.places(stage.shapes),
        )
        state, start = folder.restore(placed)
        if start:
            say(f"{stage.name}: resuming after step {start} of {stage.steps}", quiet)
        else:
            say(f"{stage.name}: {stage.steps} steps of {stage.batch_size} pictures", quiet)
            state = stage.first_state()
        processes.wait()  # before files change that the others read
        folder.keep_history(start)
        with processes.Stop(start) as stop, hosts.answering():
            state = _loop(stage, folder, state, start, quiet, stop, draw)
            if goes_on and stop.after_step():
                raise Stopped(stage.steps, stage.steps, "steps", f"{stage.name}: ")
            return state


def _loop(
    stage: TrainingStage,
    folder: StageFolder,
    state: dict,
    start: int,
    quiet: bool,
    stop: processes.Stop,
    draw: Draw | None,
) -> dict:
    """Run the steps. The last one logs, validates and saves whatever the intervals are."""
    window, settings, clock = folder.window(start), stage.settings, _Clock(stage, start, quiet)
    for n in range(start, stage.steps):
        state, metrics = clock.step(state, n)
        window.append(metrics)
        done, final = n + 1, n + 1 == stage.steps
        if final or done % settings.log_every == 0:
            means = _means(stage, window, done)
            entry = {"step": done, **means, "images_per_second": clock.report(done, means)}
            if final or done % settings.validate_every == 0:
                entry["validation"] = stage.validate(state)
                say(f"{stage.name} validation {_numbers(entry['validation'])}", quiet)
            window = []
            folder.append_history(entry)
            if draw and settings.sample_every and (final or done % settings.sample_every == 0):
                say(f"{stage.name}: see {draw(state, folder.path, done)}", quiet)
            clock.restart()
        stopped = stop.after_step() and not final
        if final or stopped or done % settings.checkpoint_every == 0:
            folder.save(done, state, jax.device_get(window))
            folder.write_table()
        if stopped:
            raise Stopped(done, stage.steps, "steps", f"{stage.name}: ")
    return state


class _Clock:
    """Lines of progress, and the pace, for which only steps count that compile nothing."""

    def __init__(self, stage: TrainingStage, start: int, quiet: bool):
        self._stage, self._start, self._quiet = stage, start, quiet
        self._progress = Progress(stage.name, stage.steps, first=start)
        self.restart()

    def restart(self) -> None:
        """Leave out the time until now."""
        self._timed, self._since = 0, time.monotonic()
        self._spoke = self._since
        self._progress.skip()

    def step(self, state: dict, n: int) -> tuple[dict, Mapping]:
        """Take a step. A line is printed where it compiles, and in long silences."""
        stage, begun = self._stage, time.monotonic()
        new = stage.phases.get(n, "a step" if n == self._start else "")
        if new:
            say(f"{stage.name}: compiling {new}", self._quiet)
        state, metrics = stage.step(state, n)
        self._timed += 1
        if new:
            jax.block_until_ready(metrics)
            self.restart()
            taken = f"compiled, with its first step, in {self._since - begun:.1f} s"
            say(f"{stage.name}: {new}: {taken}", self._quiet)
        elif time.monotonic() - self._spoke > SILENCE and (n + 1) % stage.settings.log_every:
            jax.block_until_ready(metrics)  # steps run behind
            self._spoke = time.monotonic()
            say(self._progress.line(n + 1), self._quiet)
        return state, metrics

    def report(self, done: int, means: Mapping[str, float]) -> float:
        """Print a log line, and return images per second since the last one."""
        pace = self._timed * self._stage.batch_size / (time.monotonic() - self._since)
        note = f"{_numbers(means)}  {pace:.1f} images/s"
        say(self._progress.line(done, note), self._quiet)
        return round(pace, 2)


def _means(stage: TrainingStage, window: list[Mapping], done: int) -> dict[str, float]:
    """Return the mean of each metric since the last log line, over the steps that have it."""
    window, means = jax.device_get(window), {}
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


def _numbers(values: Mapping[str, float | list[float]]) -> str:
    """Write names and values for a log line."""
    parts = []
    for name, value in values.items():
        listed = value if isinstance(value, list) else [value]
        parts.append(f"{name} {' '.join(f'{v:.4g}' for v in listed)}")
    return "  ".join(parts)
