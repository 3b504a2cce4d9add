"""The table of results that people read, and the lists below it: temporaries, exchanges."""

from collections.abc import Callable, Mapping, Sequence

from experiments.aot import collectives
from varjax.engine.memory import show_bytes

COLLECTIVES = 8  # operations that exchange most, which are listed
Row = tuple[str, Callable[[Mapping], object]]


def table(rows: Sequence[Row], results: Sequence[Mapping]) -> list[str]:
    """Lines of a table with a column for each target. Rows without a value are left out. Where
    nothing was compiled only the row "fits" says so."""
    columns = [["", *(name for name, _ in rows)]]
    columns += [[r["target"], *(_cell(*row, r) for row in rows)] for r in results]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
        if any(row[1:])
    ]


def _cell(name: str, row: Callable[[Mapping], object], result: Mapping) -> str:
    if result["status"] == "compiled":
        return str(row(result))
    if name != "fits":
        return ""
    if result["status"] == "failed":
        return "FAILED"
    return f"NO: asks for {show_bytes(result['needed_bytes'])}"


def temporary_lines(target: str, name: str, program: Mapping) -> list[str]:
    """The largest temporaries of a program."""
    if not program["largest_temporaries"]:
        return []
    live = show_bytes(program["live_temporary_bytes"])
    lines = ["", f"{target}, {name}: {live} of temporaries at the fullest moment"]
    for t in program["largest_temporaries"]:
        shape, source = t["shape"].split("{")[0], t["source"] or t["instruction"]
        lines.append(f"  {show_bytes(t['bytes']):>10s}  {shape:28s} {source}")
    return lines


def exchanged(program: Mapping) -> str:
    """Bytes that a device sends to others in one run of a program; empty where it sends none."""
    sent = sum(row["sent_bytes"] for row in program["collectives"])
    return show_bytes(int(sent)) if sent else ""


def collective_lines(target: str, name: str, program: Mapping) -> list[str]:
    """What devices exchange: by kind, then the operations with most bytes."""
    if not program["collectives"]:
        return []
    lines = ["", f"{target}, {name}: what a device exchanges in a run"]
    for kind, sums in collectives.by_kind(program["collectives"]).items():
        moved, sent = (show_bytes(int(sums[key])) for key in ("bytes", "sent_bytes"))
        lines.append(f"  {sums['calls']:8.0f} x {moved:>10s}, {sent:>10s} sent  {kind}")
    for row in program["collectives"][:COLLECTIVES]:
        moved, of = show_bytes(int(row["bytes"])), f"{row['kind']} of {row['group']}"
        lines.append(f"    {row['calls']:8.0f} x {moved:>10s}  {of}: {row['source']}")
    return lines
