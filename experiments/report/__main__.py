"""One page with the results of a sweep and the figures of the papers, drawn from your own model.

    python -m experiments.sweep --policies=all --budgets=0.1,0.25 --out=SWEEP
    python -m experiments.report --sweep=SWEEP --out=report.html
    python -m experiments.report --sweep=SWEEP --calibration=CAL.json --out=report.html
    python -m experiments.report --leaderboard='results/*' --out=leaderboard.html

The page is a single file that needs no network: the table, fidelity against bytes, pictures of all
policies with a slider that wipes between each and the full cache, bytes in use at every layer of
every scale; and, from a calibration, attention density (AMS-KV, Figure 4), key discrepancy (AMS-KV,
Figure 6), the pruning schedule (HeatKV, Figure 4) and the stability of the ranking (HeatKV, Figure
6). What is missing says which command provides it.
"""

import pathlib
import sys

from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from experiments.output import FileFlags
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
OUT = FileFlags(FLAGS, "out", "The file to write.", default="report.html")
LEADERBOARD = FLAGS.list(
    "leaderboard",
    None,
    "Folders of sweeps, or patterns such as 'results/*', of any models and machines: one page that "
    "compares them, in place of --sweep.",
)


def main(argv: list[str]) -> None:
    if bool(SWEEP.value) == bool(LEADERBOARD.value):
        raise UserError("give either --sweep=FOLDER or --leaderboard=FOLDER,FOLDER")
    target = OUT.check()
    if target.suffix.lower() not in PAGES:
        raise UserError(f"--out={target}: the page is HTML, call it {target.stem}.html")
    if LEADERBOARD.value:
        for holder in (CALIBRATION, IMAGES):
            if holder.present:
                raise UserError(f"--{holder.name} belongs to --sweep: leave it out")
    for package in ("altair", "jinja2", "jsonschema", "vl_convert", "PIL.Image"):
        require(package, extra="eval", purpose="the report page")
    from experiments.report import page, sweep_files  # which import them

    if LEADERBOARD.value:
        text = page.build_leaderboard(LEADERBOARD.value)
    else:
        folder = pathlib.Path(SWEEP.value)
        report, samples, geometry = sweep_files.read_sweep(folder)
        copy = folder / tables.CALIBRATION_COPY
        path = CALIBRATION.value or (copy if copy.is_file() else None)
        calibration = load_calibration(path, geometry) if path else None
        print(f"drawing {len(report['cells'])} cells", file=sys.stderr, flush=True)
        full = samples[tables.FULL]
        pixels = len(samples) * full.shape[1] * full.shape[2]
        count = IMAGES.value or max(1, PICTURE_LIMIT // pixels)
        text = page.build(report, samples, geometry, calibration, min(count, len(full)))
    data = text.encode("utf-8", "backslashreplace")  # folders may have any names
    with new_file(target) as file:
        file.write(data)
    print(f"written to {target} ({show_bytes(len(data))})")


if __name__ == "__main__":
    command_line.run(main)
