"""Timing the tiles of a kernel's call and choosing the best."""

import math
import sys
from collections.abc import Sequence

from experiments.bench import report
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.ragged_attention import tune
from pallas_kernels.ragged_attention.config import Config


def fastest(
    operation: str, specs: Sequence[ArgSpec], implementation: str, repeats: int
) -> list[tuple[ArgSpec, Config]]:
    """The fastest tiles of every shape, without the shapes for which none work. Prints what it
    finds."""
    found = []
    for spec in specs:
        trials = list(tune.trials(operation, spec, implementation, repeats))
        tiles, seconds, note = min(trials, key=lambda trial: trial[1])
        if math.isinf(seconds):
            print(f"error: {operation} {spec.name}: no tiles work: {note}", file=sys.stderr)
            continue
        found.append((spec, tiles))
        gain = _gain(trials[0][1], seconds)
        print(f"{operation} {spec.name}: {tiles}, {report.show_time(seconds)}, {gain}", flush=True)
    return found


def _gain(heuristic: float, best: float) -> str:
    """What tuning gains over the heuristic's tiles, whose seconds are infinite if they fail."""
    if math.isinf(heuristic):
        return "the heuristic's do not work"
    return f"{heuristic / best:.2f} times as fast as the heuristic's"
