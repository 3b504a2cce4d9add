"""The loop of a training stage, and its folder: settings, history and resumable checkpoints.

    OUT/STAGE/settings.json     what the stage was started with
    OUT/STAGE/history.jsonl     one JSON object per log step; as curves history.csv and events/
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
from collections.abc import Mapping, Sequence
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
SILENCE = 10  # seconds without a line, after which one says how far the stage is


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
    """The files of one stage. As a context it closes checkpoints and events.

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
            self._events.close()

    def restore(self, like: dict) -> tuple[dict | None, int]:
        """Return the newest sound checkpoint and its steps; None and 0 without checkpoints.
        `UserError` if all checkpoints are damaged; they stay.

        like: a state, or shapes with the shardings of its arrays: they may be other devices.

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
        """Drop entries of steps after `up_to`, and lines that are damaged or were cut short."""
        if not hosts.is_first():
            return
        path, kept = self.path / HISTORY, []
        data = ordinary.read_file(path, LARGEST_HISTORY) if path.exists() else b""
        for line in data.decode("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                kept += [line] if manifest.parse_json(line)["step"] <= up_to else []
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._events = curves.events(self.path / "events", up_to)

    def append_history(self, entry: Mapping) -> None:
        """Add one line to the history."""
        if hosts.is_first():
            with ordinary.opened(self.path / HISTORY, "ab") as file:
                file.write(json.dumps(entry).encode() + b"\n")
            for name, value in curves.scalars(entry).items() if self._events else ():
                self._events.add_scalar(name, value, entry["step"])

    def write_table(self) -> None:
        if hosts.is_first():
            lines = ordinary.read_file(self.path / HISTORY, LARGEST_HISTORY).splitlines()
            curves.write_csv(self.path / "history.csv", lines)


def run(
    stage: TrainingStage, out: str | os.PathLike, quiet: bool = False, *, goes_on: bool = False
) -> dict:
    """Train a stage to its last step in `out`, from its newest checkpoint if there is one.
    `Stopped` if the system asked to end, by SIGTERM: a checkpoint is written. `UserError` if the
    loss has become NaN or infinite: the last checkpoint stays.

    goes_on: another stage follows, so that who asks during the last step wants that one not begun.

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
            state = _loop(stage, folder, state, start, quiet, stop)
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
) -> dict:
    """Run the steps. The last one logs, validates and saves whatever the intervals are."""
    progress = Progress(stage.name, stage.steps, first=start)
    last = spoke = progress.skip()
    window, settings = folder.window(start), stage.settings
    earlier = len(window)  # steps that are not timed: another run's, and those that compile
    for n in range(start, stage.steps):
        if new := stage.phases.get(n, "a step" if n == start else ""):
            say(f"{stage.name}: compiling {new}", quiet)
            spoke = time.monotonic()
        state, metrics = stage.step(state, n)
        window.append(metrics)
        done, final = n + 1, n + 1 == stage.steps
        if new:
            jax.block_until_ready(metrics)
            earlier, last = len(window), progress.skip()
            say(f"{stage.name}: compiled, with its first step, in {last - spoke:.1f} s", quiet)
            spoke = last
        if final or done % settings.log_every == 0:
            means = _means(stage, window, done)
            seconds = time.monotonic() - last
            pace = round((len(window) - earlier) * stage.batch_size / seconds, 2)
            say(progress.line(done, f"{_numbers(means)}  {pace:.1f} images/s"), quiet)
            entry = {"step": done, **means, "images_per_second": pace}
            if final or done % settings.validate_every == 0:
                entry["validation"] = stage.validate(state)
                say(f"{stage.name} validation {_numbers(entry['validation'])}", quiet)
            folder.append_history(entry)
            if stage.draw and (final or done % settings.sample_every == 0):
                say(f"{stage.name}: see {stage.draw(stage, state, folder.path, done)}", quiet)
            window, earlier, last = [], 0, progress.skip()
            spoke = last
        elif time.monotonic() - spoke > SILENCE:
            jax.block_until_ready(metrics)  # steps run behind
            say(progress.line(done), quiet)
            spoke = time.monotonic()
        stopped = stop.after_step() and not final
        if final or stopped or done % settings.checkpoint_every == 0:
            folder.save(done, state, jax.device_get(window))
            folder.write_table()
        if stopped:
            raise Stopped(done, stage.steps, "steps", f"{stage.name}: ")
    return state


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
