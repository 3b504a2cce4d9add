"""Times of programs."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Timing:
    """Times of a generator, in seconds.

    compile_s: tracing and compiling.
    cache: "warm" if the program that draws codes came from the compilation cache, "cold" if it was
      compiled, "off" if there is no cache.
    runs: each call of the compiled programs, pixels included.
    """

    compile_s: float = 0.0
    cache: str = "off"
    runs: list[float] = field(default_factory=list)

    @property
    def first_run_s(self) -> float | None:
        return self.runs[0] if self.runs else None

    @property
    def steady_s(self) -> float | None:
        """Median of the runs after the first one; the first one if it is alone; None if there are
        none."""
        # the first run also loads kernels and fills caches; the median leaves out what others
        # disturb
        return float(np.median(self.runs[1:] or self.runs)) if self.runs else None
