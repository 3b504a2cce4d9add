"""How long the kernels of a program take, by JAX's profiler.

A kernel is what the device runs at once: on a GPU a kernel of a stream, on a TPU an operation of
XLA, on a CPU an operation of XLA that its runtime calls. Loops contain the kernels of their bodies;
only the rest of their time is their own.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileEvent, ProfileOptions

from experiments.bench.report import columns

DEVICE, OPERATIONS, STREAM = "/device:", "XLA Ops", "Stream"  # names of planes and lines
OPERATION = "hlo_op"  # what a CPU's events of kernels have


@dataclass(frozen=True)
class Kernel:
    """All calls of a kernel in a run. seconds: of its own."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """One profiled run.

    wall: seconds until its results were there. span: seconds from the start of the first kernel to
    the end of the last one. kernels: the longest first.
    """

    wall: float
    span: float
    kernels: tuple[Kernel, ...]

    @property
    def busy(self) -> float:
        """Seconds of all kernels."""
        return sum(kernel.seconds for kernel in self.kernels)

    def as_json(self) -> dict:
        calls, busy = sum(k.calls for k in self.kernels), self.busy
        kernels = [
            {"name": k.name, "calls": k.calls, "us": 1e6 * k.seconds, "share": k.seconds / busy}
            for k in self.kernels
        ]
        times = {"profiled_seconds": self.wall, "span_seconds": self.span, "kernel_seconds": busy}
        return times | {"calls": calls, "kernels": kernels}


def table(program: dict, most: int) -> str:
    """The kernels of a program (`Profile.as_json`) that take longest. most: lines of them."""
    rows = [
        (f"{k['us']:.1f}", f"{k['share']:.1%}", str(k["calls"]), k["name"][:80])
        for k in program["kernels"][:most]
    ]
    return columns([("us", "share", "calls", "kernel"), *rows], ">>><")


def profiled(run: Callable[[], object]) -> Profile:
    """Run a compiled program once under the profiler."""
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


def of_lines(wall: float, lines: Iterable[list[ProfileEvent]]) -> Profile:
    """The profile of a run that took `wall` seconds. lines: `kernel_lines`."""
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
    kernels = tuple(Kernel(name, calls[name], 1e-9 * ns) for name, ns in own.most_common())
    return Profile(wall, 1e-9 * (max(ends, default=0) - min(starts, default=0)), kernels)
