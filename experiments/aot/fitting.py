"""The numbers of operations (`efficiencies`) from times that were measured on a chip.

Of every operation there is one time for each program that was measured, the sum over its calls
there. Two numbers are fitted to them, no more than two programs can tell:

    most operations    seconds = calls x call + sum of max(bytes / bandwidth, FLOPs / rate) / share
    products           seconds = calls x call + sum of max(bytes / (bandwidth x its share),
                       FLOPs / (rate x its share)), with the call of XLA's other kernels
    block by block     seconds = calls x call + turns x (program + max(copies x copy, computing)),
                       where memory does not decide; the time of a copy and the share of the peak
                       are given, as counted in instructions
    gaps               seconds without kernels = kernels x gap

Squares of relative errors are smallest, so a short program counts as much as a long one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.aot.efficiencies import GAPS, Efficiency
from experiments.aot.work import Work
from pallas_kernels.chips import Chip

SHARES = np.linspace(0.2, 1.0, 401)  # of the peaks that are tried for products


@dataclass(frozen=True)
class Measured:
    """A program that was measured.

    work: {work of a call: how often it is called}.
    operations: {operation: seconds of all its calls}.
    whole: seconds of the program, gaps between kernels included.
    """

    work: Mapping[Work, float]
    operations: Mapping[str, float]
    whole: float

    def of(self, operation: str) -> dict[Work, float]:
        return {w: calls for w, calls in self.work.items() if w.operation == operation}


def fit(
    programs: Sequence[Measured], chip: Chip, in_turns: Mapping[str, Efficiency]
) -> dict[str, Efficiency]:
    """{operation: its numbers} for all operations that were measured in every program, and gaps.

    in_turns: the numbers that are given for operations whose programs copy block by block.
    """
    found = {}
    for operation in programs[0].operations:
        if not all(operation in p.operations for p in programs):
            continue
        points = [(p.of(operation), p.operations[operation]) for p in programs]
        if operation in in_turns:
            found[operation] = fit_turns(points, chip, in_turns[operation])
        else:
            found[operation] = fit_share(points, chip)
    if {"products", "fusions"} <= found.keys():
        points = [(p.of("products"), p.operations["products"]) for p in programs]
        found["products"] = fit_two_shares(points, chip, found["fusions"].call)
    kernels = [sum(p.work.values()) for p in programs]
    between = [p.whole - sum(p.operations.values()) for p in programs]
    gap = fit_gap(kernels, between, [p.whole for p in programs])
    return found | {GAPS: Efficiency(gap)}


def fit_gap(kernels: Sequence[float], between: Sequence[float], whole: Sequence[float]) -> float:
    """Seconds between two kernels. Of each program: how many kernels, seconds without kernels,
    seconds of all."""
    [gap] = _least_squares(np.array([kernels]).T, between, whole)
    return gap


Points = Sequence[tuple[Mapping[Work, float], float]]  # (work of an operation, seconds of it)


def fit_share(points: Points, chip: Chip) -> Efficiency:
    """The time of a call, and one share of all peaks."""
    at_peak = Efficiency(0.0)
    calls = [sum(work.values()) for work, _ in points]
    peaks = [_seconds(work, chip, at_peak) for work, _ in points]
    seconds = [s for _, s in points]
    call, slower = _least_squares(np.array([calls, peaks]).T, seconds, seconds)
    if slower < 1:  # nothing is faster than the peaks
        left = np.subtract(seconds, peaks)
        [call], slower = _least_squares(np.array([calls]).T, left, seconds), 1.0
    return Efficiency(call, 1 / slower, 1 / slower)


def fit_two_shares(points: Points, chip: Chip, call: float) -> Efficiency:
    """A share of the bandwidth and one of the peak rate. call: seconds of a call besides."""
    each, wanted = np.meshgrid(SHARES, SHARES, indexing="ij"), 0.0
    for work, seconds in points:
        total = sum(work.values()) * call
        for w, calls in work.items():
            moving, computing = w.bytes / chip.bandwidth, w.flops / w.rate if w.flops else 0.0
            total = total + calls * np.maximum(moving / each[0], computing / each[1])
        wanted = wanted + np.square(total / seconds - 1)
    best = np.unravel_index(np.argmin(wanted), wanted.shape)
    return Efficiency(call, *(float(share[best]) for share in each))


def fit_turns(points: Points, chip: Chip, given: Efficiency) -> Efficiency:
    """The time of a call, and of a program besides its blocks. given: the other numbers."""
    seconds = [s for _, s in points]
    blocks = [_seconds(work, chip, replace(given, call=0.0, program=0.0)) for work, _ in points]
    calls = [sum(work.values()) for work, _ in points]
    turns = [
        sum(calls * -(-w.programs // chip.gpu.cores) for w, calls in work.items())
        for work, _ in points
    ]
    columns, rest = np.array([calls, turns]).T, np.subtract(seconds, blocks)
    call, program = _least_squares(columns, rest, seconds)
    return replace(given, call=call, program=program)


def _seconds(work: Mapping[Work, float], chip: Chip, efficiency: Efficiency) -> float:
    return sum(calls * w.seconds(chip, efficiency) for w, calls in work.items())


def _least_squares(
    columns: np.ndarray, wanted: Iterable[float], scale: Sequence[float]
) -> list[float]:
    """Factors of the columns, none negative, whose sum is nearest to `wanted`. scale: of each row,
    by which errors are divided."""
    rows = columns / np.asarray(scale, float)[:, None]
    target = np.asarray(wanted, float) / scale
    used = list(range(rows.shape[1]))
    while used:
        factors = np.linalg.lstsq(rows[:, used], target, rcond=None)[0]
        if factors.min() >= 0:
            break
        del used[int(factors.argmin())]
    found = np.zeros(rows.shape[1])
    found[used] = factors if used else 0.0
    return found.tolist()
