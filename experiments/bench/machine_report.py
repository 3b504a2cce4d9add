"""The table of `experiments.bench --machine`: times beside those of the cost model and peaks."""

from collections.abc import Mapping, Sequence

from experiments.bench.report import columns, rate, show_time
from experiments.bench.rows import Row
from pallas_kernels.chips import CHIPS, Chip

HEADER = (
    "what",
    "shape",
    "way",
    "types",
    "batch",
    "cache",
    "time",
    "model",
    "/ model",
    "expected",
    "GB/s",
    "TFLOP/s",
    "",
)
SIDES = "<<<<>>>>>>>><"
LEGEND = """\
batch     images, of two rows each. cache: share of the full cache that heads own.
model     by the cost model of experiments.aot: what kernels move and compute at 80 to 90 % of the
          peaks, and 2.5 us for each start. expected: by what was measured on such a chip before.
rates     the least that a call needs over its time; in brackets the share of the peak. They may
          exceed what the memory offers where a cache helps. Codes: the bytes of the model."""
LEGEND_UNKNOWN = """\
batch     images, of two rows each. cache: share of the full cache that heads own.
The peaks of this chip are not known, so there is no model of its times, and rates have no shares:
add it to pallas_kernels/chips.py and run again for them."""
LEGEND_SMALL = "On a CPU kernels are interpreted and shapes are small: times mean nothing."


def text(content: Mapping) -> str:
    """The table of a file of results."""
    chip = CHIPS.get(content["device"]["chip"] or "")
    rows = [Row.read(given) for given in content["rows"]]
    lines = [*_head(content, chip), columns([HEADER, *(_cells(r, chip) for r in rows)], SIDES)]
    on_cpu = content["device"]["platform"] == "cpu"
    lines += ["", LEGEND_SMALL if on_cpu else LEGEND if chip else LEGEND_UNKNOWN]
    return "\n".join([*lines, *_unfinished(content["steps"])])


def _head(content: Mapping, chip: Chip | None) -> list[str]:
    """What was measured, with what, and its peaks."""
    device, versions = content["device"], content["device"]["versions"]
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"{device['kind']}, {content['date']}, driver {content['driver'] or 'not known'}"]
    lines.append(said)
    for when, gpus in content["clocks"].items():
        for gpu in gpus or ():
            clocks = ", ".join(f"{name} {value}" for name, value in gpu.items() if name != "name")
            lines.append(f"{when}: {clocks}")
    if chip is None:
        return [*lines, "its peaks are not known", ""]
    flops, moved = f"{chip.bf16_flops / 1e12:.4g} TFLOP/s", f"{chip.bandwidth / 1e9:.4g} GB/s"
    return [*lines, f"peaks of {chip.name}: {flops} in bfloat16, {moved}", ""]


def _cells(row: Row, chip: Chip | None) -> tuple[str, ...]:
    call = row.call
    batch = "" if call.images is None else str(call.images)
    share = "" if call.share is None else f"{call.share:g}"
    where = (call.operation, call.shape, call.way, call.types, batch, share)
    if row.seconds is None:
        return (*where, *["-"] * 6, row.note)
    ratio = f"{row.seconds / row.modelled:.2f}" if row.modelled else "-"
    bandwidth, peak = (chip.bandwidth, chip.bf16_flops) if chip else (None, None)
    return (
        *where,
        show_time(row.seconds),
        show_time(row.modelled) if row.modelled else "-",
        ratio,
        show_time(row.expected) if row.expected else "-",
        rate(row.bytes / row.seconds, 1e9, bandwidth) if row.bytes else "-",
        rate(row.flops / row.seconds, 1e12, peak) if row.flops else "-",
        row.note,
    )


def _unfinished(steps: Sequence[Mapping]) -> list[str]:
    """Lines about steps that failed or were not run."""
    lines = [f"failed: {s['name']}: {s['note']}" for s in steps if s["status"] == "failed"]
    left = [s["name"] for s in steps if s["status"] == "not run"]
    lines += [f"not run, the time was up: {', '.join(left)}"] if left else []
    return ["", *lines] if lines else []
