"""Generate images with a KV-cache policy and report what the cache cost.

    python -m experiments.run --policy=headkv --budget=0.25 --labels=3,7,7 --out=DIR
    python -m experiments.run --policy=streaming --budget=0.1 --compare
    python -m experiments.run --model=infinity-8b --policy=headkv --batch_size=8 --dry_run
    python -m experiments.run --checkpoint=DIR --prompts=FILE.txt --aspect=1.5 --size=0.25M

Writes grid.png, samples.npz (arr_0 uint8 images, arr_1 labels or prompt numbers), report.json and,
with --save_arrays, arrays.npz into --out (default: a new folder under results/); from prompts also
images/ with one file per image in the layout of the prompt set. An interrupted run started again
with the same flags continues where it stopped.
"""

import pathlib
import sys

import jax
import numpy as np

from experiments import settings
from experiments.flags.condition import ConditionFlags
from experiments.flags.generation import ProgramFlags, SamplingFlags
from experiments.flags.given import GivenFlags
from experiments.flags.model import ModelFlags
from experiments.flags.policy import PolicyFlags
from experiments.run import report as run_report
from experiments.run import results as run_results
from experiments.run.folder import RunFolder
from experiments.run.settings import RunSettings
from pallas_kernels import implementations
from varjax.api import Generator, Model
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.cli import command_line
from varjax.parallel.sharding import check_plan

FLAGS = command_line.CommandFlags()
MODEL = ModelFlags(FLAGS, published="Published name, with --dry_run: plan without weights")
POLICY = PolicyFlags(FLAGS)
CONDITION = ConditionFlags(FLAGS)
SAMPLING = SamplingFlags(FLAGS)
PROGRAM = ProgramFlags(FLAGS, mesh=True)
FLAGS.compilation_cache()
COMPARE = FLAGS.boolean("compare", False, "Also run the full cache and report fidelity to it.")
SAVE_ARRAYS = FLAGS.boolean(
    "save_arrays", False, "Also write arrays.npz: tokens, code map, images, logits."
)
GIVEN = GivenFlags(FLAGS)
DRY_RUN = FLAGS.boolean("dry_run", False, "Print the plan and predicted bytes; allocate nothing.")
OVERWRITE = FLAGS.boolean("overwrite", False, "Replace --out if it exists.")
OUT = FLAGS.string("out", None, "Output folder; default: a new one under results/.")


def resolve() -> RunSettings:
    """Check every flag and plan the cache. Nothing is compiled, allocated or written."""
    model = MODEL.resolve()
    if not DRY_RUN.value:
        settings.require_weights(model, "add --dry_run, or ")
    condition = CONDITION.resolve(model, weights=not DRY_RUN.value)
    policy = POLICY.resolve()
    policy.check_images(len(condition))
    sampling = SAMPLING.sampling(model)
    calibration = POLICY.calibration(policy, model.geometry, model, sampling)
    plan = plan_cache(model.geometry, policy, calibration)
    program = PROGRAM.resolve(model)
    if program["mesh"].num_devices > 1:
        check_plan(plan, program["mesh"])
    return RunSettings(
        model=model,
        condition=condition,
        policy=policy,
        plan=plan,
        sampling=sampling,
        seed=SAMPLING.seed,
        batch_size=PROGRAM.batch_size(
            model, plan, condition, program["dtype"], program["kv_dtype"], DRY_RUN.value
        ),
        **program,
        compare=COMPARE.value,
        save_arrays=SAVE_ARRAYS.value,
        given=GIVEN.resolve(model, len(condition)),
        calibration=None if calibration is None else calibration.digest,
        remarks=(
            *POLICY.remarks(plan, calibration),
            *filter(None, [_block_remark(plan, program["attention"])]),
        ),
    )


def _block_remark(plan: CachePlan, attention: str | None) -> str:
    name = attention or implementations.preferred(jax.default_backend())
    return settings.block_remark(plan, name)


def generate_series(run: RunSettings, model: Model, folder: RunFolder, series: str) -> Generator:
    """Run what is missing of one series of batches ("main": the policy, "full": the full cache) and
    keep every batch."""
    policy, plan = (
        (run.policy, run.plan) if series == "main" else settings.full_plan(model.geometry)
    )
    main = series == "main"
    generator = run.generator(
        model,
        policy,
        plan,
        kv_dtype=run.kv_dtype if main else run.dense_dtype,
        keep_logits=run.save_arrays and main,
    )
    done, total = folder.finished(series), len(run.condition)
    print(
        f"{policy.name}: compiling {len(generator.segments)} segments for batches of "
        f"{run.batch_size}",
        file=sys.stderr,
        flush=True,
    )
    first = run.padded(np.arange(1))
    generator.compile(run.condition.take(first), run.given.take(first))
    progress = command_line.Progress(f"{policy.name}: image", total, first=done)
    progress.note(
        f"{policy.name}: compiled in {generator.timing.compile_s:.1f} s (compilation "
        f"cache {generator.timing.cache})"
    )
    if done:
        progress.note(f"{policy.name}: {done} of {total} images are there already, continuing")
    options = dict(seed=run.seed, given=run.given.tokens, given_scales=run.given.scales)
    for index, results in generator.batches(run.condition, first=done, **options):
        folder.add(series, index, run_results.kept(run, results))
        progress.update(int(index[-1]) + 1)
    if (
        series == "main" and not generator.timing.runs
    ):  # a single batch: run it again for the steady time
        start = max(0, total - run.batch_size)
        list(generator.batches(run.condition, first=start, **options))
        if not generator.timing.runs:
            list(generator.batches(run.condition, first=start, **options))
    return generator


def main(argv) -> int | None:
    run = resolve()
    if DRY_RUN.value:
        print(run_report.dry_run_text(run))
        return None
    print(run_report.plan_line(run), *run.remarks, sep="\n", file=sys.stderr)
    fingerprint = settings.fingerprint(run.describe())
    if OUT.value:
        folder = RunFolder(pathlib.Path(OUT.value), fingerprint, overwrite=OVERWRITE.value)
    else:
        folder = RunFolder.fresh(f"{run.model.name}-{run.policy.name}", fingerprint)
    run = run.encoded()
    model = settings.load_model(run.model, run.dtype)
    with folder.working():
        generator = generate_series(run, model, folder, "main")
        if run.compare:
            generate_series(run, model, folder, "full")
        report = run_results.finish(run, folder, generator)
    print(run_report.table(report, folder.out))
    return None
