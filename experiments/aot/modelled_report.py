"""The modelled cost of a program in the report of `experiments.aot`: for --json, rows of the table,
and lists below it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from experiments.aot.modelled import Kernel, Modelled
from varjax.engine.memory import show_bytes

COSTLIEST = 10  # operations that are listed
LEGEND = """\
by the model every kernel alone: max(bytes / 90 % of the bandwidth, FLOPs / 80 % of the peak) and
             2.5 us to start; TPU: the compiler's cycles. Kernels of ours: their estimates at 85 %
             of the peaks. It ranks programs and shows waste; it is no measurement.
expected     the same work with what was measured on the chip of each operation, and gaps between
             kernels. "assumed": nothing was, so there is no other time than the model's; the more
             of it is assumed, the less two expected times can be compared.
weights copied: slices of 1 MiB and more that are cut out of stacked arrays and written beside them;
             an activation may be among them."""


def describe(found: Modelled | None) -> dict | None:
    """The modelled cost as content of a JSON file; None without one. Bytes and FLOPs are without
    those of Pallas kernels, which are listed."""
    return found and {
        "modelled_s": found.seconds,
        "kernels": found.calls(),
        "moved_bytes": found.total("bytes"),
        "copied_weight_bytes": found.total("bytes", "weights") / 2,  # each is read and written
        "product_flops": found.total("flops"),
        "product_s": found.total("seconds", "product"),
        "collective_s": found.total("seconds", "collective"),  # as if they moved memory
        "cycles": found.cycles,
        "pallas": _pallas(found),
        "loops": [{"loop": loop or "outside loops", **_sums(k)} for loop, k in found.by_loop()],
        "costliest": [_listed(k) for k in found.costliest(COSTLIEST)],
        "unknown": found.unknown + [w.name for w in found.pallas if not w.known],
        "loops_of_unknown_length": found.loops_of_unknown_length,
        **_expected(found),
    }


def _expected(found: Modelled) -> dict:
    """What is known of this chip beyond the model; kernels by operation, with their work, so that
    another efficiency can be applied without compiling again."""
    on_gpu, record = found.chip.platform == "gpu", found.record
    return {
        "expected_s": found.expected_seconds,
        "measured_on": record and record.said,
        "operations": {name: asdict(share) for name, share in found.by_operation().items()},
        "work": [{"calls": n, **asdict(w)} for w, n in found.work().items()] if on_gpu else [],
    }


def _sums(k: Kernel) -> dict:
    return {"kernels": k.times, "bytes": k.bytes, "flops": k.flops, "seconds": k.seconds}


def _listed(k: Kernel) -> dict:
    return {"operation": k.source or k.name, "kind": k.kind, **_sums(k)}


def _pallas(found: Modelled) -> dict[str, dict]:
    """Work of Pallas kernels by name, calls of all shapes together."""
    sums: dict[str, Counter] = {}
    for work, calls in found.pallas.items():
        each = {"calls": calls, "flops": calls * work.flops, "bytes": calls * work.bytes}
        each["seconds"] = calls * found.seconds_of(work)
        sums.setdefault(work.name, Counter()).update(each)
    return {name: dict(total) for name, total in sums.items()}


# --- to read ---


def _codes(r: Mapping) -> Mapping:
    return r["programs"]["codes"]["modelled"]


def _copied(r: Mapping) -> str:
    return show_bytes(int(_codes(r)["copied_weight_bytes"])) if r["platform"] == "gpu" else ""


def _moved(r: Mapping) -> str:
    return show_bytes(int(_codes(r)["moved_bytes"])) if r["platform"] == "gpu" else ""


def _cycles(r: Mapping) -> str:
    cycles = _codes(r)["cycles"]
    return f"{cycles / 1e6:.4g} million" if cycles else ""


def _seconds(r: Mapping) -> float | None:
    """Seconds of both programs; None where the model has none."""
    each = [p["modelled"]["modelled_s"] for p in r["programs"].values()]
    return None if None in each else sum(each)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _over_roofline(r: Mapping) -> str:
    seconds = _seconds(r)
    return _shown(seconds and seconds / r["roofline_s"])


def _read(row: Callable[[Mapping], str]) -> Callable[[Mapping], str]:
    """A row of the table that says so where a text could not be read."""

    def found(r: Mapping) -> str:
        read = all(program["modelled"] for program in r["programs"].values())
        return row(r) if read else "not read"

    return found


def _known(r: Mapping) -> str:
    """Which operations of the codes' program were measured on this chip, in short."""
    codes = _codes(r)
    if not codes["measured_on"]:
        return "assumed" if r["platform"] == "gpu" else ""
    return f"measured on {codes['measured_on']}"


def _assumed(r: Mapping) -> str:
    """The share of the expected time that nothing was measured of."""
    codes = _codes(r)
    if not codes["expected_s"]:
        return ""
    operations = codes["operations"].values()
    part = sum(o["expected"] for o in operations if o["basis"] == "assumed")
    return f"{part / codes['expected_s']:.0%}"


_ROWS = (
    ("by the model, seconds", lambda r: _shown(_seconds(r))),
    ("  / roofline", _over_roofline),
    ("  codes alone", lambda r: _shown(_codes(r)["modelled_s"])),
    ("  codes, expected", lambda r: _shown(_codes(r)["expected_s"])),
    ("    assumed of these", _assumed),
    ("  efficiencies", _known),
    ("  products of these", lambda r: f"{_codes(r)['product_s']:.3g}"),
    ("  kernels started", lambda r: f"{_codes(r)['kernels']:.0f}"),
    ("  cycles", _cycles),
    ("  moved", _moved),
    ("  weights copied", _copied),
)
ROWS = tuple((name, _read(row)) for name, row in _ROWS)


def notes(target: str, name: str, found: Mapping | None) -> list[str]:
    """Lines below the table: loops, the costliest operations, our kernels, unknown operations."""
    if found is None:
        return []
    seconds = _shown(found["modelled_s"]) or "cycles only, no"
    lines = ["", f"{target}, {name}: {seconds} s by the model"]
    lines += _titled("ms by operation: ideal, expected", _operations(found))
    lines += [_line(loop["loop"], loop) for loop in found["loops"]]
    lines += _titled("costliest operations", [_line(_named(k), k) for k in found["costliest"]])
    ours = [_line(kernel, {**k, "kernels": k["calls"]}) for kernel, k in found["pallas"].items()]
    lines += _titled("kernels of ours, estimated", ours)
    return lines + _titled("not known, counted by what they move", found["unknown"])


def _operations(found: Mapping) -> list[str]:
    """Operations with both times, and how the second one is known."""
    if not found["measured_on"]:
        return []
    return [
        f"  {1e3 * o['ideal']:9.3g} {1e3 * o['expected']:9.3g} {o['calls']:8.0f} x  {name}"
        f" ({o['basis']})"
        for name, o in found["operations"].items()
    ]


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return [f"  {title}", *(f"  {line}" for line in lines)] if lines else []


def _named(k: Mapping) -> str:
    return (
        k["operation"] if k["kind"] in ("other", "product") else f"{k['operation']} ({k['kind']})"
    )


def _line(name: str, k: Mapping) -> str:
    done = f"{k['flops'] / 1e12:9.3g} TFLOP"
    moved = show_bytes(int(k["bytes"]))
    return f"  {1e3 * k['seconds']:9.3g} ms {k['kernels']:8.0f} x {moved:>10s} {done}  {name}"
