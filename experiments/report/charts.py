"""What all charts share. Colours are the page's (`page.js`), so that they follow light and dark."""

import json
from collections.abc import Iterable, Sequence

import altair as alt
import numpy as np

from varjax.schedule import Schedule

# seven colours, first with whole lines, then dashed, then dotted
DASHES = [dash for dash in ([1, 0], [6, 3], [2, 2]) for _ in range(7)]


def scale_names(schedule: Schedule) -> list[str]:
    """The token map of each scale; if it is not the first of its size, with its number."""
    names = [f"{h}×{w}" for h, w in schedule.maps]
    counts = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name} ({n + 1})" if n else name for name, n in zip(names, counts, strict=True)]


def plain(values: Iterable[float]) -> list[float | None]:
    """Numbers as JSON has them, to five digits; None for what is not finite."""
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in values]


def named_axis(title: str, names: Sequence[str], places: Sequence[float]) -> alt.Axis:
    """Names at places of an axis of numbers."""
    text = f"{json.dumps(names)}[indexof({json.dumps(places)}, datum.value)]"
    return alt.Axis(title=title, values=places, labelExpr=text, grid=False, ticks=False)


def rows(data: Sequence[dict], flat: Sequence[str] = (), **properties) -> alt.Chart:
    """An empty chart of `data`; lists in the fields `flat` stand for a row for each entry."""
    chart = alt.Chart(alt.Data(values=data), **{"width": "container", "height": 230} | properties)
    return chart.transform_flatten(list(flat)) if flat else chart
