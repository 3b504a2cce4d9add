"""Timing the tiles of a kernel's call and choosing the best."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.bench import report
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.ragged_attention import tune
from pallas_kernels.ragged_attention.config import Config


@dataclass(frozen=True)
class Best:
    """The fastest tiles of a call.

    tiles: None if none work; `note` then says why.
    seconds: of these tiles. first: of the heuristic's, infinite if they do not work.
    tried: how many tiles were timed.
    """

    tiles: Config | None
    seconds: float
    first: float
    tried: int
    note: str = ""

    @property
    def words(self) -> str:
        """The tiles, and what they gain."""
        gain = f"{self.first / self.seconds:.2f} times as fast as the heuristic's"
        gain = "the heuristic's do not work" if math.isinf(self.first) else gain
        return f"{self.tiles}, {report.show_time(self.seconds)}, {gain}"


def best(
    operation: str,
    spec: ArgSpec,
    implementation: str,
    repeats: int,
    *,
    most_seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Best:
    """Time all tiles of a call, or as many as `most_seconds` allow."""
    start, trials = clock(), []
    for trial in tune.trials(operation, spec, implementation, repeats):
        trials.append(trial)
        if clock() - start > most_seconds:
            break
    tiles, seconds, note = min(trials, key=lambda trial: trial[1])
    works = not math.isinf(seconds)
    return Best(tiles if works else None, seconds, trials[0][1], len(trials), note)


def of_shapes(
    operation: str, specs: Sequence[ArgSpec], implementation: str, repeats: int
) -> list[tuple[ArgSpec, Config]]:
    """The fastest tiles of every shape, without the shapes for which none work. Prints what it
    finds."""
    found = []
    for spec in specs:
        fastest = best(operation, spec, implementation, repeats)
        if fastest.tiles is None:
            why = f"no tiles work: {fastest.note}"
            print(f"error: {operation} {spec.name}: {why}", file=sys.stderr)
            continue
        found.append((spec, fastest.tiles))
        print(f"{operation} {spec.name}: {fastest.words}", flush=True)
    return found
