"""The results of all targets as people read them: a table with a column for each, then lists of
temporaries, kernels and exchanges."""

from collections.abc import Callable, Mapping, Sequence

from varjax.generation.memory import show_bytes

TERA = 10**12
COLLECTIVES = 8  # operations that exchange most, which are listed


def text(results: Sequence[Mapping], verbose: bool) -> str:
    """The results of all targets, with the verdict at the end. verbose: with their content."""
    lines = table(results)
    for r in results:
        if r["status"] != "compiled" or not verbose:
            continue
        for name, program in r["programs"].items():
            lines += _of_program(f"{r['target']}, {name}", program)
        for name, copies in r["copies"].items():
            lines += [f"{r['target']}: copy of {name}: {copy}" for copy in copies]
        if r["loops_of_unknown_length"]:
            lines.append(f"{r['target']}: {r['loops_of_unknown_length']} loops were counted once")
    said = "What the rows mean: docs/howto/scale.md"
    more = "" if verbose else "; --verbose lists temporaries, kernels and exchanges"
    return "\n".join([*lines, "", said + more, "", *map(verdict, results)])


def verdict(r: Mapping) -> str:
    """A line: whether it fits, the peak, the floor, and the largest batch if it was looked for."""
    if r["status"] == "failed":
        return f"{r['target']}: failed: {r['error']}"
    memory, batch = show_bytes(r["memory_bytes"]), f"batch {r['batch_size']}"
    if r["status"] == "refused":
        return (
            f"{r['target']}: does not fit: {batch} asks for {show_bytes(r['needed_bytes'])} of "
            f"{memory} ({r['error']})"
        )
    largest = ", the largest batch that fits" if "largest_batch" in r else ""
    fits = "fits" if r["fits"] else "does not fit"
    return (
        f"{r['target']}: {fits}: {batch}{largest}, peak {show_bytes(r['peak_bytes'])} of {memory}, "
        f"at least {r['floor_s']:.3g} s ({r['floor_bound']})"
    )


def table(results: Sequence[Mapping]) -> list[str]:
    """Lines of the table. Rows without a value are left out. Where nothing was compiled only the
    row "fits" says so."""
    columns = [["", *(name for name, _ in _ROWS)]]
    for r in results:
        if r["status"] == "compiled":
            cells = [str(row(r)) for _, row in _ROWS]
        else:
            failed = r["status"] == "failed"
            said = "FAILED" if failed else f"NO: asks for {show_bytes(r['needed_bytes'])}"
            cells = [said if name == "fits" else "" for name, _ in _ROWS]
        columns.append([r["target"], *cells])
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
        if any(row[1:])
    ]


def _of(key: str, show: Callable[[object], str] = str, program: str | None = None):
    """A row that is empty where the key is missing: training has other ones than drawing."""

    def row(r: Mapping) -> str:
        found = r["programs"].get(program, {}) if program else r
        return show(found[key]) if found.get(key) is not None else ""

    return row


def _in_place(r: Mapping) -> str:
    if not r["aliased"]:
        return "NO: not aliased"
    counts = [f"{len(copies)} of {name}" for name, copies in r["copies"].items()]
    return f"NO: copies: {', '.join(counts)}" if counts else "yes"


def _exchanged(r: Mapping) -> str:
    """Bytes that a device sends to others in one run of the first program."""
    rows = next(iter(r["programs"].values()))["collectives"]
    return show_bytes(int(sum(row["sent_bytes"] for row in rows))) if rows else ""


_copied = _of("copied_weight_bytes", lambda size: show_bytes(int(size)), "codes")
_ROWS = (
    ("batch", _of("batch_size")),
    ("devices", lambda r: r["devices"] if r["devices"] > 1 else ""),
    ("attention", _of("attention")),
    ("segments, layers", lambda r: f"{len(r['segments'])}, {r['layers']}" if "layers" in r else ""),
    ("pixels in", _of("decode_dtype")),
    ("parameters", _of("parameter_bytes", show_bytes)),
    ("KV pool", _of("kv_pool_bytes", show_bytes)),
    ("bookkeeping", _of("bookkeeping_bytes", show_bytes)),
    ("temporaries, codes", _of("temporary_bytes", show_bytes, "codes")),
    ("temporaries, pixels", _of("temporary_bytes", show_bytes, "pixels")),
    ("temporaries", _of("temporary_bytes", show_bytes, "a step")),
    ("peak", lambda r: f"{show_bytes(r['peak_bytes'])} ({r['peak_of']})"),
    ("memory", _of("memory_bytes", show_bytes)),
    ("fits", lambda r: "yes" if r["fits"] else "NO"),
    ("in place", _in_place),
    ("promised", _of("promised_bytes", show_bytes)),
    ("  peak / promised", _of("peak_over_promised", "{:.3f}".format)),
    ("TFLOPs", lambda r: f"{r['flops'] / TERA:.4g}"),
    ("  kernels", lambda r: f"{k / r['flops']:.1%}" if (k := r.get("kernel_flops")) else ""),
    ("floor, seconds", lambda r: f"{r['floor_s']:.3g} ({r['floor_bound']})"),
    ("  images/s", _of("floor_images_per_s", "{:.3g}".format)),
    ("kernels started, codes", _of("kernels", "{:.0f}".format, "codes")),
    # a TPU fetches weights into its own memory
    ("weights copied, codes", lambda r: _copied(r) if r.get("platform") == "gpu" else ""),
    ("exchanged", _exchanged),
    ("compile seconds", lambda r: f"{r['compile_s']:.0f}"),
)


def _of_program(of: str, program: Mapping) -> list[str]:
    """The largest temporaries; the operations that start most kernels, then kernels of ours with
    their estimates; the operations that exchange most bytes."""
    lines = []
    if program["largest_temporaries"]:
        lines += ["", f"{of}: the largest of {show_bytes(program['temporary_bytes'])} temporaries"]
    for t in program["largest_temporaries"]:
        shape, source = t["shape"].split("{")[0], t["source"] or t["instruction"]
        lines.append(f"  {show_bytes(t['bytes']):>10s}  {shape:28s} {source}")
    if program["kernels"]:
        lines += ["", f"{of}: {program['kernels']:.0f} kernels, most of them by"]
    lines += [f"  {n:8.0f} x  {source}" for source, n in program["kernels_by_operation"].items()]
    lines += ["  kernels of ours, as they estimate full tables"] * bool(program["kernels_of_ours"])
    for name, sums in program["kernels_of_ours"].items():
        moved, done = show_bytes(int(sums["bytes"])), f"{sums['flops'] / TERA:9.3g} TFLOP"
        lines.append(f"  {sums['calls']:8.0f} x {moved:>10s} {done}  {name}")
    if program["collectives"]:
        lines += ["", f"{of}: what a device exchanges in a run, most of it"]
    for row in program["collectives"][:COLLECTIVES]:
        moved, sent = (show_bytes(int(row[key])) for key in ("bytes", "sent_bytes"))
        what = f"{row['kind']} of {row['group']}: {row['source']}"
        lines.append(f"  {row['calls']:8.0f} x {moved:>10s}, {sent:>10s} sent  {what}")
    return lines
