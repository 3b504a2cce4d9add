"""Figures of a calibration: what the model's heads look at, and what HeatKV makes of it.

Letters: K scales, L layers, N heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from experiments.report import svg
from varjax.cache.geometry import Geometry
from varjax.calibration import Calibration
from varjax.errors import UserError
from varjax.policies import BinaryHeatKV, HeatKV

PATTERN_SIZE = 300


def scale_names(geometry: Geometry) -> list[str]:
    return [f"{h}×{w}" for h, w in geometry.schedule.maps]


def _unit(values: np.ndarray, *, log: bool = False) -> tuple[np.ndarray, list[str]]:
    """(values spread over [0, 1], texts for the ends and the middle)."""
    with np.errstate(divide="ignore"):
        shown = np.where(values > 0, np.log10(values), np.nan) if log else values
    if not np.isfinite(shown).any():
        return np.full(values.shape, np.nan), ["0"]
    low, high = np.nanmin(shown), np.nanmax(shown)
    ends = [low, (low + high) / 2, high]
    texts = [f"{10**x:.2g}" if log else f"{x:.3g}" for x in ends]
    return (shown - low) / (high - low or 1), texts


# --- attention density (AMS-KV, Figure 4) ---


def attention_density(beta: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """d[i <- j] float [L, N, K] of the last scale j: T_j beta[j, i] / T_i (AMS-KV, Sec. 3)."""
    sizes = np.asarray(tokens, float)
    return sizes[-1] * beta[..., -1, :] / sizes


def density_map(density: np.ndarray, geometry: Geometry) -> str:
    """All heads at once: a row per head, grouped by layer."""
    layers, heads, scales = density.shape
    values, texts = _unit(density.reshape(layers * heads, scales), log=True)
    rows = svg.Axis(
        layers * heads,
        0,
        "layer (its heads below each other)",
        [((i + 0.5) * heads, str(i)) for i in range(0, layers, max(1, layers // 12))],
    )
    columns = svg.counted(scale_names(geometry), "source scale i")
    height = min(900, max(220, 9 * layers * heads) + 52)
    plot = svg.Plot(columns, rows, width=_columns_width(scales), height=height, grid=False)
    plot.image(values)
    plot.horizontals([i * heads for i in range(1, layers)])
    picture = plot.svg("attention density of every head on every source scale")
    return svg.wide(picture, "attention density") + svg.colour_bar(
        texts, "attention received per token (log)"
    )


def _columns_width(scales: int) -> int:
    return max(340, 44 * scales + 66)


def density_lines(density: np.ndarray, geometry: Geometry, layer: int) -> str:
    """The heads of one layer, and their mean."""
    found = density[layer]
    positive = density[density > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (0.1, 1.0)
    low = max(low, high * 1e-6)
    scales = np.arange(found.shape[-1]) + 0.5
    plot = svg.Plot(
        svg.counted(scale_names(geometry), "source scale i"),
        svg.logarithmic(low / 1.2, high * 1.2, "density (log)"),
        width=_columns_width(len(scales)),
        height=300,
    )
    for head, values in enumerate(found):
        points = list(zip(scales, np.maximum(values, low / 1.2), strict=True))
        plot.line(points, style=head, name=f"layer {layer}, head {head}")
    mean = list(zip(scales, np.maximum(found.mean(0), low / 1.2), strict=True))
    plot.line(mean, style="mean", name="mean over heads")
    names = "".join(
        f'<span class="entry">{svg.line_key(head)}head {head}</span>' for head in range(len(found))
    )
    picture = plot.svg(f"attention density per source scale, heads of layer {layer}")
    return f'{svg.wide(picture, "attention density")}<div class="legend">{names}</div>'


# --- key discrepancy (AMS-KV, Figure 6) ---


def discrepancy(values: np.ndarray, geometry: Geometry) -> str:
    """Layers by scales; the first scale has no scale before it."""
    layers, scales = values.shape
    unit, texts = _unit(values[:, 1:])
    plot = svg.Plot(
        svg.counted(scale_names(geometry)[1:], "scale i, compared with scale i − 1"),
        svg.counted([str(i) for i in range(layers)], "layer", down=True),
        width=_columns_width(scales - 1),
        height=max(200, 16 * layers + 60),
        grid=False,
    )
    plot.image(unit)
    picture = plot.svg("distance of keys to those of the scale before, layers by scales")
    return svg.wide(picture, "key discrepancy") + svg.colour_bar(texts, "mean ‖kᵢ − resized kᵢ₋₁‖₂")


# --- head patterns (HeatKV, Figure 3) ---


def patterns(calibration: Calibration, geometry: Geometry) -> str:
    """Example attention maps: queries down, cached columns across."""
    edges = np.asarray(calibration.pattern_edges, float)
    found = []
    for (head, layer), attention in zip(
        calibration.pattern_heads, calibration.patterns, strict=True
    ):
        found.append(_pattern(int(head), int(layer), np.asarray(attention), edges, geometry))
    return f'<div class="panels">{"".join(found)}</div>' + svg.colour_bar(
        ["0", "1/4 of the largest", "the largest"], "attention per token (square root)"
    )


def _pattern(head: int, layer: int, attention: np.ndarray, edges: np.ndarray, geometry) -> str:
    per_token = attention / np.diff(edges)
    unit = np.sqrt(per_token / (per_token.max() or 1))
    starts = [s for s in geometry.schedule.starts if edges[0] < s < edges[-1]]
    borders = [float(np.interp(s, edges, np.arange(edges.size))) for s in starts]
    ends = [0.0, *borders, float(edges.size - 1)]
    middles = [(a + b) / 2 for a, b in zip(ends, ends[1:], strict=False)]
    room = (edges.size - 1) / 10  # a name needs a tenth of the width
    ticks, last = [], -room
    for place, name in reversed(list(zip(middles, scale_names(geometry), strict=False))):
        if not ticks or last - place >= room:
            ticks.append((place, name))
            last = place
    plot = svg.Plot(
        svg.Axis(0, edges.size - 1, "cached tokens, scale by scale", ticks),
        svg.Axis(len(attention), 0, "queries, in raster order", []),
        width=PATTERN_SIZE + 30,
        height=PATTERN_SIZE,
        title=f"layer {layer}, head {head}",
        left=26,
        grid=False,
    )
    plot.image(unit)
    plot.verticals(borders, "border strong")
    return plot.svg(f"attention map of layer {layer}, head {head}")


# --- pruning schedule (HeatKV, Figure 4) ---


@dataclass(frozen=True)
class Pruning:
    """death: int [L, N, K], the first scale that no longer sees a source scale; sinks: scales that
    are never dropped."""

    death: np.ndarray
    sinks: int


def pruning(policy: HeatKV, geometry: Geometry, calibration: Calibration) -> Pruning | UserError:
    """The schedule of a policy of the HeatKV family, or why there is none."""
    try:
        policy = policy.prepare(geometry, calibration)
        schedule = policy.schedule(geometry, policy.budget, calibration)
        return Pruning(schedule.death(), policy.sinks)
    except UserError as error:
        return error


def pruning_figure(found: Pruning | UserError, geometry: Geometry, *, whole: bool) -> str:
    """A square per head: for whole heads one grid, otherwise one per source scale."""
    if isinstance(found, UserError):
        return f'<p class="missing">{escape(str(found))}</p>'
    num_scales, names = geometry.schedule.num_scales, scale_names(geometry)
    sources = range(found.sinks, num_scales - 1)
    if not sources:
        return '<p class="missing">Every stored scale is a sink: nothing is ever removed.</p>'
    first = found.sinks + 1
    shown = [first - 1] if whole else list(sources)
    grids = [_head_grid(found, j, geometry, whole) for j in shown]
    legend = svg.swatches(
        [_tone(d, first, num_scales) for d in range(first, num_scales + 1)],
        [*(f"before {names[d]}" for d in range(first, num_scales)), "never"],
        "reduced to its sinks" if whole else "given up",
    )
    return f'<div class="panels small">{"".join(grids)}</div>{legend}'


def _tone(death, first: int, num_scales: int):
    return (death - first) / max(1, num_scales - first)


def _head_grid(found: Pruning, source: int, geometry: Geometry, whole: bool) -> str:
    layers, heads = geometry.num_layers, geometry.num_heads
    name = scale_names(geometry)[source]
    death = found.death[:, :, source]
    square = max(9, min(34, 220 // heads, 300 // layers))
    plot = svg.Plot(
        svg.counted([str(i) for i in range(heads)], "head", most=8),
        svg.counted([str(i) for i in range(layers)], "layer", down=True),
        width=max(150, square * heads) + 66,
        height=square * layers + 66,
        title="" if whole else f"source {name}",
        grid=False,
    )
    plot.image(_tone(death, found.sinks + 1, geometry.schedule.num_scales))
    plot.verticals(range(1, heads))
    plot.horizontals(range(1, layers))
    what = "removal order of heads" if whole else f"when each head gives up source scale {name}"
    return plot.svg(what)


def pruning_variants(
    budgets: Sequence[float], geometry: Geometry, calibration: Calibration
) -> dict[tuple[str, float], str]:
    """{(policy, budget): figure}."""
    found = {}
    for name, cls in (("binary_heatkv", BinaryHeatKV), ("heatkv", HeatKV)):
        for budget in budgets:
            result = pruning(cls(budget=budget), geometry, calibration)
            figure = pruning_figure(result, geometry, whole=cls is BinaryHeatKV)
            found[name, budget] = figure
    return found


# --- stability (HeatKV, Figure 6) ---


def dispersion(values: np.ndarray, geometry: Geometry) -> str:
    """Standard deviation of a head's rank, per source scale."""
    scales = geometry.schedule.num_scales
    names = scale_names(geometry)[scales - 1 - len(values) : scales - 1]
    total = geometry.num_layers * geometry.num_heads
    plot = svg.Plot(
        svg.counted(names, "source scale"),
        svg.linear(0, float(values.max()) * 1.1 or 1.0, f"ranks (of {total} heads)"),
        width=_columns_width(len(values)),
        height=260,
    )
    places = [(i + 0.5, float(v)) for i, v in enumerate(values)]
    plot.line(places, style=0, name="standard deviation of ranks")
    plot.markers([(x, v, f"{names[int(x)]}: {v:.3g} ranks") for x, v in places], number=0)
    picture = plot.svg("standard deviation of head ranks over calibrations, per source scale")
    return svg.wide(picture, "stability of ranks")
