"""A plan for people: a few lines of text; in notebooks a table and a picture of who keeps what."""

import html
from typing import ClassVar

import numpy as np

CELL = 14  # pixels of a head in the picture, at most
MOST_PANELS, PANELS_WIDTH = 5, 900  # scales or stages that are shown, and pixels for all of them
GAP, TITLE = 16, 18  # pixels between panels, and of a line of text
WORDS = 90  # pixels of the words over a panel, at least
LEGEND, LEGEND_AT, LEGEND_STEP = (0.0, 0.25, 0.5, 0.75, 1.0), 430, 60
LIGHT, DARK = np.array([239, 243, 250]), np.array([8, 48, 107])  # RGB of an empty and a full head


class PlanView:
    """Base of plans that shows them; everything it asks for is a member of `plan.CachePlan`.

    decided_after: after what the cache changes, for people: a scale, or a stage of tokens.
    """

    decided_after: ClassVar[str] = "scale"

    def __repr__(self) -> str:
        return "\n".join(f"{name:9s} {value}" for name, value in self.facts().items())

    def _repr_html_(self) -> str:
        """HTML: the facts, the table of what is held when, and the picture."""
        facts = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self.facts().items()
        )
        table = html.escape("\n".join(self.timeline()))
        details = f"<details><summary>held when</summary><pre>{table}</pre></details>"
        return f"<table>{facts}</table>{self.picture()}{details}"

    def picture(self) -> str:
        """SVG of who keeps what: a panel for some of the scales (or stages), a row for every layer,
        a cell for every head. The darker a cell, the more of a full cache its head holds then."""
        layers, heads = self.capacity.shape[1:]
        cell = max(2, min(CELL, PANELS_WIDTH // (heads * MOST_PANELS)))
        shown = np.unique(np.linspace(1, len(self.capacity) - 1, MOST_PANELS).round().astype(int))
        shown = shown[shown > 0] if len(self.capacity) > 1 else [0]
        step = max(heads * cell, WORDS) + GAP
        parts = [self._panel(s, i * step, cell) for i, s in enumerate(shown)]
        width, top = (
            max(len(shown) * step, LEGEND_AT + len(LEGEND) * LEGEND_STEP),
            layers * cell + TITLE,
        )
        words = "rows: layers, columns: heads; share of a full cache that a head holds:"
        parts.append(f"<text x='0' y='{top + TITLE}'>{words}</text>")
        for i, share in enumerate(LEGEND):
            x = LEGEND_AT + i * LEGEND_STEP
            parts.append(_cell(x, top + TITLE - CELL, CELL, share, f"{share:.0%}"))
            parts.append(f"<text x='{x + CELL + 4}' y='{top + TITLE}'>{share:.0%}</text>")
        size = f"width='{width}' height='{top + 2 * TITLE}'"
        style = "font-family:sans-serif;font-size:11px"
        svg = f"<svg xmlns='http://www.w3.org/2000/svg' {size} style='{style}'>"
        return f"{svg}{''.join(parts)}</svg>"

    def _panel(self, stage: int, left: int, cell: int) -> str:
        full = max(1, self.geometry.schedule.persistent_tokens)
        cells = [f"<text x='{left}' y='{TITLE - 5}'>before {self.decided_after} {stage}</text>"]
        for layer, head in np.ndindex(*self.capacity.shape[1:]):
            held = int(self.capacity[stage, layer, head])
            words = f"layer {layer}, head {head}: {held} tokens, {held / full:.0%}"
            place = left + head * cell, TITLE + layer * cell
            cells.append(_cell(*place, cell - (cell > 4), held / full, words))
        return "".join(cells)

    def facts(self) -> dict[str, str]:
        """Name, sizes and bytes of the plan."""
        g, name = self.geometry, "no policy" if self.policy is None else self.policy.name
        per_image = {dtype: self.num_bytes(1, dtype) for dtype in ("bfloat16", "float32")}
        contents = f"contents {'known beforehand' if self.static_content else 'decided per image'}"
        return {
            "plan": f"{name}, budget {self.budget:g}, accounting {self.accounting}, {contents}",
            "model": f"{g.num_layers} layers, {g.heads}; {g.schedule.outline()}",
            "pool": f"{self.pool_blocks} blocks of {self.block_size} slots = {self.pool_tokens} "
            f"tokens, {self.fraction:.2%} of a full cache ({g.dense_tokens} tokens)",
            "peak": f"{self.peak_live_fraction:.2%} of a full cache is live at most",
            "bytes": ", ".join(f"{size} in {dtype}" for dtype, size in per_image.items())
            + f" for an image ({g.rows_per_image} rows)",
        }


def _cell(x: int, y: int, size: int, share: float, words: str) -> str:
    """A square, coloured by a share from 0 to 1, with words that show when it is pointed at."""
    red, green, blue = (LIGHT + min(1.0, share) * (DARK - LIGHT)).round().astype(int)
    place = f"x='{x}' y='{y}' width='{size}' height='{size}'"
    return f"<rect {place} fill='rgb({red},{green},{blue})'><title>{words}</title></rect>"
