"""Generate images with a KV-cache policy and report what the cache cost.

    python -m experiments.run --policy=headkv --budget=0.25 --labels=3,7,7 --out=DIR
    python -m experiments.run --policy=streaming --budget=0.1 --compare
    python -m experiments.run --checkpoint=var-d30 --policy=headkv --batch_size=8 --dry_run

Writes grid.png, samples.npz (arr_0 uint8 images, arr_1 labels), report.json and, with
--save_arrays, arrays.npz into --out (default: a new folder under results/). An interrupted run
started again with the same flags continues where it stopped.
"""

import pathlib
import sys

import jax

from experiments import run_report, settings
from experiments.generation_flags import ProgramFlags, SamplingFlags
from experiments.model_flags import ModelFlags
from experiments.policy_flags import PolicyFlags
from experiments.run_folder import RunFolder
from experiments.run_settings import RunSettings
from pallas_kernels import implementations
from varjax import command_line
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.errors import UserError
from varjax.generation import Generator, Model
from varjax.sharding import check_plan

FLAGS = command_line.CommandFlags()
MODEL = ModelFlags(FLAGS, published="Published name, with --dry_run: plan without weights")
POLICY = PolicyFlags(FLAGS)
LABELS = FLAGS.string("labels", None, "Class numbers, one image each: 3,7,7.")
NUM_IMAGES = FLAGS.integer("num_images", None, "Number of images, over all classes in turn.")
PROMPTS = FLAGS.string("prompts", None, "File with one prompt per line (text-to-image models).")
SAMPLING = SamplingFlags(FLAGS)
PROGRAM = ProgramFlags(FLAGS, mesh=True)
FLAGS.compilation_cache()
COMPARE = FLAGS.boolean("compare", False, "Also run the full cache and report fidelity to it.")
SAVE_ARRAYS = FLAGS.boolean(
    "save_arrays", False, "Also write arrays.npz: tokens, code map, images, logits."
)
GIVEN_TOKENS = FLAGS.string(
    "given_tokens", None, "npz file with `tokens` int [N, L] that replace the draw."
)
GIVEN_SCALES = FLAGS.integer(
    "given_scales", None, "The first so many scales take the given tokens; default: all."
)
DRY_RUN = FLAGS.boolean("dry_run", False, "Print the plan and predicted bytes; allocate nothing.")
OVERWRITE = FLAGS.boolean("overwrite", False, "Replace --out if it exists.")
OUT = FLAGS.string("out", None, "Output folder; default: a new one under results/.")


def resolve() -> RunSettings:
    """Check every flag and plan the cache. Nothing is compiled, allocated or written."""
    model = MODEL.resolve()
    if not DRY_RUN.value:
        settings.require_weights(model, "add --dry_run, or ")
    if PROMPTS.value is not None:
        raise UserError(
            f"--prompts: {model.name} is class-conditional; choose images with --labels or "
            f"--num_images"
        )
    labels = settings.choose_labels(LABELS.value, NUM_IMAGES.value, model.num_classes)
    policy = POLICY.resolve()
    policy.check_images(len(labels))
    sampling = SAMPLING.sampling(model)
    calibration = POLICY.calibration(policy, model.geometry, model, sampling)
    plan = plan_cache(model.geometry, policy, calibration)
    program = PROGRAM.resolve(model)
    if program["mesh"].num_devices > 1:
        check_plan(plan, program["mesh"])
    return RunSettings(
        model=model,
        labels=labels,
        policy=policy,
        plan=plan,
        sampling=sampling,
        seed=SAMPLING.seed,
        batch_size=PROGRAM.batch_size(
            model, plan, len(labels), program["dtype"], program["kv_dtype"], DRY_RUN.value
        ),
        **program,
        compare=COMPARE.value,
        save_arrays=SAVE_ARRAYS.value,
        given_tokens=settings.read_given_tokens(
            GIVEN_TOKENS.value, len(labels), model.geometry, model.transformer.config.vocab_size
        ),
        given_scales=_given_scales(model.geometry.schedule.num_scales),
        calibration=None if calibration is None else calibration.digest,
        remarks=(
            *POLICY.remarks(plan, calibration),
            *filter(None, [_block_remark(plan, program["attention"])]),
        ),
    )


def _block_remark(plan: CachePlan, attention: str | None) -> str:
    name = attention or implementations.preferred(jax.default_backend())
    return settings.block_remark(plan, name)


def _given_scales(num_scales: int) -> int | None:
    given = GIVEN_SCALES.value
    if given is not None and (not GIVEN_TOKENS.value or not 0 <= given <= num_scales):
        raise UserError(
            f"--given_scales={given}: 0 to {num_scales} scales, together with --given_tokens=FILE"
        )
    return given


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
    done, total = folder.finished(series), len(run.labels)
    print(
        f"{policy.name}: compiling {len(generator.segments)} segments for batches of "
        f"{run.batch_size}",
        file=sys.stderr,
        flush=True,
    )
    generator.compile(given=run.given_tokens is not None)
    progress = command_line.Progress(f"{policy.name}: image", total, first=done)
    progress.note(
        f"{policy.name}: compiled in {generator.timing.compile_s:.1f} s (compilation "
        f"cache {generator.timing.cache})"
    )
    if done:
        progress.note(f"{policy.name}: {done} of {total} images are there already, continuing")
    forced = dict(given=run.given_tokens, given_scales=run.given_scales)
    keep = ("images", "tokens", "code_map", "logits") if run.save_arrays else ("images", "tokens")
    for index, results in generator.batches(run.labels, seed=run.seed, first=done, **forced):
        folder.add(series, index, {k: v for k, v in results.items() if k in keep})
        progress.update(int(index[-1]) + 1)
    if (
        series == "main" and not generator.timing.runs
    ):  # a single batch: run it again for the steady time
        start = max(0, len(run.labels) - run.batch_size)
        list(generator.batches(run.labels, seed=run.seed, first=start, **forced))
        if not generator.timing.runs:
            list(generator.batches(run.labels, seed=run.seed, first=start, **forced))
    return generator


def main(argv) -> int | None:
    run = resolve()
    if DRY_RUN.value:
        print(run_report.dry_run_text(run))
        return None
    print(run_report.plan_line(run), file=sys.stderr)
    fingerprint = settings.fingerprint(run.describe())
    if OUT.value:
        folder = RunFolder(pathlib.Path(OUT.value), fingerprint, overwrite=OVERWRITE.value)
    else:
        folder = RunFolder.fresh(f"{run.model.name}-{run.policy.name}", fingerprint)
    model = settings.load_model(run.model, run.dtype)
    with folder.working():
        generator = generate_series(run, model, folder, "main")
        if run.compare:
            generate_series(run, model, folder, "full")
        report = run_report.finish(run, folder, generator)
    print(run_report.table(report, folder.out))
    return None


if __name__ == "__main__":
    command_line.run(main)
