"""Running the cells of a sweep: one program per cell. It draws freely for pictures, and with the
full cache's tokens forced for logits. Finished cells are kept.

Letters: N images, L tokens, K scales.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

from experiments import batch_files, judges, processes
from experiments.batch_files import Damaged
from experiments.evaluation import metrics
from experiments.evaluation.metrics import METRICS
from experiments.generation import cache_report, time_report
from experiments.output import BatchStore, say
from experiments.parts import Shard
from experiments.processes import Stopped
from experiments.sweep.intervals import PER_IMAGE
from experiments.sweep.plan import Cell, Sweep
from experiments.sweep.tables import KEPT
from varjax.core.errors import UserError
from varjax.generation import hosts
from varjax.generation.generator import Generator
from varjax.generation.kept import kept_picture, of_image
from varjax.generation.progress import Progress
from varjax.models.model import Model
from varjax.storage.pictures import to_uint8

REFERENCE_LOGITS = 2**30  # bytes of the full cache's logits that are kept in host memory
MOST_LAYERS = 8  # in a picture of what heads kept
TIMED_RUNS = 2  # at least so many runs of a program after its first


def path_of(folder: pathlib.Path, key: str) -> pathlib.Path:
    """Return the file of a finished cell. key: of the cell."""
    return folder / f"cell-{key}.npz"


class CellRunner:
    """Runs the cells of a sweep that its folder lacks. shard: of which part; None: all. stop:
    whether the system asks to end; None: nobody listens."""

    def __init__(
        self,
        sweep: Sweep,
        store: BatchStore,
        shard: Shard | None = None,
        stop: processes.Stop | None = None,
    ):
        self.sweep, self.store, self.stop = sweep, store, stop or processes.Stop()
        distinct = list({cell.key: cell for cell in sweep.cells if cell.plan}.values())
        self.cells = distinct[shard.index :: shard.count] if shard else distinct
        self.finished = 0  # of these cells
        self._kept: dict[int, np.ndarray] = {}  # logits of the full cache, by a batch's first image

    @functools.cached_property
    def model(self) -> Model:
        """The model with its weights, loaded when it is first needed."""
        return self.sweep.load_model()

    @functools.cached_property
    def full(self) -> Generator:
        """The program of the full cache."""
        return self.compiled(self.sweep.full)

    @functools.cached_property
    def _unused(self) -> np.ndarray:
        """Tokens [N, L, ...] for programs that draw freely: every program takes given tokens, so
        that the same one draws freely and with forced tokens."""
        return self.model.token_arrays.no_tokens(len(self.sweep.condition))

    def compiled(self, cell: Cell) -> Generator:
        """Return the program of a cell. The full cache is never compressed."""
        sweep, program = self.sweep, self.sweep.program
        kv_dtype = program.dtype if cell is sweep.full else program.kv_dtype
        found = sweep.generator(self.model, cell.plan, kv_dtype, keep_logits=True)
        first = np.zeros(sweep.batch_size, np.int32)  # programs depend on shapes only
        found.compile(sweep.condition.take(first), self._unused[first])
        timing = found.timing
        say(f"  compiled in {timing.compile_s:.1f} s (compilation cache {timing.cache})")
        return found

    def _drawn(self, program: Generator) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Draw all images freely; yield (image numbers, results) batch by batch. `Stopped` after
        the batch that is drawn when the system asks to end, unless it is the last."""
        condition, seed = self.sweep.condition, self.sweep.seed
        every, size = np.arange(len(condition)), program.batch_size
        numbers = self.stop.steps(np.split(every, range(size, len(every), size)))
        options = {"seed": seed, "given": self._unused, "given_scales": 0}
        for index, results in program.batches(condition, numbers, **options):
            yield index, results
        if self.stop.asked and index[-1] != every[-1]:
            raise self._stopped()

    def _run_again(
        self, program: Generator, index: np.ndarray, given: np.ndarray, scales: int | None = None
    ) -> dict[str, jax.Array]:
        """Return the results of images `index` with tokens [N, L, ...] of the first scales given;
        None: of all."""
        condition, seed = self.sweep.condition, self.sweep.seed
        return program.run_images(
            condition, index, seed=seed, given=given, given_scales=scales, keep_cache=False
        )[0]

    def _time(self, program: Generator) -> None:
        """Run a program until it was timed often enough."""
        index = np.arange(self.sweep.batch_size) % len(self.sweep.condition)
        while len(program.timing.runs) <= TIMED_RUNS:
            self._run_again(program, index, self._unused, 0)

    def _logits(self, program: Generator, index: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the logits float32 [B, L, ...] of images `index`, `tokens` [N, L, ...] forced."""
        return np.asarray(hosts.gathered(self._run_again(program, index, tokens)["logits"]))

    def path(self, cell: Cell) -> pathlib.Path:
        """Return the file of a finished cell."""
        return path_of(self.store.work.path, cell.key)

    def keep(self, cell: Cell, row: dict, arrays: dict[str, np.ndarray]) -> None:
        """Store the numbers and arrays of a cell, sealed (`batch_files`), in the first process."""
        if hosts.is_first():
            batch_files.write_batch(self.path(cell), self.store.work.digest, arrays, row)

    def results(self, cell: Cell) -> dict | None:
        """Return {"row": numbers, "samples": uint8 images, ...} of a finished cell. None if it must
        be run: the file is missing, or damaged in any way. Its name is a digest of the cell."""
        with contextlib.suppress(Damaged, OSError):
            row, arrays = batch_files.read_with(self.path(cell))
            return arrays | {"row": row}
        return None

    def all_results(self) -> dict[str, dict]:
        """Return the results of the full cache and of every cell that could run, by their keys."""
        found = {}
        for cell in (self.sweep.full, *self.cells):
            found[cell.key] = self.results(cell)
            if found[cell.key] is None:  # it was sound when it was written
                raise UserError(
                    f"{self.path(cell)} is damaged: start the same command again, which runs this "
                    "cell anew"
                )
        return found

    def run(self) -> None:
        """Run every cell that is not stored yet, the full cache first.

        `Stopped` if the system asks to end: after the batch that is drawn. Cells that are finished
        stay; what was drawn of others is drawn anew.
        """
        full, cells = self.sweep.full, self.cells
        there = [hosts.is_first() and self.results(c) is not None for c in (full, *cells)]
        stored, *finished = processes.from_first(np.array(there))
        missing = [cell for cell, found in zip(cells, finished, strict=True) if not found]
        self.finished = len(cells) - len(missing)
        if self.finished:
            say(f"{self.finished} of {len(cells)} cells are there already, continuing")
        if stored and not missing:
            return
        if not stored:
            self._run_full()
        reference = self._reference() if missing else {}
        _ = self.full  # compile it now, or its compilation would count as time of the first cell
        progress = Progress("cells", len(cells), first=self.finished)
        for number, cell in enumerate(missing, self.finished + 1):
            if self.stop.asked:  # before it is compiled
                raise self._stopped()
            progress.note(f"cell {number}/{len(cells)}: {cell.label} at {cell.budget:g}")
            self._run_cell(cell, reference)
            self.finished = number
            progress.update(number)
        self._kept.clear()

    def _stopped(self) -> Stopped:
        return Stopped(self.finished, len(self.cells), "cells")

    def _reference(self) -> dict[str, np.ndarray]:
        """Return tokens [N, L, ...] and images float32 [N, H, W, 3] of the full cache."""
        count, size = len(self.sweep.condition), self.sweep.model.pixels
        found = {"tokens": self._unused, "images": np.zeros((count, *size, 3), np.float32)}
        if hosts.is_first():
            stored = self.results(self.sweep.full)
            found = {"tokens": stored["tokens"], "images": stored["pictures"]}
        return processes.from_first(found)

    def _run_full(self) -> None:
        sweep = self.sweep
        say(f"full cache: {len(sweep.condition)} images in batches of {sweep.batch_size}")
        parts = [(r["tokens"], r["images"]) for _, r in self._drawn(self.full)]
        tokens, pictures = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        self._time(self.full)
        samples = to_uint8(pictures[: sweep.samples])
        row = describe_cell(sweep.full, self.full)
        agrees = sweep.judges.agreement(to_uint8(pictures), sweep.condition.numbers)
        if agrees is not None:
            row["fidelity"] = {judges.AGREEMENT: float(agrees.mean())}
        arrays = {"tokens": tokens, "pictures": pictures, "samples": samples}
        self.keep(sweep.full, row, arrays)

    def _run_cell(self, cell: Cell, reference: dict[str, np.ndarray]) -> None:
        """Run a cell. reference: of `_reference`."""
        tokens, sweep = reference["tokens"], self.sweep
        program = self.compiled(cell)
        found: list[dict] = []
        kept: list[np.ndarray] = []
        maps: dict[str, np.ndarray] = {}
        for index, results in self._drawn(program):
            close = metrics.compare_images({n: a[index] for n, a in reference.items()}, results)
            mine, full = (to_uint8(a) for a in (results.pop("images"), reference["images"][index]))
            close |= sweep.judges.numbers(full, mine, sweep.condition.numbers[index])
            kept += [mine[: max(0, sweep.samples - int(index[0]))]]
            if sweep.save_kept and not maps:
                maps[KEPT] = self._picture_of_kept(cell, mine[0])
            results.clear()  # or its logits would stay in memory beside the forced ones
            first, kept_logits = int(index[0]), self._kept
            if (logits := kept_logits.get(first)) is None:
                # computed again for a cell where `REFERENCE_LOGITS` did not suffice
                logits = self._logits(self.full, index, tokens)
                if sum(a.nbytes for a in kept_logits.values()) + logits.nbytes <= REFERENCE_LOGITS:
                    kept_logits[first] = logits
            forced_full = {"forced_logits": logits}
            forced_mine = {"forced_logits": self._logits(program, index, tokens)}
            found.append(close | metrics.compare_images(forced_full, forced_mine))
        self._time(program)
        arrays = metrics.joined(found)
        close = metrics.summarize(arrays)
        row = describe_cell(cell, program) | {"fidelity": close}
        row["samples_fidelity"] = {n: a[: sweep.samples].tolist() for n, a in arrays.items()}
        numbers = {f"{PER_IMAGE}{name}": values for name, values in arrays.items()}
        self.keep(cell, row, {"samples": np.concatenate(kept), **maps, **numbers})
        shown = (f"{m.column} {m.show(close[key])}" for key, m in METRICS.items() if key in close)
        say(f"  {', '.join(shown)}")

    def _picture_of_kept(self, cell: Cell, image: np.ndarray) -> np.ndarray:
        """Return what heads kept of the first image, uint8 [height, width, 3], of some layers if
        there are many. A program for it alone tells what a policy decides: that of the cell is
        timed, and its batch might not fit into memory with all that was ever held."""
        contents, sweep = None, self.sweep
        if not cell.plan.static_content:
            alone = dataclasses.replace(sweep, batch_size=1).generator(
                self.model, cell.plan, sweep.program.kv_dtype, keep_contents=True
            )
            first = sweep.condition.take(np.zeros(1, np.int32))
            ((_, results),) = alone.batches(first, seed=sweep.seed)
            contents = results["contents"]
        depth = cell.plan.geometry.num_layers
        layers = np.linspace(0, depth - 1, min(depth, MOST_LAYERS)).round().astype(int)
        return kept_picture(cell.plan, of_image(cell.plan, contents), image, layers.tolist())


def describe_cell(cell: Cell, generator: Generator) -> dict:
    """Return everything about a cell except its fidelity. Byte counts are for one batch.
    `live_tokens` and `used_slots` int [K, layers] count one cache row after each store."""
    plan, kv = cell.plan, cache_report(generator)
    return {
        "label": cell.label,
        "policy": cell.name,
        "policy_args": cell.arguments,
        "budget": cell.budget,
        "plan": plan.digest,
        "kv": {
            **kv,
            "pool_slots": plan.pool_tokens,
            "slot_bytes": kv["planned_bytes"] // max(1, plan.pool_tokens),
            "dense_slots": plan.geometry.dense_tokens,
        },
        "time": {**time_report(generator), "timed_runs": len(generator.timing.runs) - 1},
        "live_tokens": plan.live_tokens,
        "used_slots": plan.used_slots,
    }
