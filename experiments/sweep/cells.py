"""Running the cells of a sweep: one program per cell, free-running for pictures and with the full
cache's tokens forced for logits; finished cells are kept.

Letters: N images, L tokens, K scales.
"""

import contextlib
import json
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from experiments import fidelity
from experiments.run.folder import RunFolder
from experiments.sweep.plan import Cell, SweepSettings
from varjax.api import Generator, Model
from varjax.io import images
from varjax.metrics import logits, pixel
from varjax.storage.atomic import new_file

REFERENCE_LOGITS = 2**30  # bytes of the full cache's logits that are kept in host memory
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
TIMED_RUNS = 2  # at least so many runs of a program after its first


def make_generator(sweep: SweepSettings, model: Model, cell: Cell) -> Generator:
    """The program of a cell. It always takes given tokens, so that one serves both ways of
    running."""
    return sweep.generator(
        model, cell.policy, cell.plan, kv_dtype=sweep.storage(cell), keep_logits=True
    )


def free(sweep: SweepSettings, generator: Generator):
    """Batches whose tokens are drawn."""
    unused = generator.model.pipeline.no_tokens(len(sweep.condition))
    return generator.batches(sweep.condition, seed=sweep.seed, given=unused, given_scales=0)


@dataclass(eq=False)
class Reference:
    """The full cache on all images.

    tokens: [N, L, ...]; pictures: float32 [N, H, W, 3].
    start: compiles its program, which is needed only while cells are missing.
    """

    tokens: np.ndarray
    pictures: np.ndarray
    start: Callable[[], Generator]
    sweep: SweepSettings
    stored: dict[int, np.ndarray] = field(default_factory=dict)

    def results(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """Tokens and images of images `index`."""
        return {"tokens": self.tokens[index], "images": self.pictures[index]}

    def logits(self, index: np.ndarray) -> np.ndarray:
        """float32 [B, L, ...] at the forced tokens for images `index`; computed anew where host
        memory does not hold them."""
        first = int(index[0])
        if first in self.stored:
            return self.stored[first]
        found = np.asarray(forced_logits(self.sweep, self.start(), self.tokens, index))
        if sum(a.nbytes for a in self.stored.values()) + found.nbytes <= REFERENCE_LOGITS:
            self.stored[first] = found
        return found


class Runner:
    """Runs what is missing of a sweep in its folder."""

    def __init__(self, sweep: SweepSettings, load: Callable[[], Model], folder: RunFolder):
        self.sweep, self.folder = sweep, folder
        self._load, self._model = load, None
        self._full: Generator | None = None

    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = self._load()
        return self._model

    def path(self, key: str):
        return self.folder.work / f"cell-{key}.npz"

    def results(self, cell: Cell) -> dict | None:
        """What is stored of a cell: {"row": numbers, "samples": uint8 images, ...}; None if it is
        missing or damaged, so that it is run again."""
        with contextlib.suppress(*DAMAGED), np.load(self.path(cell.key)) as f:
            found = {name: f[name] for name in f.files}
            return found | {"row": json.loads(str(found["row"]))}
        return None

    def keep(self, cell: Cell, row: dict, **arrays: np.ndarray) -> None:
        text = json.dumps(pixel.json_safe(row))
        with new_file(self.path(cell.key)) as file:
            np.savez(file, row=np.array(text), **arrays)

    def run(self) -> None:
        """Every cell that is not there yet, the full cache first."""
        todo = [cell for cell in self.sweep.cells if cell.plan]
        cells = list({cell.key: cell for cell in todo}.values())
        missing = [cell for cell in cells if self.results(cell) is None]
        if len(missing) < len(cells):
            _say(f"{len(cells) - len(missing)} of {len(cells)} cells are there already, continuing")
        stored = self.results(self.sweep.full)
        reference = self._reference(stored or self._run_full())
        for number, cell in enumerate(missing, len(cells) - len(missing) + 1):
            _say(f"cell {number}/{len(cells)}: {cell.label} at {cell.budget:g}")
            self._run_cell(cell, reference)

    def _reference(self, stored: dict) -> Reference:
        return Reference(stored["tokens"], stored["pictures"], self._start_full, self.sweep)

    def _start_full(self) -> Generator:
        if self._full is None:
            self._full = self._compiled(self.sweep.full)
        return self._full

    def _compiled(self, cell: Cell) -> Generator:
        generator = make_generator(self.sweep, self.model, cell)
        first = self.sweep.padded(np.arange(1))
        unused = generator.model.pipeline.no_tokens(len(first))
        generator.compile(self.sweep.condition.take(first), unused)
        _say(f"  compiled in {generator.timing.compile_s:.1f} s")
        return generator

    def _run_full(self) -> dict:
        sweep = self.sweep
        _say(f"full cache: {len(sweep.condition)} images in batches of {sweep.batch_size}")
        generator = self._start_full()
        parts = [(r["tokens"], r["images"]) for _, r in free(sweep, generator)]
        tokens, pictures = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        self._time(generator)
        samples = images.to_uint8(pictures[: sweep.samples])
        row = describe_cell(sweep, sweep.full, generator)
        self.keep(sweep.full, row, tokens=tokens, pictures=pictures, samples=samples)
        return {"tokens": tokens, "pictures": pictures}

    def _time(self, generator: Generator) -> None:
        """Run again until there are enough times."""
        size, sweep = self.sweep.batch_size, self.sweep
        index = np.arange(size) % len(sweep.condition)
        options = dict(given=generator.model.pipeline.no_tokens(size), given_scales=0)
        while len(generator.timing.runs) < TIMED_RUNS:
            generator.run_batch(sweep.condition.take(index), index, seed=sweep.seed, **options)

    def _run_cell(self, cell: Cell, reference: Reference) -> None:
        sweep, generator = self.sweep, self._compiled(cell)
        found: list[dict] = []
        kept: list[np.ndarray] = []
        for index, results in free(sweep, generator):
            batch = fidelity.per_image(results, reference.results(index))
            pictures = results.pop("images")[: max(0, sweep.samples - int(index[0]))]
            kept += [images.to_uint8(pictures)] if len(pictures) else []
            del results
            batch["kl"] = self._divergence(generator, reference, index)
            found.append(batch)
        self._time(generator)
        arrays = fidelity.joined(found)
        row = describe_cell(sweep, cell, generator) | {"fidelity": fidelity.summarize(arrays)}
        row["samples_fidelity"] = {n: a[: sweep.samples].tolist() for n, a in arrays.items()}
        self.keep(cell, row, samples=np.concatenate(kept))
        close = row["fidelity"]
        _say(
            f"  PSNR {close['psnr']:.2f} dB, SSIM {close['ssim']:.4f}, equal tokens "
            f"{close['token_agreement']:.1%}, KL {close['kl']:.4g} nats"
        )

    def _divergence(self, generator: Generator, reference: Reference, index) -> np.ndarray:
        """float32 [B]: token-mean KL of each image, with the full cache's tokens forced. A token of
        several bits counts their sum."""
        mine = forced_logits(self.sweep, generator, reference.tokens, index)
        images, tokens, *_, choices = mine.shape
        flat = (a.reshape(images, -1, choices) for a in (reference.logits(index), mine))
        found = np.asarray(logits.token_kl(*flat))
        return found.reshape(images, tokens, -1).sum(-1).mean(1)


def forced_logits(sweep: SweepSettings, generator: Generator, tokens: np.ndarray, index):
    """float32 [B, L, ...] of images `index` with their `tokens` forced."""
    padded = sweep.padded(index)
    results, _ = generator.run_batch(
        sweep.condition.take(padded), padded, seed=sweep.seed, given=tokens[padded]
    )
    return results["logits"][: index.size]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- numbers ---


def describe_cell(sweep: SweepSettings, cell: Cell, generator: Generator) -> dict:
    """Everything about a cell but its fidelity. Byte counts are for one batch; `live_tokens` and
    `used_slots` int [K, layers] are those of one cache row after each store."""
    plan, batch, kv_dtype = cell.plan, sweep.batch_size, sweep.storage(cell)
    dense, planned = plan.dense_bytes(batch, sweep.dense_dtype), plan.num_bytes(batch, kv_dtype)
    return {
        "label": cell.label,
        "policy": cell.name,
        "policy_args": cell.arguments,
        "budget": cell.budget,
        "plan": plan.digest,
        "kv": {
            "dtype": str(kv_dtype),
            "dense_bytes": dense,
            "planned_bytes": planned,
            "allocated_bytes": generator.allocated_bytes,
            "fraction": generator.allocated_bytes / max(1, dense),
            "peak_live_fraction": plan.peak_live_fraction,
            "block_size": plan.block_size,
            "pool_blocks": plan.pool_blocks,
            "pool_slots": plan.pool_tokens,
            "slot_bytes": planned // max(1, plan.pool_tokens),
            "dense_slots": plan.geometry.dense_tokens,
            "accounting": plan.accounting,
        },
        "time": {
            "compile_s": generator.timing.compile_s,
            "first_run_s": generator.timing.first_run_s,
            "steady_s_per_image": generator.steady_seconds_per_image(),
            "timed_runs": len(generator.timing.runs),
        },
        "live_tokens": plan.live_tokens,
        "used_slots": plan.blocks_after_store * plan.block_size,
    }
