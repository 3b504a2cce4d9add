"""`experiments.bench --adopt=FILE`: what `--machine` measured on a chip becomes a record of the
cost model (`experiments.aot.efficiencies`) and tuned tiles. Everything is checked before anything
is written."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.aot import efficiencies, fitting
from experiments.aot.efficiencies import GAPS, Efficiency
from experiments.aot.kernels import START
from experiments.aot.work import Work, by_operation
from experiments.aot.worker import versions
from experiments.bench.machine import FORMAT
from experiments.bench.rows import Row
from experiments.bench.worker import check_tuned_file
from experiments.output import partial_folder
from pallas_kernels import bench
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.ragged_attention import config, tune
from varjax import arguments
from varjax.errors import UserError, about, show, some
from varjax.storage.atomic import check_place
from varjax.storage.manifest import read_json

SAME = ("varjax", "jax", "jaxlib")  # versions that have to be those here
# operations of the record, each after those whose kernels run in its calls, too
MEASURED = ("products", "finish", "choosing", "write", "attention", "token attention")
# tried for kernels that copy block by block: shares of the peak, and seconds between two copies
SHARES, COPIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8), np.arange(10, 401, 10) * 1e-9
LEAST = 0.1  # share of a call's time that is left for its own kernel, whatever the others take
Point = tuple[Mapping[Work, float], float]  # (work of an operation, seconds of it)


def show_adopted(path: str) -> int:
    """Adopt a file and say what was taken. Returns the exit status.

    Raises:
      UserError: it is no finished file of a chip that is known, or of other versions.
    """
    file = Path(path)
    with about(f"--adopt={path}"):
        content = read(file)
        chip, kind = CHIPS[content["device"]["chip"]], content["device"]["kind"]
        record, tiles = record_of(content, chip), tiles_of(content, kind)
        check_place(efficiencies.FILE, kind="file")
        for operation, name in tiles:
            check_place(config.tuned_path(kind, operation), kind="file")
            check_tuned_file(kind, operation, name)
        if record is not None:
            efficiencies.adopt(record)
    for (operation, name), found in tiles.items():
        print(f"tiles of {len(found)} calls: {tune.keep(kind, operation, name, found)}")
    print(_said(record, chip))
    return 0


def _said(record: Mapping | None, chip: Chip) -> str:
    if record is None:
        return f"{chip.name}: times of TPUs are the compiler's cycles, no efficiencies are kept"
    lines = [f"efficiencies of {chip.name} in {efficiencies.FILE}:"]
    for name, numbers in record["operations"].items():
        each = ", ".join(f"{k} {v:.3g}" for k, v in numbers.items() if isinstance(v, float))
        lines.append(f"  {name}: {each}")
    return "\n".join(lines)


# --- the file ---


def read(path: Path) -> dict:
    """The content of a finished file of results.

    Raises:
      UserError: why it cannot be adopted, and what to do.
    """
    partial = path if path.is_dir() else partial_folder(path)
    if path.is_dir() or not path.exists() and partial.is_dir():
        raise UserError(
            f"{partial} is the folder of an unfinished run: the same --machine command goes on, "
            "and writes the file to adopt when it is done"
        )
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT["format"]:
        raise UserError("it is no file that `experiments.bench --machine` has written")
    if content.get("version") != FORMAT["version"]:
        given, known = show(content.get("version")), FORMAT["version"]
        raise UserError(f"it has version {given}, this varjax reads {known}: measure again")
    _check_device(_part(content, "device", dict))
    _check_whole(content)
    return content


def _part(content: Mapping, name: str, kind: type):
    return arguments.instance(name, content.get(name), kind, f"a {kind.__name__}, as it is written")


def _check_device(device: Mapping) -> None:
    """Refuse a CPU, a chip that is not known, another one than it says, other versions."""
    kind, chip, theirs = (device.get(name) for name in ("kind", "chip", "versions"))
    if device.get("platform") == "cpu":
        raise UserError(
            "it was measured on a CPU, where kernels are interpreted and times mean nothing: "
            "adopt a file from a GPU or TPU"
        )
    known = bench.chip(kind) if isinstance(kind, str) else None
    if known is None:
        raise UserError(
            f"it is of the chip {show(kind)}, whose peaks are not known: add it to "
            f"pallas_kernels/chips.py, which has {', '.join(CHIPS)}, and measure again"
        )
    if chip != known.name:
        raise UserError(
            f"it says chip {show(chip)}, but {kind} is {known.name}: it was changed, or is of "
            "another chip; adopt the file as it was written"
        )
    here, theirs = versions(), theirs if isinstance(theirs, dict) else {}
    for name in SAME:
        if theirs.get(name) != here.get(name):
            raise UserError(
                f"it was measured with {name} {theirs.get(name)}, here is {here.get(name)}: adopt "
                "it with the versions that it names, or measure again with those that are here"
            )


def _check_whole(content: Mapping) -> None:
    """Refuse results of a part of the steps."""
    if content.get("quick") is not False:
        raise UserError("it is from --quick, which measures too little: run without --quick")
    steps = _part(content, "steps", list)
    left = [str(s.get("name")) for s in steps if s.get("status") == "not run"]
    if left or not steps:
        raise UserError(
            f"{len(left)} steps were not run ({some(left, 5)}): the same --machine command runs "
            "them"
        )


# --- tiles ---


def tiles_of(content: Mapping, kind: str) -> dict[tuple[str, str], dict]:
    """{(operation, implementation): {call: its tiles}}; `UserError` for what is none."""
    found: dict[tuple[str, str], dict] = {}
    for entry in _part(content, "tuned", list):
        try:
            operation, name = entry["operation"], entry["implementation"]
            call, tiles = config.read_entry(entry, operation, name)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"tuned tiles of {kind} cannot be read: {error}") from None
        found.setdefault((operation, name), {})[call] = tiles
    return found


# --- efficiencies ---


def record_of(content: Mapping, chip: Chip) -> dict | None:
    """The chip's record (`experiments.aot.efficiencies`) from measured rows; None for a TPU."""
    try:
        rows = [Row.read(given) for given in _part(content, "rows", list)]
        calls = [row for row in rows if row.seconds and row.work]
        if chip.gpu is None:
            return None
        found = fitted([(r.of_work(), r.seconds) for r in calls if not _is_program(r)], chip)
        drawn = [(r.of_work(), r.seconds) for r in calls if _is_program(r)]
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"its rows cannot be read: {error!r:.200}") from None
    if not found:
        raise UserError("it holds no times of kernels or products: measure again")
    device, numbers = content["device"], {n: _numbers(e) for n, e in found.items()}
    if drawn:
        numbers[GAPS] = {"call_us": 1e6 * gap(drawn, found, chip), "note": "what is left of codes"}
    return {
        "chip": chip.name,
        "device": device["kind"],
        "driver": content["driver"] or "not known",
        "jax": device["versions"]["jax"],
        "date": content["date"],
        "revision": content["revision"],
        "source": f"experiments.bench --machine, {len(calls)} calls",
        "peaks": {"bf16_flops": chip.bf16_flops, "bandwidth": chip.bandwidth},
        "operations": numbers,
    }


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
    calls = [sum(n for w, n in work.items() if w.operation in found) for work, _ in drawn]
    parts = [by_operation(work, chip, record).values() for work, _ in drawn]
    left = [
        whole - sum(part.expected for part in p) for (_, whole), p in zip(drawn, parts, strict=True)
    ]
    return fitting.fit_gap(calls, left, [whole for _, whole in drawn])
