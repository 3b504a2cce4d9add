"""Compiling for one target, for a batch or for the largest that fits.

Some errors of a compiler end the process. So each of several targets is compiled by a process of
its own, the same command for one target (`apart`).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from experiments.aot import report, training
from experiments.aot.program import Compilation, DoesNotFit, Workload, first_line
from experiments.aot.training import TrainingStep
from pallas_kernels import chips, implementations
from pallas_kernels.chips import Chip
from varjax.engine import memory
from varjax.engine.memory import show_bytes

ROOT = Path(__file__).resolve().parents[2]


def own_process(module: str) -> tuple[list[str], dict[str, str]]:
    """Return the beginning of a command, and the environment, of a process of this package in the
    user's folder, which may hold an `experiments` of its own."""
    places = [str(ROOT), *(place or os.getcwd() for place in sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return [sys.executable, "-P", "-m", module], environment  # -P: not into the folder first


def apart(target: str, flags: Sequence[str]) -> dict:
    """The result of a target, compiled by a process of its own. flags: those of this command. They
    are followed by the process's own, because the last flag of a name counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        own = (f"--target={target}", f"--json={path}")
        command, environment = own_process("experiments.aot")
        status = subprocess.run(
            [*command, *flags, *own], env=environment, stdout=subprocess.DEVNULL
        ).returncode
        if path.exists():
            return json.loads(path.read_text())["results"][0]
    error = f"the compiler's process ended with {status}, and its last words are above"
    return {"target": target, "status": "failed", "error": error}


def here(chip: Chip, work: Callable[[Chip], dict]) -> dict:
    """The result of a target, compiled by this process; an error of the compiler is one."""
    os.environ.update(chips.quiet_environment())  # before the compilers are loaded
    # a program that is found there leaves no dump to read
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        result = work(chip)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        result = {"status": "failed", "error": f"{type(error).__name__}: {first_line(str(error))}"}
    return {"target": chip.name, "platform": chip.platform, **result}


def train(asked: TrainingStep, chip: Chip) -> dict:
    """The result of a training step."""
    say(chip, f"compiling a step of {asked.batch_size} images on {asked.mesh}")
    try:
        return training.describe(asked, chip)
    except DoesNotFit as error:
        return refused(chip, asked.batch_size, error.needed, str(error))


def say(chip: Chip, line: str) -> None:
    """Print a line of progress."""
    print(f"{chip.name}: {line}", file=sys.stderr, flush=True)


def refused(chip: Chip, batch: int, needed: int, why: str) -> dict:
    """The result of a program that the compiler refuses for its size."""
    sizes = {"batch_size": batch, "needed_bytes": needed, "memory_bytes": chip.memory}
    return {"status": "refused", "fits": False, "error": why, **sizes}


# --- the largest batch ---
#
# Memory grows almost in proportion to the batch, so a line through what is known says where to look
# next; the compiler has the last word. A refused program counts with what it asked for.

RESOLUTION = 0.01  # of the batch: about what is worth another compilation
MOST_TRIALS = 16


class Trial(NamedTuple):
    """The result of compiling for a batch. fits: whether `num_bytes` fit in the chip's memory."""

    batch: int
    num_bytes: int
    fits: bool


def largest_batch(
    attempt: Callable[[int], Trial], memory: int, first: int, step: int = 1
) -> tuple[int, list[Trial]]:
    """The largest batch that fits, and all trials in order; 0 if not even one step fits.

    The answer was compiled and fits. The next batch that was looked at does not fit; it is 1 %
    larger, at least one step.

    Args:
      attempt: compiles for a batch.
      memory: bytes of the chip.
      first: the batch to begin with.
      step: batches are its multiples, as many devices split them.
    """
    trials, batch, low, high = [], max(step, first // step * step), 0, None
    while len(trials) < MOST_TRIALS:
        trials.append(attempt(batch))
        if trials[-1].fits:
            low = batch
        else:
            high = batch
        gap = max(step, int(low * RESOLUTION) // step * step)
        if high is not None and high - low <= gap:
            break
        # at the end of the line, or just above a batch that fits
        batch = _end_of_line(trials, memory) or (2 * low if high is None else (low + high) / 2)
        batch = max(int(batch) // step * step, low + gap if low else step)
        # a line from small batches may be far off
        batch = min(batch, 8 * max(low, step) if high is None else high - step)
    return low, trials


def _end_of_line(trials: Sequence[Trial], memory: int) -> float | None:
    """The batch at which a line through the two trials nearest to the limit reaches it."""
    near = sorted(trials, key=lambda t: abs(t.num_bytes - memory))[:2]
    if len(near) < 2 or near[0].batch == near[1].batch:
        return None
    a, b = sorted(near)
    slope = (b.num_bytes - a.num_bytes) / (b.batch - a.batch)
    return a.batch + (memory - a.num_bytes) / slope if slope > 0 else None


# --- the programs that draw ---


class Job:
    """The compilations of the programs that draw, for one target."""

    def __init__(self, workload: Workload, chip: Chip):
        self.workload, self.chip = workload, chip

    def _begin(self, batch: int) -> Compilation:
        """The compilation for a batch, with the program that draws codes compiled. Where a kernel
        cannot take the shapes the next implementation is tried, as `Generator` does, unless the
        user named one."""
        say(self.chip, f"compiling batch {batch}, attention {self.workload.attention}")
        case = Compilation(self.workload, self.chip, batch)
        try:
            case.compile_codes()
        except NotImplementedError as error:
            every = implementations.choices(self.chip.platform, self.chip.capability)
            rest = every[every.index(self.workload.attention) + 1 :]
            if self.workload.program.attention or not rest:
                raise
            instead = rest[0]
            say(self.chip, f"{first_line(str(error))}: taking {instead}")
            self.workload = replace(self.workload, attention=instead)
            return self._begin(batch)
        say(self.chip, f"codes in {case.codes.compile_s:.0f} s, {show_bytes(case.codes.resident)}")
        return case

    def describe(self, batch: int) -> dict:
        """The result for a batch, with both programs."""
        try:
            case = self._begin(batch)
            case.compile_pixels()
            return report.describe(case)
        except DoesNotFit as error:
            return refused(self.chip, batch, error.needed, str(error))

    def search(self) -> dict:
        """The result of the largest batch that fits, with all trials."""
        step, available = self.workload.program.mesh.data, self.chip.memory
        # first the batch whose prediction fills the chip
        predict = partial(self.workload.predict, platform=self.chip.platform)
        first = max(1, memory.largest_batch(predict, 10**5, int(available / memory.SAFETY))) * step
        found, trials = largest_batch(self._attempt, available, first, step)
        listed = [{"batch": t.batch, "bytes": t.num_bytes, "fits": t.fits} for t in trials]
        if not found:
            least = min(trials, key=lambda t: (t.batch, -t.num_bytes))
            why = f"not even a batch of {least.batch} fits"
            return {**refused(self.chip, least.batch, least.num_bytes, why), "trials": listed}
        return {**self.describe(found), "largest_batch": found, "trials": listed}

    def _attempt(self, batch: int) -> Trial:
        result = self.describe(batch)
        needed = result.get("peak_bytes") or result["needed_bytes"]
        verdict = "fits" if result["fits"] else "does not fit"
        say(self.chip, f"batch {batch} takes {show_bytes(needed)}, {verdict}")
        return Trial(batch, needed, result["fits"])
