"""How long the kernels of a program take, by JAX's profiler.

A kernel is what the device runs at once: on a GPU a kernel of a stream, on a TPU an operation of
XLA, on a CPU an operation of XLA that its runtime calls. Loops contain the kernels of their bodies;
only the rest of their time is their own.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileEvent, ProfileOptions

from experiments.bench.measured import columns

DEVICE, OPERATIONS, STREAM = "/device:", "XLA Ops", "Stream"  # names of planes and lines
OPERATION = "hlo_op"  # what a CPU's events of kernels have


def table(program: dict, most: int) -> str:
    """The kernels of a program (`profiled`) that take longest. most: lines of them."""
    rows = [
        (f"{k['us']:.1f}", f"{k['share']:.1%}", str(k["calls"]), k["name"][:80])
        for k in program["kernels"][:most]
    ]
    return columns([("us", "share", "calls", "kernel"), *rows], ">>><")


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
    """What `profiled` says of a run that took `wall` seconds. lines: `kernel_lines`."""
    own, calls, starts, ends = Counter(), Counter(), [], []
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
    }
