"""Charts of a calibration: what the model's heads look at, and which heads HeatKV prunes when.

Letters: K scales, L layers, N heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import altair as alt
import numpy as np

from experiments.report.charts import chart_of, plain, scale_names
from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.sequence import SCALES
from varjax.policies import BinaryHeatKV, HeatKV

# Nunez, Anderton and Renslow 2018: readable with every kind of colour vision
CIVIDIS = "cividis"
Pruning = tuple[str, str, list[alt.Chart] | str]  # policy, budget, charts or why there are none
Drawn = alt.Chart | list[Pruning]


def draw(
    found: Calibration | None, geometry: Geometry, budgets: Sequence[float]
) -> dict[str, Drawn]:
    """Return everything that can be drawn from a calibration, by name. budgets: of the prunings."""
    there = {f.name for f in fields(Calibration) if getattr(found, f.name, None) is not None}
    drawn: dict[str, Drawn] = {}
    if "beta" in there:
        density = replace(found, schedule=geometry.schedule).attention_density
        drawn["density"] = density_map(density, geometry)
    if "key_discrepancy" in there:
        drawn["discrepancy"] = discrepancy(found.key_discrepancy, geometry)
    if {"orders", "beta"} & there:
        drawn["pruning"] = list(pruning(budgets, geometry, found))
    if "rank_dispersion" in there:
        drawn["dispersion"] = dispersion(np.asarray(found.rank_dispersion), geometry)
    return drawn


def density_map(density: np.ndarray, geometry: Geometry) -> alt.Chart:
    """Draw all heads (AMS-KV, Figure 4): a row per head, heads of a layer below each other."""
    names = scale_names(geometry.schedule)
    data = [
        {"layer": i, "head": j, "source scale": names, "density": plain(density[i, j])}
        for i, j in np.ndindex(density.shape[:2])
    ]
    height = max(240, min(900, 9 * len(data)))
    what = "attention density of every head on every source scale"
    chart = chart_of(data, ["source scale", "density"], description=what, height=height)
    return (
        chart.transform_filter("datum.density > 0")
        .mark_rect()
        .encode(
            alt.X("source scale:O", sort=None, title="source scale i"),
            alt.Y("layer:O", title="layer (its heads below each other)").scale(paddingInner=0.04),
            alt.Color("density:Q", title="attention received per token (log)").scale(
                scheme=CIVIDIS, type="log"
            ),
            yOffset="head:O",
            tooltip=["layer:O", "head:O", "source scale:O", "density:Q"],
        )
    )


def discrepancy(values: np.ndarray, geometry: Geometry) -> alt.Chart:
    """Draw layers by scales (AMS-KV, Figure 6). values: float [L, K]; the first scale has no scale
    before it."""
    names = scale_names(geometry.schedule)[1:]
    data = [{"layer": i, "scale": names, "distance": plain(v[1:])} for i, v in enumerate(values)]
    what = "distance of keys to those of the scale before, layers by scales"
    height = max(140, 16 * len(values))
    chart = chart_of(data, ["scale", "distance"], description=what, height=height)
    return chart.mark_rect().encode(
        alt.X("scale:O", sort=None, title="scale i, compared with scale i − 1"),
        alt.Y("layer:O"),
        alt.Color("distance:Q", title="mean ‖kᵢ − resized kᵢ₋₁‖₂").scale(scheme=CIVIDIS),
        tooltip=["layer:O", "scale:O", "distance:Q"],
    )


def pruning(
    budgets: Sequence[float], geometry: Geometry, calibration: Calibration
) -> Iterator[Pruning]:
    """Yield the charts of every policy and budget (HeatKV, Figure 4)."""
    for name, cls in (("binary_heatkv", BinaryHeatKV), ("heatkv", HeatKV)):
        for budget in budgets:
            try:
                policy = cls(budget=budget).rule(SCALES).prepare(geometry, calibration)
                last_use = policy.rule(SCALES).schedule(geometry, budget).last_use()
            except UserError as error:
                yield name, f"{budget:g}", str(error)
                continue
            sources = range(policy.sinks, geometry.schedule.num_scales - 1)
            if cls is BinaryHeatKV:
                sources = sources[:1]  # whole heads: the same for all sources
            found = [_removals(last_use[..., source], source, geometry) for source in sources]
            nothing = "Every stored scale is a sink: nothing is ever removed."
            yield name, f"{budget:g}", found or nothing


def _removals(last_use: np.ndarray, source: int, geometry: Geometry) -> alt.Chart:
    """Draw a square per head: when it gives up scale `source`. last_use: int [L, N], the last scale
    that sees it."""
    layers, heads = last_use.shape
    names = scale_names(geometry.schedule)
    words = np.array(["", *(f"before {name}" for name in names[1:]), "never"])
    data = [
        {"layer": i, "head": list(range(heads)), "given up": row.tolist()}
        for i, row in enumerate(words[last_use + 1])
    ]
    square = max(9, min(34, 220 // heads, 300 // layers))
    size = {"width": square * heads, "height": square * layers}
    what = f"when each head gives up source scale {names[source]}"
    chart = chart_of(data, ["head", "given up"], description=what, **size)
    return (
        chart.properties(title=f"source {names[source]}")
        .mark_rect(stroke="var(--back)")
        .encode(
            alt.X("head:O"),
            alt.Y("layer:O"),
            alt.Color("given up:N").scale(scheme=CIVIDIS, domain=words[source + 1 :].tolist()),
            tooltip=["layer:O", "head:O", "given up:N"],
        )
    )


def dispersion(values: np.ndarray, geometry: Geometry) -> alt.Chart:
    """Draw the standard deviation of a head's rank (HeatKV, Figure 6), float [up to K - 1]."""
    scales = geometry.schedule.num_scales
    names = scale_names(geometry.schedule)[scales - 1 - len(values) : scales - 1]
    total = geometry.num_layers * geometry.num_heads
    data = [{"source scale": names, "ranks": plain(values)}]
    what = "standard deviation of head ranks over calibrations, per source scale"
    chart = chart_of(data, ["source scale", "ranks"], description=what)
    return chart.mark_line(point={"filled": True, "size": 70}).encode(
        alt.X("source scale:O", sort=None),
        alt.Y("ranks:Q", title=f"ranks (of {total} heads)").scale(zero=True),
        tooltip=["source scale:O", "ranks:Q"],
    )
