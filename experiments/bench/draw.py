"""`experiments.bench --draw`: codes and pixels of published models with random weights, timed and
profiled on the device that is there.

A kernel is what the device runs at once: on a GPU a kernel of a stream, on a TPU an operation of
XLA, on a CPU an operation of XLA that its runtime calls. Loops contain the kernels of their bodies;
only the rest of their time is their own.
"""

import contextlib
import gc
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
from jax.profiler import ProfileData, ProfileEvent, ProfileOptions

import varjax
from experiments.bench import random_models
from experiments.bench.measured import columns, show_time
from pallas_kernels import bench
from varjax.core.errors import choose
from varjax.generation import memory
from varjax.generation.compiled import Weights
from varjax.generation.generator import Generator
from varjax.generation.memory import show_bytes
from varjax.generation.program import OutOfMemory
from varjax.storage.parameters import peak_bytes

ALL = "all"
DEVICE, OPERATIONS, STREAM = "/device:", "XLA Ops", "Stream"  # names of planes and lines
OPERATION = "hlo_op"  # what a CPU's events of kernels have
SHOWN = 8  # kernels of a program that are printed
# Kinds of kernels by what is in their names on a GPU, the first that fits. A scale ends with the
# choice of its tokens, and the next one has begun when there are norms again.
SAMPLE, NORMS = "sample", "norms"
KINDS = {
    "finish": "finish",
    "attention": "attention",
    NORMS: "add_and_normalize|to_8_bits",
    SAMPLE: "^sample",
    "products": "nvjet|gemm|cutlass|gemv|splitK",
}
CLOCKS = ("clocks.sm", "power.draw")  # of `nvidia-smi`: MHz, W
# of the full cache, where a policy keeps less; the second in models that are cut down
SHARE, SMALL_SHARE = 0.1, 0.4


@dataclass(frozen=True)
class Task:
    """A batch that is drawn. model: of `random_models.PUBLISHED`."""

    model: str
    images: int
    policy: str = "full"

    @property
    def name(self) -> str:
        policy = "" if self.policy == "full" else f"-{self.policy}"
        return f"{self.model}{policy}-b{self.images}"


# What matters most comes first, since a time limit may end the list. The second policy knows
# beforehand what it keeps.
TASKS = {
    task.name: task
    for policy in ("full", "streaming")
    for images in (1, 8, 64)
    for task in (Task(model, images, policy) for model in random_models.PUBLISHED)
}


def chosen(names: Collection[str], small: bool) -> list[Task]:
    """The tasks of these names, each once; `UserError` with all names for one that is unknown. All
    of small models are those of one image."""
    for name in names:
        choose("task", name, (ALL, *TASKS))
    if ALL in names:
        return [task for task in TASKS.values() if task.images == 1 or not small]
    return [TASKS[name] for name in dict.fromkeys(names)]


def rows(tasks: Collection[Task], *, small: bool, repeats: int, until: float) -> Iterator[dict]:
    """A row for each task, as soon as it is done. One that fails says why in "error", one that was
    not drawn in "note", and the next one begins.

    small: models of two layers in place of the published ones.
    until: `time.monotonic` after which none begins.
    """
    for task in tasks:
        row = {"task": task.name, **asdict(task), "small": small}
        if time.monotonic() >= until:
            yield row | {"note": "not begun: the time is up"}
            continue
        try:
            row |= drawn(task, small, repeats)
        except Exception as error:  # compilers and devices have many ways to fail
            row["error"] = bench.short(error, 400)
        yield row
        jax.clear_caches()  # compiled programs and their constants hold memory of the device
        gc.collect()


def drawn(task: Task, small: bool, repeats: int) -> dict:
    """Measurements of a task (docs/reference/files.md)."""
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = random_models.abstract(task.model, small)
    share = None if task.policy == "full" else SMALL_SHARE if small else SHARE
    plan = varjax.plan(model, policy=task.policy, budget=share)
    need = memory.predict(
        model, plan, task.images, dtype, dtype, text_tokens=random_models.TEXT
    ).total
    there = memory.available_bytes()
    if there is not None and need > memory.SAFETY * there:
        return {"note": f"does not fit: needs {show_bytes(need)}, {show_bytes(there)} are there"}
    model = random_models.with_weights(model, dtype)
    generator = Generator(model, plan=plan, batch_size=task.images)
    try:
        return {"dtype": dtype, "budget": share or 1.0, **_times(generator, repeats)}
    except OutOfMemory as error:
        return {"note": f"does not fit: {bench.short(error)}"}


def _times(generator: Generator, repeats: int) -> dict[str, object]:
    """Compile both programs, draw a batch, then time each of them by itself."""
    networks, numbers = generator.model.networks, np.arange(generator.batch_size, dtype=np.int32)
    condition = random_models.condition(networks["transformer"], generator.batch_size)
    with phases() as compiling:
        results, _ = generator.run_batch(condition, numbers, keep_cache=False)
    timing, code_map = generator.timing, results["code_map"]
    row = {"compile_seconds": timing.compile_s, "compilation_cache": timing.cache}
    row["compile_phases"] = compiling
    row["finite"] = bool(np.isfinite(results["images"]).all())
    told, weights = generator.arguments(condition, numbers), Weights(networks)
    arrays = weights.arrays()

    def for_codes() -> tuple:  # each run takes its cache away
        state = jax.block_until_ready(generator.empty_state())
        return arrays, state, *told

    for_pixels = arrays[: weights.of_codec], code_map
    with clocks() as row["clocks"]:
        row["codes"] = _measured(generator.program.codes, for_codes, repeats)
        row["pixels"] = _measured(generator.program.pixels, lambda: for_pixels, repeats)
    stats = jax.local_devices()[0].memory_stats() or {}
    return row | {"process_peak_bytes": stats.get("peak_bytes_in_use")}


@contextlib.contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Seconds of each phase of compiling inside, as JAX reports them, those of at least 10 ms."""
    found, seconds = {}, Counter()

    def heard(event: str, duration: float, **_) -> None:
        name = event.rpartition("/")[2]
        if name.endswith("_duration"):  # others are of the compilation cache
            seconds[name.removesuffix("_duration")] += duration

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
        found |= {name: duration for name, duration in seconds.items() if duration >= 0.01}


@contextlib.contextmanager
def clocks() -> Iterator[dict[str, dict[str, float]]]:
    """Least, median and largest of `CLOCKS` inside, ten times a second. Nothing is found without
    `nvidia-smi`."""
    found, program = {}, shutil.which("nvidia-smi")
    if program is None:
        yield found
        return
    query = [f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits", "-lms", "100"]
    with tempfile.TemporaryFile("w+") as file:
        watching = subprocess.Popen([program, *query], stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            watching.terminate()
            watching.wait()
            file.seek(0)
            rows = [line.split(",") for line in file if line.endswith("\n")]  # the last may be cut
    with contextlib.suppress(ValueError):  # what a card does not tell is a word
        for name, values in zip(CLOCKS, zip(*rows, strict=True), strict=True):
            numbers = list(map(float, values))
            three = min(numbers), statistics.median(numbers), max(numbers)
            found[name] = dict(zip(("least", "median", "most"), three, strict=True))


def _measured(
    compiled: jax.stages.Compiled, arguments: Callable[[], tuple], repeats: int
) -> dict[str, object]:
    """Times of a program that has run before, and its profile. arguments: makes those of a run."""
    seconds = []
    for _ in range(repeats):
        given = arguments()
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        seconds.append(time.perf_counter() - start)
    given = arguments()
    profile = profiled(lambda: compiled(*given))
    times = {"seconds": statistics.median(seconds), "all_seconds": seconds}
    return times | {"peak_bytes": peak_bytes(compiled), **profile}


def profiled(run: Callable[[], object]) -> dict[str, object]:
    """Run a compiled program once under the profiler: seconds until its results were there, seconds
    from the start of the first kernel to the end of the last one, and the kernels with seconds of
    their own, the longest first (docs/reference/files.md)."""
    options = ProfileOptions()
    options.python_tracer_level = 0  # every call of Python would be an event
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            jax.block_until_ready(run())
            wall = time.perf_counter() - start
        (path,) = Path(folder).rglob("*.xplane.pb")
        return of_lines(wall, kernel_lines(ProfileData.from_file(str(path))))


def kernel_lines(profile: ProfileData) -> Iterator[list[ProfileEvent]]:
    """The kernels of each stream or thread, of all devices or, without one, of the CPU."""
    planes = list(profile.planes)
    devices = [list(plane.lines) for plane in planes if plane.name.startswith(DEVICE)]
    for lines in devices:
        streams = [line for line in lines if line.name.startswith(STREAM)]
        for line in streams or [line for line in lines if line.name == OPERATIONS]:
            yield list(line.events)
    for line in () if devices else (line for plane in planes for line in plane.lines):
        yield [event for event in line.events if OPERATION in dict(event.stats)]


def of_lines(wall: float, lines: Iterable[list[ProfileEvent]]) -> dict[str, object]:
    """Summary of a run of `wall` seconds, as `profiled` returns it. lines: `kernel_lines`."""
    own, calls, starts, ends = Counter(), Counter(), [], []
    lines = list(lines)
    for events in lines:
        inside: list[ProfileEvent] = []  # calls that have not ended, each within the one before
        for event in sorted(events, key=lambda e: (e.start_ns, -e.duration_ns)):
            while inside and inside[-1].end_ns <= event.start_ns:
                inside.pop()
            if inside:
                own[inside[-1].name] -= min(event.end_ns, inside[-1].end_ns) - event.start_ns
            own[event.name] += event.duration_ns
            calls[event.name] += 1
            inside.append(event)
            starts.append(event.start_ns)
            ends.append(event.end_ns)
    busy = own.total()
    return {
        "profiled_seconds": wall,
        "span_seconds": 1e-9 * (max(ends, default=0) - min(starts, default=0)),
        "kernel_seconds": 1e-9 * busy,
        "calls": calls.total(),
        "kernels": [
            {"name": name, "calls": calls[name], "us": 1e-3 * ns, "share": ns / busy}
            for name, ns in own.most_common()
        ],
        "scales": by_scale(lines),
    }


def by_scale(lines: Iterable[list[ProfileEvent]]) -> list[dict[str, float]]:
    """Microseconds of kernels by kind (`KINDS`) in every scale, in their order. Empty where there
    are no kernels that say where a scale ends."""
    found, chosen = [Counter()], False
    for event in sorted((e for events in lines for e in events), key=lambda e: e.start_ns):
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, event.name)), "other")
        if chosen and kind == NORMS:
            found.append(Counter())
        chosen = kind == SAMPLE or chosen and kind != NORMS
        found[-1][kind] += 1e-3 * event.duration_ns
    return [dict(scale) for scale in found] if len(found) > 1 else []


def text(row: dict) -> str:
    """A row in lines: times, and the kernels that take longest."""
    if "codes" not in row:
        return f"{row['task']}: {row.get('error') or row['note']}"
    compiled = f"compiled in {row['compile_seconds']:.1f} s (cache {row['compilation_cache']})"
    lines = [f"{row['task']}{' (cut down)' * row['small']}: {compiled}"]
    for what in ("compile_phases", "clocks"):
        if said := row.get(what):
            lines.append(f"{what}: {', '.join(map(_said, said.items()))}")
    for name in ("codes", "pixels"):
        found, times = row[name], ("seconds", "span_seconds", "kernel_seconds")
        kernels = [
            (f"{k['us']:.1f}", f"{k['share']:.1%}", str(k["calls"]), k["name"][:80])
            for k in found["kernels"][:SHOWN]
        ]
        wall, span, busy = (show_time(found[key]) for key in times)
        lines += [
            "",
            f"{name}: {wall}; profiled, {found['calls']} kernels in {span} take {busy}; "
            f"{show_bytes(found['peak_bytes'])}",
            columns([("us", "share", "calls", "kernel"), *kernels], ">>><"),
        ]
    return "\n".join([*lines, ""])


def _said(item: tuple[str, float | dict[str, float]]) -> str:
    name, value = item
    if isinstance(value, dict):
        return f"{name} {value['least']:g} to {value['most']:g}, median {value['median']:g}"
    return f"{name} {value:.1f} s"
