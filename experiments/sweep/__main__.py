"""Compare KV-cache policies at several budgets with the full cache, in one table.

    python -m experiments.sweep --policies=all --budgets=0.04,0.1,0.2,0.5 --out=DIR
    python -m experiments.sweep --policies=headkv,streaming:sinks=3,streaming:sinks=1 \\
        --budgets=0.1,0.25 --num_images=16 --out=DIR
    python -m experiments.sweep --checkpoint=DIR --policies=all --calibration=CAL.json --out=DIR
    python -m experiments.sweep --checkpoint=DIR --prompts=FILE.txt --size=0.25M --out=DIR
    python -m experiments.sweep --checkpoint=DIR --lpips=DIR --out=DIR

Every row is a policy, with arguments after a colon, joined by +, if it is to differ from its
defaults: `streaming:sinks=3+block_size=8`. Several values make a grid, six rows of
`headkv:window=2|4|8:sinks=0|2`; arguments.png then plots what is measured over each argument.
`all` stands for every policy with its defaults but `table`, and may be joined by others:
`all,streaming:sinks=1`. What cannot run becomes a row that says why.

Measured against the full cache on the same seeds: PSNR, SSIM and equal tokens of images drawn
freely, the KL divergence of the logits (nats per token) with the full cache's tokens forced, bytes
of the cache, seconds per image; with --lpips LPIPS; of models with a classifier
(docs/howto/evaluate.md) class agreement and the distance of its features. Means come with 95 %
intervals, and with the difference to the best policy of the same budget, image by image.

Writes sweep.md, sweep.csv, sweep.json, fidelity.png and what `experiments.report` shows besides
into --out (default: a new folder under results/). Finished cells of an interrupted sweep are kept:
start it again with the same settings; policies and budgets may change. SIGTERM ends it after the
batch that is drawn, with status 0. With --shard=I/N it runs part I of N of the cells;
experiments.merge joins them. With --distributed all processes draw each batch.
"""

import functools
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from experiments import batch_files, judges, parts, processes
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags, about
from experiments.flags.condition import ConditionFlags
from experiments.flags.distributed import DistributedFlag
from experiments.flags.model import ModelFlags
from experiments.flags.policy import calibration_flag, learned_flag, plugin_flag
from experiments.flags.program import ProgramFlags
from experiments.flags.sampling import SamplingFlags
from experiments.generation import environment
from experiments.output import BatchStore, FolderFlags, say
from experiments.parts import PartStore, ShardFlag
from experiments.sweep import plan, tables
from experiments.sweep.cells import CellRunner
from experiments.sweep.plan import Cell, Sweep
from varjax.calibration import files as calibration_lib
from varjax.calibration.data import Calibration
from varjax.calibration.files import BESIDE_CHECKPOINT as MEASURED
from varjax.core.errors import UserError
from varjax.generation import api, hosts
from varjax.models.model import Model
from varjax.storage import ordinary
from varjax.storage.values import require

FLAGS = CommandFlags(
    "--policies=headkv,streaming --budgets=0.1,0.25 --num_images=4",
    "policies budgets checkpoint labels prompts num_images out",
    compiles=True,
)
POLICIES = FLAGS.string(
    "policies",
    "all",
    "All of them, or names separated by commas: headkv:window=2|4|8,streaming:sinks=3+block_size=8 "
    "(each of several values).",
)
YES = FLAGS.boolean("yes", False, f"Run more than {plan.MANY} cells.")
BUDGETS = FLAGS.string("budgets", "0.1,0.25,0.5", "Fractions of the full cache's bytes.")
KV_BYTES = FLAGS.string(
    "kv_bytes", None, "Budgets as bytes of a batch's cache, 1GiB,2GiB, in place of --budgets."
)
MODEL = ModelFlags(FLAGS, published="A model of --plugin, or a published name")
CALIBRATION, LEARNED = calibration_flag(FLAGS), learned_flag(FLAGS)
plugin_flag(FLAGS)
CONDITION = ConditionFlags(FLAGS)
SAMPLES = FLAGS.integer(
    "samples", 8, "So many of the first images are kept for the report.", lower_bound=1
)
SAVE_KEPT = FLAGS.boolean(
    "save_kept", False, "The report also shows what every head kept of each policy's first image."
)
FLAGS.heading("What is compared and kept")
LPIPS = FLAGS.string("lpips", None, judges.LPIPS_HELP)
SAMPLING = SamplingFlags(FLAGS)
PROGRAM = ProgramFlags(FLAGS)
FLAGS.heading("Output")
DISTRIBUTED = DistributedFlag(FLAGS)
SHARD = ShardFlag(FLAGS, "cells")
OUT = FolderFlags(FLAGS)


def resolve() -> Sweep:
    """Check every flag and plan every cell. Compile, allocate and write nothing."""
    budgets = plan.parse_budgets(BUDGETS.value)
    count = KV_BYTES.value.count(",") + 1 if KV_BYTES.value else len(budgets)
    entries = plan.parse_entries(POLICIES.value, count, YES.value)
    if KV_BYTES.value and BUDGETS.present:
        raise UserError("--budgets and --kv_bytes exclude each other: give one of them")
    model = MODEL.resolve()
    require("dm_pix", extra="eval", purpose="PSNR and SSIM")
    model, condition = MODEL.fitted(model, CONDITION.resolve(model))
    model, sampling = PROGRAM.stored(model), SAMPLING.sampling(model)
    geometry = model.geometry_for(sampling)
    files = calibrations(model, sampling.guidance)
    calibration = functools.reduce(calibration_lib.joined, [c for _, c in files.values()], None)
    full, program = api.plan(geometry), PROGRAM.resolve(model)
    batch_size = PROGRAM.batch_size(program, model, full, condition)
    if KV_BYTES.value:
        dense = full.dense_bytes(batch_size, program.kv_dtype)
        budgets = plan.budgets_of_bytes(KV_BYTES.value, dense)
    cells = plan.plan_cells(entries, budgets, geometry, calibration, len(condition))
    used = {n for c in cells if c.calibrated for n in c.plan.policy.calibration_files} & {*files}
    named = {path: name for name, (path, _) in files.items()}
    for holder in (CALIBRATION, LEARNED):
        if holder.value and named.get(holder.value) not in used:
            what = "a calibration" if holder is CALIBRATION else "learned tables"
            raise UserError(f"none of the policies uses {what}: leave out --{holder.name}")
    digests = [files[name][1].digest for name in calibration_lib.BESIDE if name in used]
    return Sweep(
        model=model,
        condition=condition,
        sampling=sampling,
        seed=SAMPLING.seed(),
        batch_size=batch_size,
        program=program,
        cells=cells,
        full=Cell("full", "full", full.budget, full),
        samples=min(SAMPLES.value, len(condition)),
        save_kept=_save_kept(cells, program.mesh.num_devices),
        calibration=pathlib.Path(files[MEASURED][0]) if MEASURED in used else None,
        calibration_digest="+".join(digests) or None,
        judges=judges.of_model(model, LPIPS, batch_size),
    )


def _save_kept(cells: Sequence[Cell], devices: int) -> bool:
    """Return --save_kept; `UserError` where it cannot be done."""
    deciding = [c.label for c in cells if c.plan and not c.plan.static_content]
    if SAVE_KEPT.value and devices > 1 and deciding:
        with about(SAVE_KEPT):
            words = f"several devices do not tell what {deciding[0]} decided"
            raise UserError(f"{words}: leave it out, or --distributed")
    return SAVE_KEPT.value


def calibrations(
    model: Model, guidance: float | str
) -> dict[str, tuple[str | pathlib.Path, Calibration]]:
    """Return {name that a file has beside a checkpoint: (the file, its content)}: --calibration and
    --learned, else those of the checkpoint that fit the model."""
    found: dict[str, tuple[str | pathlib.Path, Calibration]] = {}
    for path in filter(None, (CALIBRATION.value, LEARNED.value)):
        one = calibration_lib.checked(path, model, guidance)
        for name in calibration_lib.parts(one) & {*found}:
            raise UserError(f"--calibration and --learned both hold what {name} does: give one")
        found |= dict.fromkeys(calibration_lib.parts(one), (path, one))
    for name in (name for name in calibration_lib.BESIDE if name not in found):
        if path := calibration_lib.beside(model.directory, name):
            try:
                found[name] = path, calibration_lib.checked(path, model, guidance)
            except UserError as error:
                print(f"calibration {path} is not used: {error}", file=sys.stderr)
    return found


def main(argv: list[str]) -> None:
    sweep = DISTRIBUTED.resolve(resolve)
    say(plan.show_sizes(sweep))
    calibration = sweep.calibration and ordinary.read_file(
        sweep.calibration, calibration_lib.LARGEST_FILE
    )  # before it may change
    store = SHARD.open(OUT, f"{sweep.model.name}-sweep", sweep.describe())
    (make_part if SHARD.shard else make)(sweep, store, calibration)


def make(sweep: Sweep, store: BatchStore, calibration: bytes | None) -> None:
    """Run all cells, alone or with other processes, and write the results."""
    with processes.together():
        sweep = sweep.encoded()
    with store.working():
        with processes.Stop() as stop:
            CellRunner(sweep, store, stop=stop).run()
        with processes.together():
            if hosts.is_first():
                results = CellRunner(sweep, store).all_results()
                made = tables.frame(sweep), results, calibration
                report = tables.write_tables(store.out, store.replaces, *made)
                store.close()
                print(tables.markdown_rows(report))
                print(f"written to {store.out}", file=sys.stderr)


def make_part(sweep: Sweep, store: PartStore, calibration: bytes | None) -> None:
    """Run the cells of one part, and keep them for `experiments.merge`. Every part runs the full
    cache, which its cells are compared with."""
    runner = CellRunner(sweep, store, store.shard)
    said = f"{store.shard}: {len(runner.cells)} cells"
    every = (sweep.full, *runner.cells)
    if parts.is_written(store) and all(runner.results(cell) is not None for cell in every):
        print(f"{said} are there already, in {store.work.path}")
        return
    runner.sweep = sweep.encoded()
    with store.working():
        with processes.Stop() as runner.stop:
            runner.run()
        keys = list(runner.all_results())
        part = {"command": "sweep", "environment": environment(), "keys": keys}
        held = {} if calibration is None else {"calibration": np.frombuffer(calibration, np.uint8)}
        told = {**part, "frame": tables.frame(sweep)}
        batch_files.write_batch(store.work.path / batch_files.PART, store.work.digest, held, told)
    print(f"{said} are in {store.work.path}; experiments.merge {store.out} joins all parts")


if __name__ == "__main__":
    command_line.run(main)
