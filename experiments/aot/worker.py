"""One process per target, because some errors of a compiler end the process.

The parent calls `start`, which runs the same command again for one target. There `work` compiles
for a batch, or for the largest that fits, and writes the result into a file.
"""

import contextlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from experiments import own_process
from experiments.aot import report, training
from experiments.aot.batch_search import BatchSearch, Trial
from experiments.aot.program import Compilation, DoesNotFit, Workload, first_line
from experiments.aot.training import TrainingStep
from pallas_kernels import chips, implementations
from pallas_kernels.chips import Chip
from varjax.engine import memory
from varjax.engine.memory import show_bytes

LAST_LINES = 12
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "varjax")


def start(target: str, flags: Sequence[str]) -> dict:
    """The result of a target, compiled by a process of its own. flags: those of this command. They
    are followed by the process's own, because the last flag of a name counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        own = (f"--target={target}", f"--worker={path}")
        command = [*own_process.command("experiments.aot"), *flags, *own]
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            last = _forward(process.stderr, target)
            status = process.wait()
        finally:
            process.kill()
        if status == 0 and path.exists():
            return json.loads(path.read_text())
    said = "\n".join(f"  {line}" for line in last)
    return {"status": "failed", "error": f"the compiler's process ended with {status}:\n{said}"}


def environment() -> dict[str, str]:
    """The environment of a process that compiles. It has no cache of programs, which would keep the
    compiler from writing the dump that we read."""
    own = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    return {**own_process.environment(), **chips.quiet_environment(), **own}


def _forward(lines: Iterable[str], target: str) -> list[str]:
    """Print the worker's own progress lines; return the last of all other lines."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    for line in lines:
        if line.startswith(f"{target}: "):
            print(line, end="", file=sys.stderr, flush=True)
        elif line.strip():
            last.append(line.rstrip()[:300])
    return list(last)


def versions() -> dict[str, str]:
    """Versions of what compiled."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# --- in the process of a target ---


def work(
    workloads: Mapping[str, Workload],
    batch: int | None,
    chip: Chip,
    temporaries: int,
    path: str,
) -> None:
    """Compile for a batch, or for the largest that fits (None), and write the result to `path`.
    workloads: by chip."""
    job = _Job(workloads[chip.name], chip, temporaries)
    _write(path, job.search if batch is None else partial(job.describe, batch))


def work_on_training(asked: TrainingStep, chip: Chip, temporaries: int, path: str) -> None:
    """Compile a training step, and write the result to `path`."""
    say(chip, f"compiling a step of {asked.batch_size} images on {asked.mesh}")

    def result() -> dict:
        try:
            return training.describe(asked, chip, temporaries)
        except DoesNotFit as error:
            return refused(chip, asked.batch_size, error.needed, str(error))

    _write(path, result)


def _write(path: str, compiled: Callable[[], dict]) -> None:
    """Write what is compiled, or why it is not."""
    try:
        result = compiled()
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        result = {"status": "failed", "error": f"{type(error).__name__}: {first_line(str(error))}"}
    Path(path).write_text(json.dumps(result))


def say(chip: Chip, line: str) -> None:
    """Print a line of progress, which the parent passes on."""
    print(f"{chip.name}: {line}", file=sys.stderr, flush=True)


def refused(chip: Chip, batch: int, needed: int, why: str) -> dict:
    """The result of a program that the compiler refuses for its size."""
    sizes = {"batch_size": batch, "needed_bytes": needed, "memory_bytes": chip.memory}
    return {"status": "refused", "fits": False, "error": why, **sizes}


class _Job:
    """The compilations for one target. Each batch is compiled once."""

    def __init__(self, workload: Workload, chip: Chip, temporaries: int):
        self.workload, self.chip, self.temporaries = workload, chip, temporaries
        self.begun: dict[int, Compilation] = {}
        self.results: dict[int, dict] = {}

    def say(self, line: str) -> None:
        say(self.chip, line)

    def begin(self, batch: int) -> Compilation:
        """The compilation for a batch, with the program that draws codes compiled. Where a kernel
        cannot take the shapes the next implementation is tried, as `Generator` does, unless the
        user named one."""
        if batch in self.begun:
            return self.begun[batch]
        self.say(f"compiling batch {batch}, attention {self.workload.attention}")
        case = Compilation(self.workload, self.chip, batch, self.say)
        try:
            case.compile_codes()
        except NotImplementedError as error:
            if not (instead := self._next_implementation()):
                raise
            self.say(f"{first_line(str(error))}: taking {instead}")
            self.workload = replace(self.workload, attention=instead)
            return self.begin(batch)
        self.begun[batch] = case
        return case

    def _next_implementation(self) -> str | None:
        if self.workload.program.attention:
            return None
        every = implementations.choices(self.chip.platform, self.chip.capability)
        return next(iter(every[every.index(self.workload.attention) + 1 :]), None)

    def describe(self, batch: int) -> dict:
        """The result for a batch, with both programs."""
        if batch not in self.results:
            try:
                case = self.begin(batch)
                case.compile_pixels()
                result = report.describe(case, self.temporaries)
            except DoesNotFit as error:
                result = refused(self.chip, batch, error.needed, str(error))
            self.results[batch] = result
        return self.results[batch]

    # --- searching ---

    def search(self) -> dict:
        """The result of the largest batch that fits, with all trials.

        Drawing codes usually decides, so the decoder is compiled for the batch found so only; if
        it does not fit there, it is compiled for every batch of a second search.
        """
        step, available = self.workload.program.mesh.data, self.chip.memory
        # first the batch whose prediction fills the chip
        predict = partial(self.workload.predict, self.workload.plan)
        first = max(1, memory.largest_batch(predict, 10**5, int(available / memory.SAFETY))) * step
        search = BatchSearch(self._try_codes, available, step)
        found, trials = search.largest(first), search.trials
        if found and not self.describe(found)["fits"]:
            search = BatchSearch(self._try_both, available, step)
            found = search.largest(found)
            trials += search.trials
        listed = [{"batch": t.batch, "bytes": t.num_bytes, "fits": t.fits} for t in trials]
        if not found:
            least = min(trials, key=lambda t: (t.batch, -t.num_bytes))
            why = f"not even a batch of {least.batch} fits"
            return {**refused(self.chip, least.batch, least.num_bytes, why), "trials": listed}
        return {**self.describe(found), "largest_batch": found, "trials": listed}

    def _try_codes(self, batch: int) -> Trial:
        try:
            needed = self.begin(batch).codes.resident
        except DoesNotFit as error:
            return self._judged(batch, error.needed, False)
        return self._judged(batch, needed, needed <= self.chip.memory)

    def _try_both(self, batch: int) -> Trial:
        result = self.describe(batch)
        needed = result.get("peak_bytes") or result["needed_bytes"]
        return self._judged(batch, needed, result["fits"])

    def _judged(self, batch: int, needed: int, fits: bool) -> Trial:
        verdict = "fits" if fits else "does not fit"
        self.say(f"batch {batch} takes {show_bytes(needed)}, {verdict}")
        return Trial(batch, needed, fits)
