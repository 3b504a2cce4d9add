"""Figures of a sweep: fidelity against bytes, and bytes in use over time."""

from collections.abc import Sequence
from html import escape

from experiments.report import svg
from experiments.sweep import tables
from varjax.schedule import Schedule

MEBI = 2.0**20


def labels(report: dict) -> list[str]:
    """The rows of the table that have results, in order; their places are their colours."""
    done = (cell["label"] for cell in report["cells"] if cell["status"] == "done")
    return list(dict.fromkeys(done))


def legend(report: dict) -> str:
    """Buttons that bring one policy to the front."""
    parts = [
        f'<button type="button" class="entry" data-highlight="{n}" aria-pressed="false">'
        f"{svg.key(n)}{escape(label)}</button>"
        for n, label in enumerate(labels(report))
    ]
    return (
        f'<div class="legend" role="group" aria-label="highlight a policy">{"".join(parts)}</div>'
    )


def fidelity(report: dict) -> str:
    """A panel per metric."""
    panels = [_panel(report, metric) for metric in tables.METRICS]
    return f'<div class="panels two">{"".join(panels)}</div>{legend(report)}'


def _panel(report: dict, metric: str) -> str:
    shown = tables.METRICS[metric]
    title, unit, better = shown.title, shown.unit, shown.better
    curves = tables.curves(tables.rows(report), metric)
    points = [p for curve in curves.values() for p in curve]
    if not points:
        return ""
    sizes, values = [s / MEBI for s, _ in points], [v for _, v in points]
    zero = metric in ("kl", "token_agreement")
    spread = (max(values) - min(values)) * 0.06
    low = 0.0 if zero else min(values) - spread
    plot = svg.Plot(
        svg.logarithmic(min(sizes) / 1.1, max(sizes) * 1.1, "KV cache of a batch, MiB (log)"),
        svg.linear(low, max(values) + spread, unit or "index"),
        width=440,
        height=270,
        title=f"{title} ({better} is better)",
    )
    order = labels(report)
    for label, curve in curves.items():
        number = order.index(label)
        plot.items.append(f'<g class="series" data-series="{number}">')
        plot.line([(s / MEBI, v) for s, v in curve], style=number, name=label)
        marks = [(s / MEBI, v, f"{label}: {v:.4g} at {s / MEBI:.4g} MiB") for s, v in curve]
        plot.markers(marks, number=number)
        plot.items.append("</g>")
    return plot.svg(f"{title} against bytes of the KV cache, a line for each policy")


# --- bytes over time ---


def live_bytes(report: dict, cell: dict) -> str:
    """Bytes in use after every layer of every scale, against the budget."""
    kv = cell["kv"]
    slot = kv["slot_bytes"] / MEBI
    budget = cell["budget"] * kv["dense_slots"] * slot
    pool = kv["allocated_bytes"] / MEBI
    schedule = Schedule.parse(report["geometry"]["schedule"])
    num_layers = report["geometry"]["num_layers"]
    names = [f"{h}×{w}" for h, w in schedule.maps]
    ticks = [((s + 0.5) * num_layers, name) for s, name in enumerate(names)]
    end = schedule.num_scales * num_layers
    plot = svg.Plot(
        svg.Axis(0, end, "token map of the scale; within a scale its layers in turn", ticks),
        svg.linear(0, 1.12 * max(budget, pool), "MiB of a batch"),
        width=max(560, 46 * schedule.num_scales + 66),
        height=280,
    )
    plot.verticals([s * num_layers for s in range(1, schedule.num_scales)], "grid")
    for name, kind, text in (
        ("used_slots", "used", "blocks in use (whole slots)"),
        ("live_tokens", "live", "live tokens"),
    ):
        steps = _steps([value * slot for row in cell[name] for value in row])
        plot.line(steps, style=kind, name=text)
    plot.rule(budget, f"budget {cell['budget']:g}: {budget:.3g} MiB", kind="rule budget")
    if abs(pool - budget) > 0.002 * budget:
        text = f"allocated pool: {pool:.3g} MiB"
        plot.rule(pool, text, kind="rule pool", below=True)
    alt = f"KV bytes in use over time, {cell['label']} at budget {cell['budget']:g}"
    return svg.wide(plot.svg(alt), "bytes over time")


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of a staircase: each value holds for one layer. Runs of equal values are one step."""
    corners: list[tuple[float, float]] = []
    for i, value in enumerate(values):
        if corners and corners[-1][1] == value:
            corners[-1] = (i + 1, value)
        else:
            corners += [(i, value), (i + 1, value)]
    return corners


TIME_KEY = (
    f'<div class="legend"><span class="entry">{svg.line_key("used")}blocks in use × their size'
    f'</span><span class="entry">{svg.line_key("live")}live tokens</span></div>'
)
