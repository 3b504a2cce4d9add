"""The whole page: head, sections in order, script."""

from html import escape

import numpy as np

from experiments.report import assets, sections
from varjax.cache.geometry import Geometry
from varjax.calibration import Calibration
from varjax.engine.memory import show_bytes

USUAL_BUDGETS = (0.1, 0.25, 0.5)
TITLES = {
    "table": "Results",
    "fidelity": "Fidelity against bytes",
    "pictures": "Pictures",
    "bytes": "Bytes over time",
    "density": "Attention density",
    "discrepancy": "Key discrepancy",
    "patterns": "Head patterns",
    "pruning": "Pruning schedule",
    "stability": "Stability of the order",
}
LEADS = {
    "table": "Every policy and budget of the sweep. Empty: not run, or the reference itself.",
    "fidelity": "What each policy makes of the bytes it is given.",
    "pictures": "What the numbers look like.",
    "bytes": "Whether the cache stays within its budget at every layer of every scale.",
    "density": "Which scales the last scale looks at, head by head.",
    "discrepancy": "Where the keys change most from scale to scale.",
    "patterns": "What single heads look at.",
    "pruning": "When HeatKV takes which head's scales away.",
    "stability": "How much the ranking of heads depends on the images it was measured on.",
}


def build(
    report: dict,
    samples: dict[str, np.ndarray],
    geometry: Geometry,
    calibration: Calibration | None,
    count: int,
) -> str:
    """The page as HTML. `count`: so many of the sweep's samples are shown."""
    pictures, data = sections.viewer(report, samples, count)
    shares = sections.budgets(report) or list(USUAL_BUDGETS)
    bodies = {
        "table": sections.table(report),
        "fidelity": sections.fidelity(report),
        "pictures": pictures,
        "bytes": sections.live_bytes(report),
        "density": sections.density(calibration, geometry),
        "discrepancy": sections.discrepancy(calibration, geometry),
        "patterns": sections.patterns(calibration, geometry),
        "pruning": sections.pruning(calibration, geometry, shares),
        "stability": sections.dispersion(calibration, geometry),
    }
    main = "\n".join(
        f'<section id="{name}"><h2>{TITLES[name]}</h2><p>{LEADS[name]}</p>{body}</section>'
        for name, body in bodies.items()
    )
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in TITLES.items())
    model = escape(report["settings"]["model"])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>KV-cache policies on {model}</title>
<link rel="icon" href="data:,">
<style>{assets.CSS}</style>
</head>
<body>
<header>
<h1>KV-cache policies on {model}</h1>
{facts(report, calibration)}
<nav aria-label="sections"><ol>{links}</ol></nav>
</header>
<main>
{main}
</main>
<script type="application/json" id="picture-data">{sections.script_data(data)}</script>
<script>{assets.SCRIPT}</script>
</body>
</html>
"""


def facts(report: dict, calibration: Calibration | None) -> str:
    """What was run, and with what."""
    s, g, versions = report["settings"], report["geometry"], report["versions"]
    dense = report["reference"]["kv"]["dense_bytes"]
    sampling = ", ".join(f"{key} {value}" for key, value in s["sampling"].items())
    rows = {
        "images": f"{len(s['labels'])}, seed {s['seed']}, batches of {s['batch_size']}",
        "model": f"{g['num_layers']} layers, {g['num_heads']} heads of {g['head_dim']}, "
        f"token maps {g['schedule'].replace(';', ' ')}",
        "full cache": f"{show_bytes(dense)} for a batch",
        "sampling": sampling,
        "computed on": f"{report['device']}, {s['dtype']}, cache in {s['kv_dtype']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "calibration": _describe(calibration, s["calibration"]),
    }
    parts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items())
    return f'<dl class="facts">{parts}</dl>'


def _describe(calibration: Calibration | None, used: str | None) -> str:
    """The file shown here, and whether the policies of the sweep ran with it."""
    if calibration is None:
        return f"none here; the sweep used {used[:16]}" if used else "none"
    images = f"{calibration.num_samples} images, " if calibration.num_samples else ""
    own = "as in the sweep" if calibration.digest == used else "not the one of the sweep"
    return f"{images}SHA-256 {(calibration.digest or 'unknown')[:16]} ({own})"
