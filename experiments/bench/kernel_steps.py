"""Steps of `experiments.bench --machine` that look at kernels alone: checks against the reference,
the time of attention by what it reads, tiles, times."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import jax
import numpy as np

from experiments.bench import checks, report, tuning
from experiments.bench.checks import Case
from experiments.bench.rows import Call, Found, Row, kernels_of
from experiments.bench.scope import MODELS, Scope, model_of
from pallas_kernels import arg_specs, bench, implementations
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.ragged_attention import tune
from varjax.engine.device_errors import is_out_of_memory

SLOPE_TOKENS, SLOPE_BLOCKS, SLOPE_ENTRIES = (64, 256), (8, 16, 32, 64), (0, 7, 14, 27, 54)
LARGEST_POOL = 2**28  # numbers: more take minutes to make on the host
TUNE_SECONDS = 45  # of one call's tiles


class WrongResult(Exception):
    """A result that is wrong, or a kernel that fails. words: the call and what is wrong with it.
    command: repeats it."""

    def __init__(self, words: str, command: str):
        super().__init__(words)
        self.words, self.command = words, command


class NothingCompared(Exception):
    """A check whose cases the kernel refused, or that did not fit the device, all of them."""


# --- checks ---


def cases(scope: Scope, operation: str, kernel: str) -> Iterator[Case]:
    """What is compared: of the models that are drawn every type and filling, of others the first
    ones, with few heads; then all heads of each call once."""
    found = bench.OPERATIONS[operation]
    specs = [checks.resized(arg_specs.SPECS[name], scope.small) for name in scope.shapes]
    specs = [spec for spec in specs if found.serves(spec)]
    if scope.small and scope.quick:
        specs = specs[:1]
    for spec in specs:
        most = 1 if scope.quick or model_of(spec.name) not in MODELS else None
        for dtype, kv_dtype in scope.types[:most]:
            typed = replace(spec, dtype=dtype, kv_dtype=kv_dtype)
            for filling in _fillings(scope, found)[:most]:
                yield checks.case(operation, typed, kernel, filling=filling, small=scope.small)
    for spec in () if scope.small or scope.quick else specs:
        typed = replace(spec, rows=checks.ROWS, dtype=scope.dtype)
        if bench.fits(typed):
            yield checks.case(operation, typed, kernel, filling="random", heads=spec.heads)


def _fillings(scope: Scope, found: bench.Operation) -> list[str]:
    """All ways to fill tables, or the first and the last one where kernels are interpreted."""
    every = list(found.fillings)
    return list(dict.fromkeys([every[0], every[-1]])) if scope.small else every


def check(
    scope: Scope, operation: str, kernel: str, notify: Callable[[Case], object] = lambda case: None
) -> Found:
    """Compare a kernel with the reference; `WrongResult` at the first difference or failure,
    `NothingCompared` if no case was right either. notify: called with every case before it runs,
    since it may end the process."""
    right, full, largest, refused = 0, 0, 0.0, []
    for case in cases(scope, operation, kernel):
        notify(case)
        compared = _compared(case)
        if compared is None:
            full += 1
            continue
        verdict, errors, said = compared
        if verdict == checks.WRONG:
            allowed = f"allowed is less than {case.allowed:.0e}"
            raise WrongResult(f"{case.words}: error {said}, {allowed}", case.command)
        if verdict == checks.REFUSED:
            refused.append(f"{said}: {case.command}")
        else:
            right, largest = right + 1, max(largest, *errors.values())
    note = f"{right} right, largest error {largest:.1e}"
    note += f", {len(refused)} refused" * bool(refused) + f", {full} did not fit" * bool(full)
    if not right:
        first = f"; the first: {refused[0]}" if refused else ""
        raise NothingCompared(f"nothing was compared: {note}{first}")
    return Found([Row(Call(f"check {operation}", "all", kernel, ""), note=note)])


def _compared(case: Case) -> tuple[str, dict, str] | None:
    """What `Case.compare` returns, None if the reference does not fit the device; `WrongResult` if
    the kernel fails."""
    try:
        return case.compare()
    except Exception as error:  # compilers and devices have many ways to fail
        if _is_full(error) and not _reference_fits(case):
            return None
        raise WrongResult(f"{case.words}: {bench.short(error, 400)}", case.command) from error


def _reference_fits(case: Case) -> bool:
    """Whether the device holds what the comparison takes, with the reference in place of the
    kernel. It fails of itself then, if at all, as the kernel did."""
    try:
        bench.errors(case.operation, case.spec, "reference")
    except Exception as error:
        return not _is_full(error)
    return True


def _is_full(error: Exception) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and is_out_of_memory(str(error))


# --- attention by what it reads ---


def slope(scope: Scope) -> Found:
    """Times of attention by blocks that heads own, and the line through them."""
    tokens, blocks, entries = SLOPE_TOKENS, SLOPE_BLOCKS, SLOPE_ENTRIES
    if scope.quick:
        tokens, blocks = tokens[-1:], blocks[1:2]
    if scope.small:
        tokens, blocks, entries = (16,), (8,), (0, 2)
    rows = []
    for length in tokens:
        for size in blocks:
            spec = arg_specs.SPECS["var-d30-t256"]
            spec = checks.resized(spec, scope.small)
            spec = replace(spec, tokens=length, length=length, block_size=size, dtype=scope.dtype)
            rows.append(_line(scope, spec, entries))
    return Found(rows)


def _line(scope: Scope, spec: ArgSpec, entries: tuple[int, ...]) -> Row:
    shape = f"{spec.tokens} queries, blocks of {spec.block_size}"
    call = Call("attend, by blocks", shape, scope.best, scope.dtype, spec.rows // 2)
    try:
        seconds = [
            bench.measure(_owning(spec, count, scope.best), scope.repeats) for count in entries
        ]
    except Exception as error:  # as in `timed`
        return Row(call, note=bench.short(error))
    each, none = np.polyfit(entries, seconds, 1)
    every = " ".join(f"{1e6 * s:.1f}" for s in seconds)
    note = f"{1e6 * none:.1f} us + {1e6 * each:.3f} us a block ({every} us for {entries} blocks)"
    return Row(call, note=note)


def _owning(spec: ArgSpec, blocks: int, way: str) -> bench.Candidate:
    """Attention of heads that own so many blocks each; a table has one entry at least."""
    filling = "full" if blocks else "empty"
    spec = replace(spec, entries=max(1, blocks), filling=filling)
    return bench.OPERATIONS["attend"].candidate(spec, way)


# --- tiles ---


def tiles(scope: Scope, operation: str, shape: str, kernel: str) -> Found:
    """Find the fastest tiles of a call. On a chip they are kept, and later steps use them."""
    spec = replace(checks.resized(arg_specs.SPECS[shape], scope.small), dtype=scope.dtype)
    limit = 0.0 if scope.small else TUNE_SECONDS
    found = tuning.best(operation, spec, kernel, scope.repeats, most_seconds=limit)
    call = Call(f"tune {operation}", shape, kernel, spec.dtype, spec.rows // 2)
    if found.tiles is None:
        return Found([Row(call, note=f"no tiles work: {found.note}")])
    key, name = tune.call_of(operation, spec), kernel.removesuffix(implementations.SUFFIX)
    if name == kernel:
        tune.keep(jax.devices()[0].device_kind, operation, kernel, {key: found.tiles})
    entry = {"call": asdict(key.bucket()), "config": asdict(found.tiles)}
    row = Row(call, found.seconds, note=f"{found.words}; {found.tried} tried")
    return Found([row], [{"operation": operation, "implementation": name, **entry}])


# --- times ---


def time(scope: Scope, operation: str) -> Found:
    """Times of an operation at shapes of the models that are drawn."""
    found, rows = bench.OPERATIONS[operation], []
    for name in scope.timed_shapes():
        spec = checks.resized(arg_specs.SPECS[name], scope.small)
        if not found.serves(spec):
            continue
        for images in scope.images:
            asked = replace(spec, rows=2 * images, dtype=scope.dtype)
            shares = (1.0, scope.share) if found.of_cache and not scope.quick else (1.0,)
            rows += [timed(scope, operation, asked, share) for share in shares]
    return Found(rows)


def timed(scope: Scope, operation: str, spec: ArgSpec, share: float) -> Row:
    """One call, timed with the kernel of this device or, without one, with the reference."""
    found = bench.OPERATIONS[operation]
    way = scope.best if found.has(scope.best) else "reference"
    owned = share if found.of_cache else None
    row = Row(Call(operation, spec.name, way, spec.dtype, spec.rows // 2, owned))
    own = bench.compressed(spec, share)
    numbers = own.rows * own.pool_blocks * own.block_size * 2 * own.head_dim
    if numbers > LARGEST_POOL:
        return replace(row, note=f"not timed: a pool of {numbers:.1e} numbers")
    if bench.holds_scores(operation, way) and not bench.fits(own):
        return replace(row, note="not timed: the matrix of scores does not fit")
    try:
        candidate = bench.prepare(operation, spec, share, way)
        seconds = bench.measure(candidate, scope.repeats)
    except Exception as error:  # out of memory, a kernel that refuses the call
        return replace(row, note=bench.short(error))
    flops, moved = found.work(own)
    kernels = kernels_of(candidate.step, (candidate.carry, *candidate.arguments))
    row = replace(row, seconds=seconds, flops=float(flops), bytes=float(moved))
    return row.with_kernels(kernels, scope.chip)


def show(row: Row) -> str:
    """A row in a few words, for progress."""
    call, time = row.call, row.seconds
    done = report.show_time(time) if time is not None else row.note
    return f"{call.operation} {call.shape} {call.way}: {done}"
