"""Charts of a sweep, fidelity against bytes and bytes in use over time, and what all charts share.

On a page, charts take its colours (`page.js`), so that they follow its light and dark modes.
"""

import contextlib
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence

import altair as alt
import numpy as np
import vl_convert

from experiments.evaluation.metrics import METRICS, Metric
from experiments.geometry import read_order
from varjax.core.sequence import Schedule

MEBI = 2.0**20
# seven colours, first with whole lines, then dashed, then dotted
DASHES = [dash for dash in ([1, 0], [6, 3], [2, 2]) for _ in range(7)]


def scale_names(schedule: Schedule) -> list[str]:
    """Return the token map of each scale, with a number if an earlier scale has the same map."""
    names = [f"{h}×{w}" for h, w in schedule.maps]
    counts = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name} ({n + 1})" if n else name for name, n in zip(names, counts, strict=True)]


def plain(values: Iterable[float]) -> list[float | None]:
    """Return numbers for JSON, rounded to five digits; None for those that are not finite."""
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in values]


def chart_of(
    data: Sequence[dict],
    flat: Sequence[str] = (),
    *,
    description: str = "",
    width: int | str = "container",
    height: int = 230,
) -> alt.Chart:
    """Return a chart of `data` without marks. Each entry of a list in one of the fields `flat` is a
    row of its own. description: for readers who see no charts."""
    said = {"description": description} if description else {}
    chart = alt.Chart(alt.Data(values=data), width=width, height=height, **said)
    return chart.transform_flatten(list(flat)) if flat else chart


# --- fidelity against bytes ---


def labels(rows: Sequence[dict]) -> list[str]:
    """Return the labels of the rows that have run, in order. A label's place decides its style."""
    return list(dict.fromkeys(row["label"] for row in rows if row["status"] == "done"))


def fidelity(
    rows: Sequence[dict], of: str = "a batch", legend: alt.Legend | None = None
) -> list[alt.LayerChart]:
    """Return a chart for each metric that has finite values. Its parameter `front` names a policy.

    rows: of the table. of: whose bytes they are, "a batch" or "an image". legend: of the lines;
    None: the page has one.
    """
    sizes = alt.Scale(type="log", nice=False, padding=14)
    x = alt.X("x:Q", title=f"KV cache of {of}, MiB (log)", scale=sizes).axis(tickCount=4)
    there = [(row, row["label"], float(row.get("allocated_bytes", "nan")) / MEBI) for row in rows]
    return _over(x, there, "MiB of the KV cache", labels(rows), legend)


def over_arguments(rows: Sequence[dict], legend: alt.Legend | None = None) -> list[alt.LayerChart]:
    """Return a chart for each argument that a policy has with several values, and each metric: x is
    the argument, and each line the rest that was asked, the budget included. rows: of the table."""
    asked: dict[tuple[str, str], list[tuple[dict, str, str]]] = {}
    for row in rows:
        policy, _, text = row["label"].partition(":")
        pairs = [pair.partition("=")[::2] for pair in re.split(r"\+(?=\w+=)", text)]
        for name, value in pairs if row["status"] == "done" else ():
            rest = "+".join(f"{n}={v}" for n, v in pairs if n != name)
            line = f"{policy}:{rest}" if rest else policy
            point = row, f"{line} at {row['budget']:g}", value
            asked.setdefault((policy, name), []).append(point)
    found = []
    for (policy, name), points in asked.items():
        if len({value for *_, value in points}) > 1:
            lines = list(dict.fromkeys(line for _, line, _ in points))
            numbers = [_number(value) for *_, value in points]
            kind = "Q" if np.isfinite(numbers).all() else "N"
            axis = {"values": sorted(set(numbers))} if kind == "Q" else {}
            x = alt.X(f"x:{kind}", title=f"{policy}: {name}").axis(**axis).scale(zero=False)
            if kind == "Q":
                points = [(*rest, n) for (*rest, _), n in zip(points, numbers, strict=True)]
            found += _over(x, points, name, lines, legend)
    return found


def _number(text: str) -> float:
    """Return the number that a text is, NaN of others."""
    with contextlib.suppress(ValueError):
        return float(text)
    return float("nan")


def _over(
    x: alt.X,
    there: Sequence[tuple[dict, str, float | str]],
    what: str,
    names: list[str],
    legend: alt.Legend | None,
) -> list[alt.LayerChart]:
    """Return a chart for each metric that has finite values. there: rows, each with its line and
    its place on the axis `x`. what: the axis in words. names: of lines."""
    found = []
    for key, metric in METRICS.items():
        points = []
        for row, line, place in there:
            value = float(row.get(key, "nan"))
            ends = {end: float(row.get(f"{key}_{end}", "nan")) for end in ("low", "high")}
            known = ends if np.isfinite([*ends.values()]).all() else {}
            if np.isfinite(value):
                points.append({"policy": line, "x": place, "value": value} | known)
        if points:
            found.append(_lines(metric, points, x, what, names, legend))
    return found


def _lines(
    metric: Metric,
    points: list[dict],
    x: alt.X,
    what: str,
    names: list[str],
    legend: alt.Legend | None,
) -> alt.LayerChart:
    zero, known = metric.from_zero, any("low" in point for point in points)
    shown_on_point = ("value", "low", "high") if known else ("value",)
    tips = [alt.Tooltip(f"{key}:Q", format=".4~g") for key in shown_on_point]
    base = chart_of(points).encode(
        x,
        alt.Y("value:Q", title=metric.unit or "index").scale(zero=zero, padding=0 if zero else 8),
        alt.Color("policy:N", legend=legend).scale(domain=names),
        tooltip=["policy:N", alt.Tooltip(x.shorthand, title=what), *tips],
        opacity=alt.condition("!front || front === datum.policy", alt.value(1), alt.value(0.13)),
    )
    dash = alt.StrokeDash("policy:N", legend=legend).scale(domain=names, range=DASHES)
    shape = alt.Shape("policy:N", legend=legend).scale(domain=names)
    lines = base.mark_line().encode(dash)
    marks = base.mark_point(filled=True, size=70).encode(shape)
    bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5)
    bars = bars.encode(alt.Y("low:Q"), alt.Y2("high:Q"))
    layers = [bars, lines, marks] if known else [lines, marks]
    return (
        alt.layer(*layers, title=f"{metric.title} ({metric.better} is better)")
        .add_params(alt.param(name="front", value=""))
        .properties(description=f"{metric.title} against {what}, a line for each policy")
    )


def drawable(label: str) -> str:
    """Return a label as fonts draw it: without halves of surrogate pairs and control characters."""
    label = label.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else "?" for c in label[:100])


def save(
    path: pathlib.Path, rows: Sequence[dict], draw: Callable[..., list[alt.LayerChart]]
) -> None:
    """Write the charts that `draw` makes of rows to a PNG file, below each other in two columns; no
    file without values."""
    rows = [row | {"label": drawable(row["label"])} for row in rows]
    legend = alt.Legend(title=None, orient="bottom", columns=4, labelLimit=200)
    if found := draw(rows, legend=legend):
        page = alt.concat(*(chart.properties(width=400) for chart in found), columns=2)
        path.write_bytes(vl_convert.vegalite_to_png(page.to_json(), scale=1.5))


# --- bytes over time ---

USED, LIVE = "blocks in use × their size", "live tokens"


def live_bytes(report: dict) -> dict[str, list[str] | alt.LayerChart] | None:
    """{"cells": what there is to choose, "chart": bytes in use after every layer of every scale, of
    the cell that its parameter `cell` names}, if any cell ran. None of models that draw token by
    token, whose slots are all in use from the start."""
    done = [c for c in report["cells"] if c["status"] == "done" and c["budget"] is not None]
    schedule = read_order(report["geometry"]["schedule"])
    if not done or not schedule.num_scales:
        return None
    data = [{"cell": f"{c['label']} at {c['budget']:g}"} | _live_bytes(c) for c in done]
    cells = [row["cell"] for row in data]
    layers = report["geometry"]["num_layers"]
    names = scale_names(schedule)
    places = [(s + 0.5) * layers for s in range(len(names))]
    text = f"{json.dumps(names)}[indexof({json.dumps(places)}, datum.value)]"
    title = "scales by their token maps, in each its layers"
    axis = alt.Axis(title=title, values=places, labelExpr=text, grid=False, ticks=False)
    chosen = chart_of(data).transform_filter("datum.cell === cell")
    lines = (
        chosen.transform_flatten(["step", USED, LIVE])
        .transform_fold([USED, LIVE], as_=["what", "MiB"])
        .mark_line(interpolate="step-after")
        .encode(
            alt.X("step:Q", axis=axis).scale(domain=[0, len(names) * layers], nice=False),
            alt.Y("MiB:Q", title="MiB of a batch"),
            alt.Color("what:N", title=None).scale(domain=[USED, LIVE]),
            strokeWidth=alt.condition(alt.datum.what == LIVE, alt.value(2), alt.value(5)),
            tooltip=["what:N", alt.Tooltip("MiB:Q", format=".4~g")],
        )
    )
    limits = chosen.transform_flatten(["limit", "text", "dy"]).encode(alt.Y("limit:Q"))
    texts = limits.mark_text(align="left", dx=4, dy=alt.expr("datum.dy"), color="currentColor")
    dashes = alt.StrokeDash("dy:N", legend=None).scale(domain=[-8, 10], range=[[7, 4], [2, 3]])
    chart = alt.layer(
        lines,
        limits.mark_rule(color="currentColor").encode(dashes),
        texts.encode(text="text:N", x=alt.value(0)),
        description="KV bytes in use over time, of one policy at one budget",
    ).add_params(alt.param("cell", value=cells[0]))
    return {"cells": cells, "chart": chart}


def _live_bytes(cell: dict) -> dict:
    """Return MiB in use after each step, and limits with their names. dy: places a name above
    (negative) or below its line."""
    kv, share = cell["kv"], cell["budget"]
    slot, pool = kv["slot_bytes"] / MEBI, kv["allocated_bytes"] / MEBI
    budget = share * kv["dense_slots"] * slot
    used, live = (plain(np.ravel(cell[key]) * slot) for key in ("used_slots", "live_tokens"))
    found = {"step": list(range(len(used) + 1)), USED: [*used, used[-1]], LIVE: [*live, live[-1]]}
    found |= {"limit": [budget], "text": [f"budget {share:g}: {budget:.3g} MiB"], "dy": [-8]}
    if abs(pool - budget) > 0.002 * budget:
        found["limit"].append(pool)
        found["text"].append(f"allocated pool: {pool:.3g} MiB")
        found["dy"].append(10)
    return found
