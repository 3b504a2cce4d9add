"""One page with the results of a sweep and the figures of the papers, drawn from your own model.

    python -m experiments.sweep --policies=all --budgets=0.1,0.25 --out=SWEEP
    python -m experiments.report --sweep=SWEEP --out=report.html
    python -m experiments.report --sweep=SWEEP --calibration=CAL.json --out=report.html
    python -m experiments.report --leaderboard='results/*' --out=leaderboard.html
    python -m experiments.report --sweep=SWEEP --metrics=psnr,kl --out=table.tex
    python -m experiments.report --sweep=SWEEP --metrics=kl --out=figure.pdf
    python -m experiments.report --sweep=SWEEP --out=per_image.csv

The page is a single file that needs no network: the table, fidelity against bytes, pictures beside
the full cache's, bytes in use over time; and, from a calibration, attention density (AMS-KV, Figure
4), key discrepancy (AMS-KV, Figure 6), the pruning schedule (HeatKV, Figure 4) and the stability of
the ranking (HeatKV, Figure 6). What is missing says which command provides it.

For a paper: a table (.tex with booktabs, .md), a figure of one metric against bytes, 3.25 inches
wide with letters of 8 points (.pdf, .svg), and the numbers of every single image (.csv).
"""

import pathlib
import sys

from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from experiments.output import FileFlags
from experiments.report import paper
from experiments.sweep import tables
from varjax.calibration.files import load as load_calibration
from varjax.core.errors import UserError
from varjax.generation.memory import show_bytes
from varjax.storage.atomic import new_file
from varjax.storage.values import require

PAGES = (".html", ".htm")
PICTURE_LIMIT = 16 * 2**20  # pixels of all pictures together, without --images

FLAGS = CommandFlags(
    "python -m experiments.sweep --policies=headkv,streaming --num_images=4 --out=SWEEP\n"
    "--sweep=SWEEP --out=report.html",
    "sweep leaderboard out",
)
SWEEP = FLAGS.string("sweep", None, "Folder that `python -m experiments.sweep` has written.")
CALIBRATION = FLAGS.string(
    "calibration", None, "Calibration file to show; default: the copy in the sweep's folder."
)
IMAGES = FLAGS.integer(
    "images",
    None,
    "So many of the sweep's sample images are shown; default: all, or fewer if they are large.",
    lower_bound=1,
)
METRICS = FLAGS.list("metrics", None, "Metrics of a table, figure or CSV; a figure has one.")
COLUMNS = FLAGS.list(
    "columns", "policy,budget,allocated", "A table's further columns; also planned, seconds."
)
OUT = FileFlags(FLAGS, "out", "The file to write; its suffix says what.", default="report.html")
LEADERBOARD = FLAGS.list(
    "leaderboard",
    None,
    "Folders of sweeps, or patterns such as 'results/*', of any models and machines: one page that "
    "compares them, in place of --sweep.",
)
TABLES, FIGURES, NUMBERS = (".tex", ".md"), (".pdf", ".svg"), (".csv",)
FOR_PAPERS = (*TABLES, *FIGURES, *NUMBERS)
# the kinds of files that a flag is of
OF = ((CALIBRATION, PAGES), (IMAGES, PAGES), (METRICS, FOR_PAPERS), (COLUMNS, TABLES))


def check() -> pathlib.Path:
    """Return the file to write; `UserError` unless all flags are of such a file."""
    if bool(SWEEP.value) == bool(LEADERBOARD.value):
        raise UserError("give either --sweep=FOLDER or --leaderboard=FOLDER,FOLDER")
    target = OUT.check()
    kind, kinds = target.suffix.lower(), PAGES if LEADERBOARD.value else (*PAGES, *FOR_PAPERS)
    if kind not in kinds:
        raise UserError(f"--out={target}: choose a name that ends in {', '.join(kinds)}")
    for holder, kinds in OF:
        if holder.present and (LEADERBOARD.value or kind not in kinds):
            raise UserError(f"--{holder.name} is for {', '.join(kinds)} of a --sweep: leave it out")
    if kind in FIGURES and len(METRICS.value or ()) > 1:
        raise UserError("a figure shows one metric: write a file for each of --metrics")
    return target


def page_text() -> str:
    """Return the page of --sweep or --leaderboard."""
    for package in ("altair", "jinja2", "jsonschema", "vl_convert", "PIL.Image"):
        require(package, extra="eval", purpose="the report page")
    from experiments.report import page, sweep_files  # which import them

    if LEADERBOARD.value:
        return page.build_leaderboard(LEADERBOARD.value)
    folder = pathlib.Path(SWEEP.value)
    report, samples, geometry = sweep_files.read_sweep(folder)
    copy = folder / tables.CALIBRATION_COPY
    path = CALIBRATION.value or (copy if copy.is_file() else None)
    calibration = load_calibration(path, geometry) if path else None
    print(f"drawing {len(report['cells'])} cells", file=sys.stderr, flush=True)
    full = samples[tables.FULL]
    sets = sum(array.ndim == full.ndim for array in samples.values())  # without what heads kept
    pixels = sets * full.shape[1] * full.shape[2]
    count = IMAGES.value or max(1, PICTURE_LIMIT // pixels)
    return page.build(report, samples, geometry, calibration, min(count, len(full)))


def for_paper(kind: str) -> str | bytes:
    """Return the content of a file for a paper. kind: its suffix."""
    for package in ("jsonschema", *(("altair", "vl_convert") if kind in FIGURES else ())):
        require(package, extra="eval", purpose=f"{kind} files of a report")
    from experiments.report import sweep_files  # which imports it

    report, _, _ = sweep_files.read_sweep(folder := pathlib.Path(SWEEP.value))
    for cell in (cell for cell in report["cells"] if cell["status"] != "done"):
        at = "" if cell["budget"] is None else f" at {cell['budget']:g}"
        print(f"left out: {cell['label']}{at}: {cell['reason']}", file=sys.stderr)
    metrics = paper.chosen(report, METRICS.value)
    if kind in FIGURES:
        return paper.figure(report, metrics[0], kind)
    if kind in NUMBERS:
        return paper.per_image(report, folder, metrics)
    write = paper.latex if kind == ".tex" else paper.markdown
    return write(report, COLUMNS.value, metrics)


def main(argv: list[str]) -> None:
    target = check()
    kind = target.suffix.lower()
    made = page_text() if kind in PAGES else for_paper(kind)
    # folders may have any names
    data = made if isinstance(made, bytes) else made.encode("utf-8", "backslashreplace")
    with new_file(target) as file:
        file.write(data)
    print(f"written to {target} ({show_bytes(len(data))})")


if __name__ == "__main__":
    command_line.run(main)
