"""`experiments.bench --adopt=FILE`: what `--machine` measured on a chip becomes a record of the
cost model (`experiments.aot.efficiencies`) and tuned tiles. Everything is checked before anything
is written (`machine_file`, `possible`)."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.aot import efficiencies, fitting
from experiments.aot.efficiencies import GAPS, Efficiency, Record
from experiments.aot.kernels import START
from experiments.aot.work import Work, by_operation
from experiments.bench import machine_file
from experiments.bench.rows import Row
from experiments.bench.worker import check_tuned_file
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.ragged_attention import config, tune
from varjax.errors import UserError, about
from varjax.storage.atomic import check_place

# operations of the record, each after those whose kernels run in its calls, too
MEASURED = ("products", "finish", "choosing", "write", "attention", "token attention")
# tried for kernels that copy block by block: shares of the peak, and seconds between two copies
SHARES, COPIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8), np.arange(10, 401, 10) * 1e-9
LEAST = 0.1  # share of a call's time that is left for its own kernel, whatever the others take
KEPT = "kept: "  # begins the note of an operation whose numbers are those of an older record
Point = tuple[Mapping[Work, float], float]  # (work of an operation, seconds of it)


def show_adopted(path: str, without: Collection[str] = ()) -> int:
    """Adopt a file and say what was taken. Returns the exit status.

    without: failed steps that the file may lack.

    Raises:
      UserError: it is no finished file of a chip that is known, of other versions, or holds what
        cannot be. Nothing is written then.
    """
    with about(f"--adopt={path}"):
        content = machine_file.read(Path(path), without)
        chip, kind = CHIPS[content["device"]["chip"]], content["device"]["kind"]
        older = efficiencies.read(efficiencies.FILE) if efficiencies.FILE.exists() else {}
        record = record_of(content, chip, older.get(chip.name))
        tiles = machine_file.tiles_of(content, chip)
        check_place(efficiencies.FILE, kind="file")
        for operation, name in tiles:
            check_place(config.tuned_path(kind, operation), kind="file")
            check_tuned_file(kind, operation, name)
        if record is not None:
            efficiencies.adopt(record)
    for (operation, name), found in tiles.items():
        print(f"tiles of {len(found)} calls: {tune.keep(kind, operation, name, found)}")
    print("\n".join([*_said(record, chip), *_remarks(content, without)]))
    return 0


def _said(record: Mapping | None, chip: Chip) -> list[str]:
    if record is None:
        return [f"{chip.name}: times of TPUs are the compiler's cycles, no efficiencies are kept"]
    lines = [f"efficiencies of {chip.name} in {efficiencies.FILE}:"]
    for name, numbers in record["operations"].items():
        each = ", ".join(f"{k} {v:.3g}" for k, v in numbers.items() if isinstance(v, float))
        kept = str(numbers.get("note", "")).startswith(KEPT)
        lines.append(f"  {name}: {numbers['note']:.80}" if kept else f"  {name}: {each}")
    return lines


def _remarks(content: Mapping, without: Collection[str]) -> Iterator[str]:
    """What a reader of the numbers should know of the run."""
    if without:
        yield f"without the steps that failed: {', '.join(without)}; kept numbers are older ones"
    if here := machine_file.another_revision(content):
        theirs = content["revision"]
        yield f"it was measured at {theirs}, here is {here}: kernels may differ from those measured"


# --- efficiencies ---


def record_of(content: Mapping, chip: Chip, older: Record | None = None) -> dict | None:
    """The chip's record (`experiments.aot.efficiencies`) from measured rows; None for a TPU.

    older: the record that it replaces. Operations that were not measured now keep its numbers, and
      say so.
    """
    calls = [r for r in machine_file.rows_of(content, chip) if r.seconds and r.work]
    if chip.gpu is None:
        return None
    found = fitted([(r.of_work(), r.seconds) for r in calls if not _is_program(r)], chip)
    if not found:
        raise UserError("it holds no times of kernels or products: measure again")
    drawn = [(r.of_work(), r.seconds) for r in calls if _is_program(r)]
    numbers, kept = {n: _numbers(e) for n, e in found.items()}, _kept(older, found)
    if drawn:  # beyond what is expected of all kernels, those with kept numbers among them
        every = found | {n: older.operations[n] for n in kept if n != GAPS}
        numbers[GAPS] = {"call_us": 1e6 * gap(drawn, every, chip), "note": "what is left of codes"}
    device = content["device"]
    return {
        "chip": chip.name,
        "device": device["kind"],
        "driver": content["driver"] or "not known",
        "jax": device["versions"]["jax"],
        "date": content["date"],
        "revision": content["revision"],
        "source": f"experiments.bench --machine, {len(calls)} calls",
        "peaks": {"bf16_flops": chip.bf16_flops, "bandwidth": chip.bandwidth},
        "operations": kept | numbers,
    }


def _kept(older: Record | None, found: Mapping[str, Efficiency]) -> dict[str, dict]:
    """The numbers of an older record for operations that were not measured now. Their notes say
    where they are from; that of a record before it stays."""
    kept = {}
    for name, numbers in (older.content["operations"] if older else {}).items():
        if name not in found:
            note, record = numbers.get("note", ""), older.content
            if not str(note).startswith(KEPT):
                note = f"; {note}" if note else ""
                note = f"{KEPT}of {record['date']} at {record['revision']}{note}"
            kept[name] = {**numbers, "note": note}
    return kept


def _is_program(row: Row) -> bool:
    return row.call.operation == "codes"


def _numbers(e: Efficiency) -> dict:
    """An operation of the record. Calls as small as the smallest ones are among those measured."""
    found = {"call_us": 1e6 * e.call, "bandwidth": e.bandwidth, "flops": e.flops}
    return found | ({"program_us": 1e6 * e.program, "copy_ns": 1e9 * e.copy} if e.copy else {})


def fitted(calls: Sequence[Point], chip: Chip) -> dict[str, Efficiency]:
    """The numbers of each operation of `MEASURED` that was timed. What other kernels of the same
    call take is subtracted: attention is timed with the kernel that finishes keys and values."""
    found: dict[str, Efficiency] = {}
    for operation in MEASURED:
        points = list(_points(operation, calls, found, chip))
        if points:
            found[operation] = _best_fit(operation, points, chip)
    return found


def _points(
    operation: str, calls: Sequence[Point], found: Mapping[str, Efficiency], chip: Chip
) -> Iterator[Point]:
    for work, seconds in calls:
        own = {w: n for w, n in work.items() if w.operation == operation}
        others = {w.operation for w in work} - {operation}
        if own and others <= found.keys():
            rest = sum(
                n * w.seconds(chip, found[w.operation]) for w, n in work.items() if w not in own
            )
            yield own, max(seconds - rest, LEAST * seconds)


def _best_fit(operation: str, points: Sequence[Point], chip: Chip) -> Efficiency:
    """The numbers that fit best. Products are tried with a share of each peak, kernels whose
    programs copy block by block also so."""
    tried = [fitting.fit_share(points, chip)]
    if operation == "products":
        calls = {0.0, START, tried[0].call}
        tried += [fitting.fit_two_shares(points, chip, call) for call in calls]
    if all(w.programs for work, _ in points for w in work):
        given = [Efficiency(0.0, flops=share, copy=c) for share in SHARES for c in COPIES]
        tried += [fitting.fit_turns(points, chip, each) for each in given]
    return min(tried, key=_error(points, chip))


def _error(points: Sequence[Point], chip: Chip) -> Callable[[Efficiency], float]:
    """The sum of squared relative errors."""

    def error(efficiency: Efficiency) -> float:
        predicted = [sum(n * w.seconds(chip, efficiency) for w, n in p.items()) for p, _ in points]
        seconds = np.array([s for _, s in points])
        return float(np.square((predicted - seconds) / seconds).sum())

    return error


def gap(drawn: Sequence[Point], found: Mapping[str, Efficiency], chip: Chip) -> float:
    """Seconds between two kernels that were measured: what programs take beyond what is expected
    of all of their kernels."""
    record = efficiencies.Record(chip.name, {}, dict(found))
    parts = [by_operation(work, chip, record).values() for work, _ in drawn]
    calls = [sum(part.calls for part in p if part.basis != "assumed") for p in parts]
    left = [
        whole - sum(part.expected for part in p) for (_, whole), p in zip(drawn, parts, strict=True)
    ]
    return fitting.fit_gap(calls, left, [whole for _, whole in drawn])
