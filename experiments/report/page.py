"""What the template of the report page shows. The template engine escapes every text. Only the
charting library, which is code, goes in unescaped."""

import base64
import functools
import io
import math
import pathlib
import re
from collections.abc import Iterator

import jinja2
import markupsafe
import numpy as np
import vl_convert
from PIL import Image

from experiments.report import calibration_charts, charts
from experiments.sweep import tables
from varjax import sequence
from varjax.cache.allocation import Geometry
from varjax.calibration.data import Calibration
from varjax.engine.memory import show_bytes

USUAL_BUDGETS = [0.1, 0.25, 0.5]
SMALL_PICTURE = 160  # pixels: smaller ones are shown with hard edges


def build(
    report: dict,
    samples: dict[str, np.ndarray],
    geometry: Geometry,
    calibration: Calibration | None,
    count: int,
) -> str:
    """Return the page as HTML. count: how many of the sweep's samples are shown."""
    full, rows = samples[tables.FULL], tables.rows(report)
    columns = tables.shown(rows)
    budgets = sorted({cell["budget"] for cell in report["cells"]} - {None}) or USUAL_BUDGETS
    return template(
        "page.html"
    ).render(
        title=f"KV-cache policies on {report['settings']['model']}",
        report=report,
        facts=facts(report, calibration),
        header=tables.header(columns)[:-1],
        rows=[(row["status"], tables.cells_as_text(row, columns)) for row in rows],
        differences=tables.differences_as_text(report),
        intervals=any(key.endswith("_low") for row in rows for key in row),
        budgets=[f"{share:g}" for share in budgets],
        fidelity=charts.fidelity(rows[1:]),  # without the full cache
        judged=[metric.name for metric in columns if metric.is_judged],
        legend_names=charts.labels(rows[1:]),
        names=report["sample_names"][:count],
        full=[data_uri(image) for image in full[:count]],
        tiles=[tile for cell in report["cells"] for tile in _tiles(cell, samples, count)],
        small=full.shape[2] < SMALL_PICTURE,
        left_out=len(full) - count,
        live=charts.live_bytes(report),
        measured=calibration_charts.draw(calibration, geometry, budgets),
    )


def template(name: str) -> jinja2.Template:
    """Return a template of this folder: values are escaped, and a missing one is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.globals["library"] = _library()
    return environment.get_template(name)


@functools.cache
def _library() -> markupsafe.Markup:
    """Return the code of Vega, Vega-Lite and vega-embed, without anything that could end its script
    element."""
    code = vl_convert.javascript_bundle()
    return markupsafe.Markup(re.sub(r"<(?=/script|!--)", r"\\x3c", code, flags=re.IGNORECASE))


def data_uri(pixels: np.ndarray) -> str:
    """Return a data URI with the pixels, uint8 [H, W, 3], as a lossless WebP file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "webp", lossless=True)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _tiles(cell: dict, samples: dict[str, np.ndarray], count: int) -> Iterator[dict]:
    """Yield a cell's picture and numbers for each sample, or once the reason why it did not run."""
    shared = {"policy": cell["label"]}
    if cell["budget"] is not None:
        shared["budget"] = f"{cell['budget']:g}"
    if cell["status"] != "done":
        yield shared | {"reason": f"{cell['status']}: {cell['reason']}"}
        return
    close = {name: [*map(float, v)] for name, v in cell["samples_fidelity"].items()}
    for i, image in enumerate(samples[cell["samples"]][:count]):
        psnr = "identical" if close["psnr"][i] == math.inf else f"{close['psnr'][i]:.1f} dB"
        numbers = f"{psnr}, SSIM {close['ssim'][i]:.3f}, KL {close['kl'][i]:.3g}"
        numbers += f", LPIPS {close['lpips'][i]:.3f}" if "lpips" in close else ""
        if not close.get("class_agreement", [1.0] * count)[i]:
            numbers += ", taken for another class"
        yield shared | {"image": i, "picture": data_uri(image), "numbers": numbers}


def facts(report: dict, calibration: Calibration | None) -> dict[str, str]:
    """Return what was run, on which model, device and settings."""
    s, g, versions = report["settings"], report["geometry"], report["versions"]
    group, used = g.get("queries_per_head", 1), s["calibration"]
    measured = f"none here; the sweep used {used[:16]}" if used else "none"
    if calibration is not None:
        images = f"{calibration.num_samples} images, " if calibration.num_samples else ""
        own = "as in the sweep" if calibration.digest == used else "not the one of the sweep"
        measured = f"{images}SHA-256 {(calibration.digest or 'unknown')[:16]} ({own})"
    return {
        "images": f"{len(s['labels'])}, seed {s['seed']}, batches of {s['batch_size']}",
        "model": f"{g['num_layers']} layers, {g['num_heads']} heads of {g['head_dim']}, "
        + (f"each of {group} query heads, " if group > 1 else "")
        + sequence.parse(g["schedule"]).outline(),
        "full cache": f"{show_bytes(report['reference']['kv']['dense_bytes'])} for a batch",
        "sampling": ", ".join(f"{key} {value}" for key, value in s["sampling"].items()),
        "computed on": f"{report['device']}, {s['dtype']}, cache in {s['kv_dtype']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "calibration": measured,
    }
