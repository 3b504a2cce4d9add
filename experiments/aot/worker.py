"""Compiling for one target, for a batch or for the largest that fits.

Some errors of a compiler end the process. So each of several targets is compiled by a process of
its own, the same command for one target (`apart`).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from experiments.aot import floor, learning
from experiments.aot.learning import LearningStep
from experiments.aot.program import Compilation, DoesNotFit, Workload, first_line, num_bytes
from experiments.output import say, still_there
from pallas_kernels import chips, implementations
from pallas_kernels.chips import Chip
from varjax.generation import memory
from varjax.generation.memory import show_bytes

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
        with still_there(f"{chip.name}: still compiling"):
            result = work(chip)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        result = {"status": "failed", "error": f"{type(error).__name__}: {first_line(str(error))}"}
    return {"target": chip.name, "platform": chip.platform, **result}


def sized(chip: Chip, batch: int, work: Callable[[], dict]) -> dict:
    """The result of compiling for a batch, also where the compiler refuses it for its size."""
    try:
        return work()
    except DoesNotFit as error:
        return refused(chip, batch, error)


def refused(chip: Chip, batch: int, error: DoesNotFit) -> dict:
    """The result of a program that is too large."""
    sizes = {"batch_size": batch, "needed_bytes": error.needed, "memory_bytes": chip.memory}
    return {"status": "refused", "fits": False, "error": str(error), **sizes}


def learn(asked: LearningStep, chip: Chip) -> dict:
    say(f"{chip.name}: compiling a step of {asked.batch_size} images on {asked.mesh}")
    return sized(chip, asked.batch_size, partial(learning.describe, asked, chip))


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
    a, b = near[0], near[-1]
    more, grown = b.batch - a.batch, b.num_bytes - a.num_bytes
    return a.batch + (memory - a.num_bytes) * more / grown if more * grown > 0 else None


# --- the programs that draw ---


def described(case: Compilation) -> dict:
    """The result for a batch, as content of a JSON file. Bytes are those of one device."""
    workload, codes, pixels, there = case.workload, case.codes, case.pixels, case.chip.memory
    # the code of both programs stays on the device
    peaks = {
        "codes": codes.resident + pixels.memory.generated_code_size_in_bytes,
        "pixels": pixels.resident + codes.memory.generated_code_size_in_bytes,
    }
    decides = max(peaks, key=peaks.get)
    peak, state = peaks[decides], case.state
    pool = num_bytes(workload.plan.kv_arrays(state))
    held, parameters = num_bytes(state), num_bytes(case.networks)
    # on one device: activations, logits and what layers keep of the text
    mesh = workload.program.mesh
    need = workload.predict(case.batch_size // mesh.data, case.chip.platform, case.layers)
    promised = parameters + held + need.activations + need.condition
    return {
        "status": "compiled",
        "batch_size": case.batch_size,
        "attention": case.spec.attention or "auto",
        "segments": [[s.start, s.stop, s.length] for s in case.spec.segments],
        "layers": case.layers,
        "decode_dtype": workload.program.build.decode_dtype,
        "devices": mesh.num_devices,
        "parameter_bytes": parameters,
        "kv_pool_bytes": pool,
        "bookkeeping_bytes": held - pool,
        "peak_bytes": peak,
        "peak_of": decides,
        "memory_bytes": there,
        "fits": peak <= there,
        "promised_bytes": promised,
        "peak_over_promised": peak / promised,
        "aliased": codes.memory.alias_size_in_bytes >= held,
        "copies": codes.copies,
        "loops_of_unknown_length": codes.cost.loops + pixels.cost.loops,
        **floor.describe(case),
        "compile_s": codes.compile_s + pixels.compile_s,
        "programs": {"codes": codes.said, "pixels": pixels.said},
    }


def compiled(workload: Workload, chip: Chip, batch: int) -> Compilation:
    """Both programs for a batch. Where a kernel cannot take the shapes the next implementation is
    tried, as `Generator` does, unless the user named one."""
    say(f"{chip.name}: compiling batch {batch}, attention {workload.attention}")
    case = Compilation(workload, chip, batch)
    try:
        case.compile_codes()
    except NotImplementedError as error:
        every = implementations.choices(chip.platform, chip.capability)
        rest = every[every.index(workload.attention) + 1 :]
        if workload.program.build.attention or not rest:
            raise
        say(f"{chip.name}: {first_line(str(error))}: taking {rest[0]}")
        return compiled(replace(workload, attention=rest[0]), chip, batch)
    say(f"{chip.name}: codes in {case.codes.compile_s:.0f} s, {show_bytes(case.codes.resident)}")
    case.compile_pixels()
    return case


def draw(workloads: Mapping[str, Workload], batch: int | None, chip: Chip) -> dict:
    """The result of the programs that draw; of the largest batch that fits, with all trials, if no
    batch is given. workloads: by chip."""
    workload, results = workloads[chip.name], {}

    def result(size: int) -> dict:
        return sized(chip, size, lambda: described(compiled(workload, chip, size)))

    def attempt(size: int) -> Trial:
        results[size] = found = result(size)
        needed = found.get("peak_bytes") or found["needed_bytes"]
        verdict = "fits" if found["fits"] else "does not fit"
        say(f"{chip.name}: batch {size} takes {show_bytes(needed)}, {verdict}")
        return Trial(size, needed, found["fits"])

    if batch is not None:
        return result(batch)
    step, available = workload.program.mesh.data, chip.memory
    # first the batch whose prediction fills the chip
    predict = partial(workload.predict, platform=chip.platform)
    first = max(1, memory.largest_batch(predict, 10**5, int(available / memory.SAFETY))) * step
    found, trials = largest_batch(attempt, available, first, step)
    listed = [{"batch": t.batch, "bytes": t.num_bytes, "fits": t.fits} for t in trials]
    if found:
        return {**results[found], "largest_batch": found, "trials": listed}
    least = min(trials, key=lambda t: (t.batch, -t.num_bytes))
    why = DoesNotFit(f"not even a batch of {least.batch} fits", least.num_bytes)
    return {**refused(chip, least.batch, why), "trials": listed}
