"""The sections of the page, each complete or saying what would complete it."""

import json
import math
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from experiments.report import calibration_figures as measured_figures
from experiments.report import png, sweep_figures
from experiments.sweep import tables
from varjax.cache.geometry import Geometry
from varjax.calibration import Calibration

CALIBRATE = "python -m experiments.calibrate --save=CAL.json"
_TABLE_ORDER = (
    "label budget planned_bytes allocated_bytes psnr ssim token_agreement kl steady_s_per_image"
).split()
SMALL_PICTURE = 160  # pixels: smaller ones are shown with hard edges


def figure(body: str, caption: str) -> str:
    """A figure with its caption, which may hold markup."""
    return f"<figure>{body}<figcaption>{caption}</figcaption></figure>"


def missing(what: str, command: str) -> str:
    """What is not there, and the command that provides it."""
    return (
        f'<p class="missing">{what} Run <code>{escape(command)}</code>, then give the file to '
        f"this report with <code>--calibration=CAL.json</code>.</p>"
    )


def select(name: str, label: str, options: Iterable[tuple[str, str]], chosen: str = "") -> str:
    parts = "".join(
        f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>'
        f"{escape(text)}</option>"
        for value, text in options
    )
    return f'<label>{escape(label)}<select name="{name}">{parts}</select></label>'


def picker(
    menus: Sequence[tuple[str, Sequence[str]]], variants: dict[str, str], otherwise: str = ""
) -> str:
    """Figures of which menus choose one. Keys of `variants` are menu values joined by "|"."""
    controls = "".join(
        select(f"choice{i}", label, [(v, v) for v in values])
        for i, (label, values) in enumerate(menus)
    )
    panels = "".join(
        f'<div data-key="{escape(key)}"{" hidden" if i else ""}>{body}</div>'
        for i, (key, body) in enumerate(variants.items())
    )
    last = f'<p class="missing" data-otherwise hidden>{otherwise}</p>' if otherwise else ""
    return f'<div data-picker><div class="controls">{controls}</div>{panels}{last}</div>'


def done(report: dict) -> list[dict]:
    return [cell for cell in report["cells"] if cell["status"] == "done"]


def budgets(report: dict) -> list[float]:
    return sorted({cell["budget"] for cell in report["cells"] if cell["budget"] is not None})


# --- (a) table, (b) fidelity ---


def table(report: dict) -> str:
    heads = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>'
        for name in tables.HEADER[:-1]
    )
    body = "".join(_table_row(row) for row in tables.rows(report))
    meaning = " ".join(f"<b>{k}</b>: {escape(v)}." for k, v in report["definitions"].items())
    return figure(
        f'<div class="scroll" tabindex="0" role="region" aria-label="table of results">'
        f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
        "</div>",
        f"{meaning} Headings sort the table.",
    )


def _table_row(row: dict) -> str:
    """A row of numbers, or what kept it from running across all of them."""
    *texts, note = tables.cells_as_text(row)
    values = [row.get(name) for name in _TABLE_ORDER]
    cells = [
        f'<td data-value="{"" if value is None else escape(str(value))}">{escape(text)}</td>'
        for value, text in zip(values, texts, strict=True)
    ]
    if row["status"] != "done":
        note_cell = f'<td class="note" data-value="" colspan="{len(cells) - 2}">'
        cells[2:] = [f"{note_cell}<span>{escape(note)}</span></td>"]
    return f"<tr>{''.join(cells)}</tr>"


def fidelity(report: dict) -> str:
    if not done(report):
        return '<p class="missing">No policy of this sweep could run.</p>'
    return figure(
        sweep_figures.fidelity(report),
        "Each point is one budget; bytes are those that the compiled program allocates for one "
        "batch. PSNR, SSIM and equal tokens compare freely drawn images with those of the full "
        "cache on the same seeds; KL compares predictions after the same tokens (nats per token). "
        "A click on a name brings its line to the front.",
    )


# --- (c) pictures ---


def viewer(report: dict, samples: dict[str, np.ndarray], count: int) -> tuple[str, dict]:
    """(the section, what its script reads)."""
    full = samples[tables.FULL]
    names = [f"{i + 1}: {name}" for i, name in enumerate(report["sample_names"][:count])]
    rows = [_picture_row(cell, samples, count) for cell in report["cells"]]
    data = {
        "names": report["sample_names"][:count],
        "small": full.shape[2] < SMALL_PICTURE,
        "full": [png.data_uri(image) for image in full[:count]],
        "rows": rows,
    }
    known = [(f"{b}", f"{b:g}") for b in budgets(report)]
    labels = [(label, label) for label in dict.fromkeys(row["label"] for row in rows)]
    controls = (
        select("image", "image", [(str(i), name) for i, name in enumerate(names)])
        + select("budget", "budget", known)
        + select("policy", "policy", [("", "all, side by side"), *labels])
        + '<label class="slider">left of the line: full cache; right of it: the policy'
        '<input type="range" min="0" max="100" step="1" value="50"></label>'
    )
    left_out = len(full) - count
    note = f" {left_out} more samples of the sweep are left out for size." if left_out else ""
    body = figure(
        f'<div class="viewer"><div class="controls">{controls}</div><div class="tiles"></div>'
        '<p class="absent-note"></p></div>'
        '<noscript><p class="missing">Choosing pictures needs the '
        "script of this page.</p></noscript>",
        "The same class and seed under every policy, each over the picture of the full cache. Move "
        "the line with the slider (arrow keys work) or on a picture. Numbers belong to this "
        f"picture.{note}",
    )
    return body, data


def _picture_row(cell: dict, samples: dict[str, np.ndarray], count: int) -> dict:
    budget = None if cell["budget"] is None else f"{cell['budget']}"
    row = {"label": cell["label"], "budget": budget}
    if cell["status"] != "done":
        return row | {"reason": f"{cell['status']}: {cell['reason']}"}
    close = cell["samples_fidelity"]
    numbers = [
        f"{_decibels(close['psnr'][i])}, SSIM {close['ssim'][i]:.3f}, "
        f"KL {float(close['kl'][i]):.3g}"
        for i in range(count)
    ]
    pictures = [png.data_uri(image) for image in samples[cell["samples"]][:count]]
    return row | {"images": pictures, "numbers": numbers}


def _decibels(value) -> str:
    return f"{float(value):.1f} dB" if math.isfinite(float(value)) else "identical"


def script_data(data: dict) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")


# --- (h) bytes over time ---


def live_bytes(report: dict) -> str:
    cells = [cell for cell in done(report) if cell["budget"] is not None]
    if not cells:
        return '<p class="missing">No policy of this sweep could run.</p>'
    variants = {
        f"{cell['label']}|{cell['budget']:g}": sweep_figures.live_bytes(report, cell)
        for cell in cells
    }
    labels = list(dict.fromkeys(cell["label"] for cell in cells))
    shown = [f"{b:g}" for b in sorted({cell["budget"] for cell in cells})]
    body = picker(
        [("policy", labels), ("budget", shown)],
        variants,
        "This policy could not run at this budget: the table says why.",
    )
    return figure(
        body + sweep_figures.TIME_KEY,
        "Bytes of keys and values of one batch right after each layer has stored, from the plan: "
        "live tokens (capacity of all heads), and the blocks that hold them, empty slots included. "
        "The pool is allocated once, at the peak of the blocks; the dashed line is the budget, a "
        "fraction of a full cache of the same number type.",
    )


# --- (d) to (g), (i) calibration ---


def density(found: Calibration | None, geometry: Geometry) -> str:
    if found is None or found.beta is None:
        return missing("There is no attention mass (beta) to show.", CALIBRATE)
    values = measured_figures.attention_density(found.beta, geometry.schedule.tokens)
    layers = {
        str(i): measured_figures.density_lines(values, geometry, i)
        for i in range(geometry.num_layers)
    }
    body = (
        f"<div>{measured_figures.density_map(values, geometry)}</div>"
        f"<div>{picker([('layer', list(layers))], layers)}</div>"
    )
    return figure(
        f'<div class="panels two">{body}</div>',
        "Attention density d<sub>i←j</sub> = T<sub>j</sub> · β[j, i] / T<sub>i</sub> at the last "
        "scale j: the attention that one token of source scale i receives from all T<sub>j</sub> "
        "queries; β[j, i] is the attention mass of scale j on scale i, averaged over queries and "
        "images. The last column is scale j itself, which is never cached. All heads as "
        "rows, heads "
        "of a layer below each other; and the heads of one layer as lines, thick: their "
        "mean. After "
        "AMS-KV, Figure 4 (definition: Section 3 there).",
    )


def discrepancy(found: Calibration | None, geometry: Geometry) -> str:
    if found is None or found.key_discrepancy is None:
        return missing("There are no key discrepancies to show.", CALIBRATE)
    return figure(
        measured_figures.discrepancy(found.key_discrepancy, geometry),
        "Mean over heads, tokens and images of ‖k<sub>i</sub> − resized k<sub>i−1</sub>‖"
        "<sub>2</sub> in units of the keys: how far the keys of a scale are from those "
        "of the scale before, "
        "resized to its map. Layers with large values are the ones AMS-KV gives more room. After "
        "AMS-KV, Figure 6 (Eq. 3 there).",
    )


def patterns(found: Calibration | None, geometry: Geometry) -> str:
    if found is None or found.patterns is None or found.pattern_edges is None:
        return missing("There are no attention maps to show.", CALIBRATE)
    k = found.pattern_scale
    scale = "" if k is None else f" of scale {measured_figures.scale_names(geometry)[k]}"
    return figure(
        measured_figures.patterns(found, geometry),
        f"Attention maps of example heads for one image: queries{scale} down in raster order, "
        "tokens across from the first scale to the current one; dashed lines part the "
        "scales. Colour: "
        "attention per token relative to the largest of the map, square-root scale. After HeatKV, "
        "Figure 3.",
    )


def pruning(found: Calibration | None, geometry: Geometry, shares: Sequence[float]) -> str:
    if found is None or (found.orders is None and found.beta is None):
        return missing("There are neither removal orders nor attention mass (beta).", CALIBRATE)
    variants = {
        f"{policy}|{budget:g}": body
        for (policy, budget), body in measured_figures.pruning_variants(
            shares, geometry, found
        ).items()
    }
    menus = [
        ("policy", ["binary_heatkv", "heatkv"]),
        ("budget", [f"{budget:g}" for budget in shares]),
    ]
    return figure(
        picker(menus, variants),
        "Each square is an attention head. binary_heatkv: the first scale that sees only the sink "
        "scales of a head. heatkv: per source scale, the first scale that no longer sees it; early "
        "removals included. Counted in tokens at the full budget: with accounting=bytes the "
        "planner takes a little off for block rounding. After HeatKV, Figure 4 "
        "(Algorithm 1 there); scales "
        "are named by their token maps.",
    )


def dispersion(found: Calibration | None, geometry: Geometry) -> str:
    if found is None or found.rank_dispersion is None:
        return missing(
            "There are no repeated calibrations.",
            CALIBRATE.replace(" --save", " --stability=10 --save"),
        )
    return figure(
        measured_figures.dispersion(np.asarray(found.rank_dispersion), geometry),
        "Standard deviation of a head's rank in the removal order of a source scale over repeated "
        "calibrations with different seeds, averaged over heads. After HeatKV, Figure 6.",
    )
