"""Whether a measured row can be true of a chip: its numbers are numbers, and no call is faster than
the chip.

A call computes no faster than the units of its type. How fast it moves bytes is harder to say,
since timed loops repeat a call, whose data then lie in the second cache, and since the estimates of
our kernels count what every program reads, which that cache answers, too. So three things are held
against a row, each with `MARGIN`:

    FLOPs           over the peak of their units
    all bytes       over what the cores can load, wherever it lies
    its own bytes   (the least that a call needs) that the cache cannot hold, over the memory's rate

Of whole programs only FLOPs count, at the chip's fastest peak: their kernels hand each other what
the cache holds, and libraries have convolutions that multiply less than the definition does.
"""

from collections.abc import Mapping
from dataclasses import fields

from experiments.aot.efficiencies import OPERATIONS
from experiments.aot.work import Work
from experiments.bench.rows import PROGRAMS, Row
from pallas_kernels.chips import Chip
from varjax import arguments
from varjax.errors import UserError, about, choose, show

MARGIN = 1.3  # clocks above the data sheets', counts that are rounded up
SHORTEST, LONGEST = 1e-7, 3600.0  # seconds of a call: a kernel starts and ends; a step has 600
LOADED = 128  # bytes that a core of a GPU loads in a cycle
PASSES = 2  # a byte that is changed in its place is counted as read and as written
MOST = 1e12  # programs, copies and calls


def check(number: int, row: Row, chip: Chip) -> None:
    """Raise `UserError` that names the row if it cannot be true. number: of the row."""
    c = row.call
    with about(f"rows[{number}] ({show(c.operation)} {show(c.shape)}, {show(c.way)})"):
        _check_call(row)
        _check_numbers(row, chip)
        if row.seconds is not None:
            _check_seconds(row, chip)


def _check_call(row: Row) -> None:
    call = row.call
    for name in ("operation", "shape", "way", "types"):
        arguments.text(name, getattr(call, name))
    arguments.text("note", row.note)
    if call.images is not None:
        arguments.integer("images", call.images, 1)
    if call.share is not None:
        arguments.number("share", call.share, 0, 1, above=True)


def _check_numbers(row: Row, chip: Chip) -> None:
    for name in ("seconds", "modelled", "expected"):
        if getattr(row, name) is not None:
            arguments.number(name, getattr(row, name), 0, above=name == "seconds")
    for name in ("flops", "bytes"):
        arguments.number(name, getattr(row, name), 0)
    for kernel in row.work:
        with about("work"):
            _check_work(kernel, row, chip)


def _check_work(work: Mapping, row: Row, chip: Chip) -> None:
    """The numbers of a kernel (`aot.work.Work`), and how often it is called."""
    known = {"calls", *(field.name for field in fields(Work))}
    if not isinstance(work, Mapping) or set(work) != known:
        raise UserError(f"{show(work)} does not have the entries {', '.join(sorted(known))}")
    choose("operation", work["operation"], OPERATIONS)
    arguments.flag("ours", work["ours"])
    for name in ("bytes", "flops"):
        arguments.number(name, work[name], 0)
    rate = arguments.number("rate", work["rate"], 0)
    if work["flops"] and not any(abs(rate / peak - 1) < 1e-6 for peak in rates(chip)):
        why = f"{chip.name} has no units of that peak here: adopt the file where it was written"
        raise arguments.wrong("rate", work["rate"], why)
    arguments.integer("programs", work["programs"], 0, int(MOST))
    arguments.number("copies", work["copies"], 0, MOST)
    calls = arguments.number("calls", work["calls"], 0, MOST, above=True)
    # programs may hold a share of the calls that were traced (`aot.modelled`)
    if row.call.operation not in PROGRAMS and calls != int(calls):
        raise arguments.wrong("calls", calls, "it must be a whole number")


def rates(chip: Chip) -> list[float]:
    """FLOPs per second of the units that multiply numbers of a type, as `aot.kernels` takes
    them."""
    float32 = [chip.gpu.float32_flops] if chip.gpu else []
    peaks = [chip.bf16_flops, chip.bf16_flops / 2, chip.int8_flops, chip.fp8_flops, *float32]
    return [peak for peak in peaks if peak]


def _check_seconds(row: Row, chip: Chip) -> None:
    if row.seconds > LONGEST:
        raise UserError(f"{row.seconds:.3g} s: no call has more than {LONGEST:g} s: measure again")
    least, why = max(
        (SHORTEST, "no kernel starts and ends sooner"),
        (_computing(row, chip) / MARGIN, f"for what it computes, at the peak of {chip.name}"),
        (_moving(row, chip) / MARGIN, f"for what it moves, as fast as {chip.name} can"),
    )
    if row.seconds < least:
        raise UserError(
            f"{row.seconds:.3g} s: it takes {least:.3g} s at least: {why}; adopt the file as it "
            "was written, or measure again"
        )


def _computing(row: Row, chip: Chip) -> float:
    """Seconds of the FLOPs at peak rates."""
    if row.call.operation in PROGRAMS:  # its own FLOPs are those before it was compiled
        return sum(float(w["calls"]) * w["flops"] for w in row.work) / max(rates(chip))
    kernels = sum(float(w["calls"]) * w["flops"] / w["rate"] for w in row.work if w["flops"])
    peak = max(rates(chip)) if "8" in row.call.types else chip.bf16_flops
    return max(kernels, row.flops / peak)


def _moving(row: Row, chip: Chip) -> float:
    """Seconds of the bytes, as the head of this module says; 0 where that is not known."""
    if row.call.operation in PROGRAMS or chip.gpu is None:
        return 0.0
    loaded = max(row.bytes, sum(float(w["calls"]) * w["bytes"] for w in row.work))
    beyond = max(0.0, row.bytes - PASSES * chip.gpu.l2_cache * 2**20)
    rate = LOADED * chip.gpu.cores * chip.gpu.clock * 1e9
    return max(loaded / rate, beyond / chip.bandwidth)
