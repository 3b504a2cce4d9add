"""Diagrams as inline SVG. Colours come from the style sheet of the page, so that they follow the
light or dark scheme; lengths are CSS pixels."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from experiments.report import png

NUM_COLOURS = 7  # --s0 to --s6 of the style sheet
MARKERS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-5l5,5l-5,5l-5,-5z",
    "M0,-4.8l4.8,8.4h-9.6z",
    "M0,4.8l4.8,-8.4h-9.6z",
    "M-1.6,-5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",
    "M0,-5l1.5,3.2l3.5,.4l-2.6,2.4l.7,3.6l-3.1,-1.8l-3.1,1.8l.7,-3.6l-2.6,-2.4l3.5,-.4z",
    "M-5,-2l3,-3l6,0l1,3l-1,5l-6,0z",
)
DASHES = ("none", "6 3", "2 2")


@dataclass(frozen=True)
class Axis:
    """One axis: its ends, whether it is logarithmic, ticks (value, text), what it shows."""

    low: float
    high: float
    label: str
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def part(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = (math.log(max(x, 1e-300)) for x in (low, high, value))
        return (value - low) / (high - low) if high != low else 0.5


def linear(low: float, high: float, label: str, count: int = 5) -> Axis:
    """An axis from `low` to `high` with round ticks."""
    if not high > low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= count)
    first = math.ceil(low / step - 1e-9)
    values = [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return Axis(low, high, label, [(v, f"{v:.6g}") for v in values])


def logarithmic(low: float, high: float, label: str) -> Axis:
    """A logarithmic axis with ticks at powers of ten and, where there are few, between."""
    low, high = (low, high) if high > low else (low / 1.5, high * 1.5)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = math.log10(high / low)
    steps = (1, 1.5, 2, 3, 4, 5, 7) if decades < 1 else (1, 2, 5) if decades < 2 else (1,)
    values = [m * 10.0**e for e in range(first, last + 1) for m in steps]
    inside = [v for v in values if low * 0.999 <= v <= high * 1.001]
    return Axis(low, high, label, [(v, f"{v:g}") for v in inside], log=True)


def counted(names: Sequence[str], label: str, *, down: bool = False, most: int = 12) -> Axis:
    """An axis of cells 0..n-1 with their names in the middle; `down` counts from the top."""
    every = max(1, -(-len(names) // most))
    ticks = [(i + 0.5, name) for i, name in enumerate(names) if i % every == 0]
    return Axis(*((len(names), 0) if down else (0, len(names))), label, ticks)


@dataclass
class Plot:
    """A diagram with two axes; what is added later lies on top."""

    x: Axis
    y: Axis
    width: float = 360
    height: float = 240
    title: str = ""
    left: float = 54
    right: float = 12
    grid: bool = True
    items: list[str] = field(default_factory=list)

    @property
    def top(self) -> float:
        return 24 if self.title else 10

    @property
    def bottom(self) -> float:
        return self.height - 42

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (
            self.left + self.x.part(x) * (self.width - self.left - self.right),
            self.bottom - self.y.part(y) * (self.bottom - self.top),
        )

    def line(self, points: Iterable[tuple[float, float]], *, style: int | str, name: str) -> None:
        """A polyline; `style` is the number of a series or a CSS class."""
        places = [self.at(*point) for point in points]
        path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self.items.append(f'<path {_stroke(style)} d="{path}"><title>{escape(name)}</title></path>')

    def markers(self, points: Iterable[tuple[float, float, str]], *, number: int) -> None:
        """Markers of series `number`, each with what it says when pointed at."""
        shape = MARKERS[number % len(MARKERS)]
        for x, y, text in points:
            place = "{:.1f},{:.1f}".format(*self.at(x, y))
            self.items.append(
                f'<path class="mark f{number % NUM_COLOURS}" transform="translate({place})" '
                f'd="{shape}"><title>{escape(text)}</title></path>'
            )

    def rule(self, y: float, text: str, *, kind: str = "rule", below: bool = False) -> None:
        """A horizontal line over the whole width, with its name above or below."""
        (x0, place), (x1, _) = self.at(self.x.low, y), self.at(self.x.high, y)
        self.items.append(
            f'<path class="{kind}" d="M{x0:.1f},{place:.1f}H{x1:.1f}"/>'
            f'<text class="note" x="{x0 + 4:.1f}" y="{place + (14 if below else -4):.1f}">'
            f"{escape(text)}</text>"
        )

    def image(self, values: np.ndarray) -> None:
        """Numbers in [0, 1] as colours over the whole area; row 0 lies at the top."""
        (x0, y0), (x1, y1) = (self.left, self.top), (self.width - self.right, self.bottom)
        self.items.append(
            f'<image x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}" '
            f'preserveAspectRatio="none" class="cells" href="{png.data_uri(png.colours(values))}"/>'
        )

    def verticals(self, places: Iterable[float], kind: str = "border") -> None:
        ends = [(self.at(x, self.y.low)[0], self.top, self.bottom) for x in places]
        path = "".join(f"M{x:.1f},{y0:.1f}V{y1:.1f}" for x, y0, y1 in ends)
        self.items.append(f'<path class="{kind}" d="{path}"/>')

    def horizontals(self, places: Iterable[float], kind: str = "border") -> None:
        ends = [self.at(self.x.low, y)[1] for y in places]
        path = "".join(f"M{self.left:.1f},{y:.1f}H{self.width - self.right:.1f}" for y in ends)
        self.items.append(f'<path class="{kind}" d="{path}"/>')

    def _axes(self) -> list[str]:
        x0, x1 = self.left, self.width - self.right
        parts = [f'<path class="axis" d="M{x0},{self.top}V{self.bottom}H{x1}"/>']
        for value, text in self.x.ticks:
            x = self.at(value, self.y.low)[0]
            parts.append(
                f'<text x="{x:.1f}" y="{self.bottom + 15:.1f}" text-anchor="middle">'
                f"{escape(text)}</text>"
            )
        for value, text in self.y.ticks:
            y = self.at(self.x.low, value)[1]
            parts.append(
                f'<text x="{x0 - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            )
        middle = (self.top + self.bottom) / 2
        parts.append(
            f'<text class="label" x="{(x0 + x1) / 2:.1f}" y="{self.height - 8:.1f}" '
            f'text-anchor="middle">{escape(self.x.label)}</text>'
            f'<text class="label" transform="translate(12,{middle:.1f}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y.label)}</text>'
        )
        if self.title:
            parts.append(f'<text class="title" x="{x0}" y="15">{escape(self.title)}</text>')
        return parts

    def svg(self, alt: str) -> str:
        """The finished diagram; `alt` says what it shows."""
        lines = [self.at(self.x.low, v)[1] for v, _ in self.y.ticks] if self.grid else []
        grid = "".join(f"M{self.left},{y:.1f}H{self.width - self.right}" for y in lines)
        body = "".join([f'<path class="grid" d="{grid}"/>', *self.items, *self._axes()])
        return (
            f'<svg role="img" aria-label="{escape(alt)}" viewBox="0 0 {self.width:g} '
            f'{self.height:g}" width="{self.width:g}" height="{self.height:g}">{body}</svg>'
        )


def _stroke(style: int | str) -> str:
    """Attributes of a line: a series by colour, then by dashes, or a class of its own."""
    if isinstance(style, str):
        return f'class="line {style}"'
    dash = DASHES[style // NUM_COLOURS % len(DASHES)]
    return f'class="line c{style % NUM_COLOURS}" stroke-dasharray="{dash}"'


def key(number: int) -> str:
    """Line and marker of series `number` for a legend."""
    return (
        '<svg class="key" aria-hidden="true" viewBox="0 0 26 12" width="26" height="12">'
        f'<path {_stroke(number)} d="M0,6H26"/>'
        f'<path class="mark f{number % NUM_COLOURS}" transform="translate(13,6)" '
        f'd="{MARKERS[number % len(MARKERS)]}"/></svg>'
    )


def wide(figure: str, name: str) -> str:
    """A diagram that scrolls sideways, by keyboard too, where the page is narrow."""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}">{figure}</div>'
    )


def line_key(style: int | str) -> str:
    """A line of a legend, without marker."""
    return (
        '<svg class="key" aria-hidden="true" viewBox="0 0 26 12" width="26" height="12">'
        f'<path {_stroke(style)} d="M0,6H26"/></svg>'
    )


def colour_bar(texts: Sequence[str], label: str) -> str:
    """A continuous scale of colours with texts spread evenly along it."""
    ramp = png.data_uri(png.colours(np.linspace(0, 1, 64)[None]))
    marks = "".join(f"<span>{escape(text)}</span>" for text in texts)
    return (
        f'<div class="bar"><span>{escape(label)}</span><div><img alt="colour scale" src="{ramp}">'
        f'<div class="ends">{marks}</div></div></div>'
    )


def swatches(values: Sequence[float], texts: Sequence[str], label: str) -> str:
    """A legend of single colours."""
    found = [f"rgb({r} {g} {b})" for r, g, b, _ in png.colours(np.array(values, float))]
    parts = "".join(
        f'<span class="swatch"><i style="background:{colour}"></i>{escape(text)}</span>'
        for colour, text in zip(found, texts, strict=True)
    )
    return f'<div class="bar"><span>{escape(label)}</span>{parts}</div>'
