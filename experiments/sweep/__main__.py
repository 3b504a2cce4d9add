"""Compare KV-cache policies at several budgets with the full cache, in one table.

    python -m experiments.sweep --policies=all --budgets=0.04,0.1,0.2,0.5 --out=DIR
    python -m experiments.sweep --policies=headkv,streaming:sinks=3,streaming:sinks=1 \\
        --budgets=0.1,0.25 --num_images=16 --out=DIR
    python -m experiments.sweep --checkpoint=DIR --policies=all --calibration=CAL.json --out=DIR
    python -m experiments.sweep --checkpoint=DIR --prompts=FILE.txt --size=0.25M --out=DIR
    python -m experiments.sweep --checkpoint=DIR --lpips=DIR --out=DIR

Every row is a policy, with arguments after a colon, joined by +, if it is to differ from its
defaults: `streaming:sinks=3+block_size=8`. `all` stands for every policy with its defaults (but
not `table`, which needs a file) and may be joined by others: `all,streaming:sinks=1`. What `all`
cannot run becomes a row that says why; so does a budget at which a named policy cannot run, as
long as it can at another.

Measured against the full cache on the same seeds: PSNR, SSIM and equal tokens of images drawn
freely, the KL divergence of the logits (nats per token) with the full cache's tokens forced, bytes
of the cache, seconds per image; with --lpips LPIPS; of the demo, and of models that have a
classifier (docs/howto/evaluate.md), class agreement and the distance of its features. Means come
with 95 % intervals, and with the difference to the best policy of the same budget, image by image.

Writes sweep.md, sweep.csv, sweep.json, fidelity.png, what `experiments.report` shows besides
(samples.npz, images; calibration.json, a copy of the calibration if one was used) into --out
(default: a new folder under results/). Finished cells of an interrupted sweep are kept: start it
again with the same settings; policies and budgets may change.
"""

import pathlib
import sys

from experiments import judges
from experiments.flags.condition import ConditionFlags
from experiments.flags.model import ModelFlags
from experiments.flags.policy import calibration_flag, policy_module_flag
from experiments.flags.program import ProgramFlags
from experiments.flags.sampling import SamplingFlags
from experiments.output import FolderFlags
from experiments.sweep import plan, tables
from experiments.sweep.cells import Runner
from experiments.sweep.plan import Cell, Sweep
from varjax import api, metrics
from varjax.calibration import files as calibration_lib
from varjax.calibration.data import Calibration
from varjax.cli import command_line
from varjax.cli.flags import CommandFlags
from varjax.errors import UserError, require
from varjax.model import Model
from varjax.policies import HeatKV
from varjax.sampling import Sampling
from varjax.storage.atomic import new_folder

FLAGS = CommandFlags(
    "--policies=headkv,streaming --budgets=0.1,0.25 --num_images=4",
    "policies budgets checkpoint labels prompts num_images out",
)
POLICIES = FLAGS.string(
    "policies",
    "all",
    "All of them, or names separated by commas: headkv,streaming:sinks=3+block_size=8.",
)
BUDGETS = FLAGS.string("budgets", "0.1,0.25,0.5", "Fractions of the full cache's bytes.")
KV_BYTES = FLAGS.string(
    "kv_bytes", None, "Budgets as bytes of a batch's cache, 1GiB,2GiB, in place of --budgets."
)
MODEL = ModelFlags(FLAGS, published="A model of --model_module, or a published name")
CALIBRATION = calibration_flag(FLAGS)
policy_module_flag(FLAGS)
CONDITION = ConditionFlags(FLAGS)
FLAGS.first(
    "metric_module",
    "Python file, or import name, that registers metrics of your own.",
    metrics.load_module,
)
SAMPLES = FLAGS.integer(
    "samples", 8, "So many of the first images are kept for the report.", lower_bound=1
)
FLAGS.heading("What is compared and kept")
LPIPS = FLAGS.string("lpips", None, judges.LPIPS_HELP)
SAMPLING = SamplingFlags(FLAGS)
PROGRAM = ProgramFlags(FLAGS)
FLAGS.compilation_cache()
FLAGS.heading("Output")
OUT = FolderFlags(FLAGS)


def resolve() -> Sweep:
    """Check every flag and plan every cell. Compile, allocate and write nothing."""
    entries = plan.parse_entries(POLICIES.value)
    budgets = plan.parse_budgets(BUDGETS.value)
    if KV_BYTES.value and BUDGETS.present:
        raise UserError("--budgets and --kv_bytes exclude each other: give one of them")
    model = MODEL.resolve()
    require("dm_pix", extra="eval", purpose="PSNR and SSIM")
    model, condition = MODEL.fitted(model, CONDITION.resolve(model))
    model, sampling = PROGRAM.stored(model), SAMPLING.sampling(model)
    geometry = model.geometry_for(sampling)
    path, calibration = _calibration(model, sampling)
    full, program = api.plan(geometry), PROGRAM.resolve(model)
    batch_size = PROGRAM.batch_size(program, model, full, condition)
    if KV_BYTES.value:
        budgets = plan.budgets_of_bytes(
            KV_BYTES.value, full.dense_bytes(batch_size, program.kv_dtype)
        )
    cells = plan.plan_cells(entries, budgets, geometry, calibration, len(condition))
    used = any(cell.plan.policy.uses_calibration for cell in cells if cell.plan)
    if CALIBRATION.value and not used:
        raise UserError("none of the policies uses a calibration: leave out --calibration")
    return Sweep(
        model=model,
        condition=condition,
        sampling=sampling,
        seed=SAMPLING.seed,
        batch_size=batch_size,
        program=program,
        cells=cells,
        full=Cell("full", "full", full.budget, full),
        samples=min(SAMPLES.value, len(condition)),
        calibration=path if used else None,
        calibration_digest=calibration.digest if used else None,
        judges=judges.of_model(model, LPIPS, batch_size),
    )


def _calibration(
    model: Model, sampling: Sampling
) -> tuple[pathlib.Path | None, Calibration | None]:
    """Return (path, content) of the file that is given, else of the checkpoint's, if it has one."""
    path = CALIBRATION.value or calibration_lib.beside(model.directory)
    if not path:
        return None, None
    try:  # one file serves all policies; HeatKV stands for any policy that uses a calibration
        found = calibration_lib.find(HeatKV(), model, path, sampling.guidance)
    except UserError as error:
        if CALIBRATION.value:
            raise
        print(f"calibration {path} is not used: {error}", file=sys.stderr)
        return None, None
    return pathlib.Path(path), found


def main(argv: list[str]) -> None:
    sweep = resolve()
    print(plan.show_sizes(sweep), file=sys.stderr, flush=True)
    calibration = sweep.calibration and sweep.calibration.read_bytes()  # before it may change
    store = OUT.open(f"{sweep.model.name}-sweep", sweep.describe())
    sweep = sweep.encoded()
    runner = Runner(sweep, store)
    with store.working():
        runner.run()
        results = runner.all_results()
        report = tables.content(sweep, results)
        with new_folder(store.out, replaces=store.replaces) as out:
            images = tables.samples(sweep, results)
            missing = tables.write(out, report, images, calibration)
        store.close()
    if missing:
        print(f"fidelity.png is not written: {missing}", file=sys.stderr)
    print(tables.markdown_rows(report))
    print(f"written to {store.out}", file=sys.stderr)


if __name__ == "__main__":
    command_line.run(main)
