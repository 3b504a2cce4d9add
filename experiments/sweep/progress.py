"""How far a sweep is: finished cells, compilations ahead, time left."""

from collections.abc import Hashable, Sequence

import jax
import numpy as np

from experiments.sweep.plan import Cell, Sweep
from varjax.engine import compilation_cache
from varjax.progress import TimeLeft


def program_of(sweep: Sweep, cell: Cell) -> Hashable:
    """Return a key that is equal for cells with the same compiled program: everything static, and
    the shapes of what depends on the plan. The compilation cache has such a program already when
    the second cell asks for it."""
    generator = sweep.cell_generator(sweep.model, cell)
    drawing, numbers = generator.drawing, np.zeros(sweep.batch_size, np.int32)
    inputs = drawing.for_images(drawing.shared_inputs(sweep.model.transformer), numbers)
    leaves, structure = jax.tree.flatten((jax.eval_shape(generator.empty_state), inputs))
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    return generator.spec, structure, shapes


class SweepProgress:
    """Counts cells, and measures compilations and cells to predict the time left.

    done: finished cells, which may include the full cache.
    ahead: cells still to be compiled, the full cache first, since all cells need its program.
    """

    def __init__(self, sweep: Sweep, done: Sequence[Cell], ahead: Sequence[Cell]):
        cells = {cell.key: cell for cell in (*done, *ahead)}
        self._programs = {key: program_of(sweep, cell) for key, cell in cells.items()}
        compiled = {self._programs[cell.key] for cell in done}
        self._ahead: dict[str, bool] = {}  # {cell: is its program expected in the cache?}
        for key in (cell.key for cell in ahead):
            self._ahead[key] = compilation_cache.is_on() and self._programs[key] in compiled
            compiled.add(self._programs[key])
        self.total = len(cells) - 1  # without the full cache
        self.missing = sum(cell is not sweep.full for cell in ahead)
        self._left = TimeLeft()

    def compiled(self, cell: Cell, seconds: float) -> None:
        """Count the compilation of a cell's program."""
        self._left.measured("known" if self._ahead.pop(cell.key) else "new", seconds)

    def finished(self, seconds: float) -> None:
        """Count a finished cell. seconds: from its compilation to its end."""
        self.missing -= 1
        self._left.measured("cell", seconds)

    def compilations(self) -> str:
        """Return `7 compilations ahead (5 programs, 2 expected from the compilation cache)`."""
        count, known = len(self._ahead), sum(self._ahead.values())
        differ = len({self._programs[key] for key in self._ahead})
        said = f"{count or 'no'} compilation{'s'[count == 1 :]} ahead"
        notes = [f"{differ} program{'s'[differ == 1 :]}"] if differ < count else []
        notes += [f"{known} expected from the compilation cache"] if known else []
        return f"{said} ({', '.join(notes)})" if notes else said

    def text(self) -> str:
        """Return one line: finished cells, compilations ahead, time left."""
        done, known = self.total - self.missing, sum(self._ahead.values())
        left = self._left.text(new=len(self._ahead) - known, known=known, cell=self.missing)
        parts = [f"{done} of {self.total} cells done", self.compilations(), left]
        return ", ".join(filter(None, parts))
