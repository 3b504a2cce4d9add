"""A plan for people: a few lines of text; in notebooks a table and a picture of who keeps what."""

import html

import numpy as np

CELL = 12  # pixels of a head in the picture
WIDEST = 720  # pixels of the picture; with more heads cells get narrower
LIGHT, DARK = np.array([239, 243, 250]), np.array([8, 48, 107])  # RGB of an empty and a full head


class PlanView:
    """Base of plans that shows them; everything it asks for is a member of `plan.CachePlan`."""

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
        """SVG: a row for every layer, a cell for every head. The darker a cell, the more of a full
        cache its head holds in the end."""
        held = self.capacity[-1] / max(1, self.geometry.schedule.persistent_tokens)
        layers, heads = held.shape
        width = min(CELL, max(1, WIDEST // heads))
        cells = []
        for layer, head in np.ndindex(layers, heads):
            share = min(1.0, float(held[layer, head]))
            red, green, blue = (LIGHT + share * (DARK - LIGHT)).round().astype(int)
            cells.append(
                f"<rect x='{head * width}' y='{layer * CELL}' width='{width}' height='{CELL}' "
                f"fill='rgb({red},{green},{blue})'><title>layer {layer}, head {head}: "
                f"{int(self.capacity[-1, layer, head])} tokens, {share:.0%}</title></rect>"
            )
        size = f"width='{heads * width}' height='{layers * CELL}'"
        caption = (
            "layers downwards, heads to the right; dark: much of a full cache is kept in the end"
        )
        return (
            f"<figure style='margin:8px 0'><svg xmlns='http://www.w3.org/2000/svg' {size}>"
            f"{''.join(cells)}</svg><figcaption><small>{caption}</small></figcaption></figure>"
        )

    def facts(self) -> dict[str, str]:
        """What it is, how much it holds, what that takes."""
        g, name = self.geometry, "no policy" if self.policy is None else self.policy.name
        per_image = {dtype: self.num_bytes(1, dtype) for dtype in ("bfloat16", "float32")}
        contents = f"contents {'known beforehand' if self.static_content else 'decided per image'}"
        return {
            "plan": f"{name}, budget {self.budget:g}, accounting {self.accounting}, {contents}",
            "model": f"{g.num_layers} layers, {g.num_heads} heads of {g.head_dim}; "
            f"{g.schedule.outline()}",
            "pool": f"{self.pool_blocks} blocks of {self.block_size} slots = {self.pool_tokens} "
            f"tokens, {self.fraction:.2%} of a full cache ({g.dense_tokens} tokens)",
            "peak": f"{self.peak_live_fraction:.2%} of a full cache is live at most",
            "bytes": ", ".join(f"{size} in {dtype}" for dtype, size in per_image.items())
            + f" for an image ({g.rows_per_image} rows)",
        }
