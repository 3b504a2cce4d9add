"""One process per target: some errors of a compiler end the process.

The parent calls `start`, which runs the same command again for one target; there `work` compiles
and writes what it found into a file.
"""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import jax

from experiments import aot_report
from experiments.aot_program import DoesNotFit, Request, compile_programs, first_line
from experiments.aot_search import Trial, largest_batch
from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax import memory
from varjax.memory import show_bytes

LAST_LINES = 12
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "varjax")


def start(target: str, flags: Sequence[str]) -> dict:
    """The result of a target, compiled by a process of its own.

    flags: those of this command; the last one of a kind counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        own = (f"--target={target}", f"--worker={path}")
        command = [sys.executable, "-m", "experiments.aot", *flags, *own]
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
    """The environment of a process that compiles, which finds this package wherever it was started.

    A cache of programs would keep the compiler from writing what we want to read.
    """
    place = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    return {**os.environ, **chips.quiet_environment(), **own}


def _forward(lines, target: str) -> list[str]:
    """Print the worker's own progress lines; keep the last ones of everything else."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    for line in lines:
        if line.startswith(f"{target}: "):
            print(line, end="", file=sys.stderr, flush=True)
        elif line.strip():
            last.append(line.rstrip()[:300])
    return list(last)


# --- in the process of a target ---


def work(request: Request, chip: Chip, batch: int | None, temporaries: int, path: str) -> None:
    """Compile for a batch, or for the largest that fits (None), and write the result to `path`."""
    try:
        if batch is None:
            result = _search(request, chip, temporaries)
        else:
            result, _ = _attempt(request, chip, batch, temporaries)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        result = {"status": "failed", "error": f"{type(error).__name__}: {first_line(str(error))}"}
    Path(path).write_text(json.dumps(result))


def _attempt(
    request: Request, chip: Chip, batch: int, temporaries: int, stop_early: bool = False
) -> tuple[dict, Trial]:
    """One compilation: the result and what a search needs of it."""
    _say(f"{chip.name}: compiling batch {batch}, attention {request.attention}")
    try:
        compiled = compile_programs(
            request, chip, batch, stop_early=stop_early, say=lambda s: _say(f"{chip.name}: {s}")
        )
    except NotImplementedError as error:
        if not request.or_reference:
            raise
        _say(f"{chip.name}: {first_line(str(error))}: taking the reference")
        reference = dataclasses.replace(request, attention="reference", or_reference=False)
        return _attempt(reference, chip, batch, temporaries, stop_early)
    except DoesNotFit as error:
        result = {
            "status": "refused",
            "batch_size": batch,
            "fits": False,
            "needed_bytes": error.needed,
            "memory_bytes": chip.memory,
            "error": str(error),
        }
        trial = Trial(batch, error.needed, False)
    else:
        result = aot_report.describe(request, compiled, temporaries)
        trial = Trial(batch, result["peak_bytes"], result["fits"])
    verdict = "fits" if trial.fits else "does not fit"
    _say(f"{chip.name}: batch {batch} takes {show_bytes(trial.num_bytes)}, {verdict}")
    return result, trial


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _search(request: Request, chip: Chip, temporaries: int) -> dict:
    """The result of the largest batch that fits, with all trials."""
    results = {}

    def attempt(batch: int) -> Trial:
        results[batch], trial = _attempt(request, chip, batch, temporaries, stop_early=True)
        return trial

    step = request.mesh.data
    found, trials = largest_batch(
        attempt, chip.memory, first=_first_guess(request, chip), step=step
    )
    listed = [{"batch": t.batch, "bytes": t.num_bytes, "fits": t.fits} for t in trials]
    if not found:
        smallest = min(results)
        return {
            **results[smallest],
            "status": "refused",
            "needed_bytes": min(trials, key=lambda t: t.batch).num_bytes,
            "error": f"not even a batch of {smallest} fits",
            "trials": listed,
        }
    return {**results[found], "largest_batch": found, "trials": listed}


def _first_guess(request: Request, chip: Chip) -> int:
    """The batch whose prediction fills the chip."""
    model, mesh = request.model, request.mesh

    def predict(images: int) -> memory.Prediction:
        sizes = (images, request.dtype, request.kv_dtype)
        return memory.predict(request.plan, model.transformer, model.codec, *sizes)

    per_device = memory.largest_batch(predict, 10**5, int(chip.memory / memory.SAFETY))
    return max(1, per_device) * mesh.data


def versions() -> dict[str, str]:
    """Versions of what compiled."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
