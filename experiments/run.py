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

import jax.numpy as jnp

from experiments import run_report, settings
from experiments.run_folder import RunFolder
from varjax import command_line, generation, memory
from varjax.cache.planner import plan_cache
from varjax.errors import UserError, choose
from varjax.generation import Generator, Model
from varjax.models import registry
from varjax.policies import POLICIES, get_policy
from varjax.sampling import Sampling

USUAL_BATCH = 8

FLAGS = command_line.CommandFlags()
CHECKPOINT = FLAGS.string(
    "checkpoint",
    None,
    "Checkpoint folder; default: the embedded demo. With --dry_run also a published name.",
)
MODEL = FLAGS.string("model", None, "Published name, with --dry_run: plan without weights.")
POLICY = FLAGS.enum("policy", "full", list(POLICIES), "KV-cache policy.")
BUDGET = FLAGS.floating(
    "budget",
    None,
    "Fraction of the full cache's bytes that may be kept; default: the policy's own.",
)
POLICY_ARGS = FLAGS.string(
    "policy_args", "", "Further arguments of the policy: key=value,key=value."
)
CALIBRATION = FLAGS.string("calibration", None, "Calibration file, for policies that use one.")
LABELS = FLAGS.string("labels", None, "Class numbers, one image each: 3,7,7.")
NUM_IMAGES = FLAGS.integer("num_images", None, "Number of images, over all classes in turn.")
PROMPTS = FLAGS.string("prompts", None, "File with one prompt per line (text-to-image models).")
CFG = FLAGS.floating(
    "cfg",
    None,
    "Guidance strength; default: the checkpoint's recommendation, as for all sampling flags.",
)
TOP_K = FLAGS.integer("top_k", None, "Keep the k largest logits; 0 is off.")
TOP_P = FLAGS.floating("top_p", None, "Nucleus sampling with this mass; 0 is off.")
GREEDY = FLAGS.boolean("greedy", False, "Take the largest logit instead of sampling.")
MORE_SMOOTH = FLAGS.boolean("more_smooth", None, "Feed back mixtures of codes: smoother pictures.")
SEED = FLAGS.integer("seed", 0, "Image i depends on (seed, i, label) only.")
BATCH_SIZE = FLAGS.integer(
    "batch_size", None, f"Images per program call; default: {USUAL_BATCH}, or what fits."
)
DTYPE = FLAGS.enum(
    "dtype",
    None,
    ["bfloat16", "float32"],
    "Type of weights and cache; default: float32 on CPU, else bfloat16.",
)
KV_DTYPE = FLAGS.enum(
    "kv_dtype",
    None,
    list(generation.KV_DTYPES),
    "Type of stored keys and values; default: that of the weights. int8 has a scale per token.",
)
PRECISION = FLAGS.enum(
    "matmul_precision",
    "default",
    list(generation.MATMUL_PRECISIONS),
    "Precision of float32 products.",
)
SEGMENTS = FLAGS.string(
    "segments",
    "auto",
    "How many segments the scale loop is cut into: auto or a number. Results do not change.",
)
ATTENTION = FLAGS.enum(
    "attention", "auto", ["auto", "reference", "triton", "tpu"], "Attention implementation."
)
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


def resolve() -> settings.RunSettings:
    """Check every flag and plan the cache. Nothing is compiled, allocated or written."""
    if MODEL.value and CHECKPOINT.value:
        raise UserError("--model and --checkpoint exclude each other: name one model")
    if MODEL.value:
        choose("model", MODEL.value, registry.PRESETS)
    model = settings.abstract_model(MODEL.value or CHECKPOINT.value)
    if model.directory is None and not DRY_RUN.value:
        raise UserError(
            f"{model.name} is a published model without weights here: add --dry_run, or convert "
            f"its weights with "
            f"`python -m ported_weights --model={model.name} ...` and give the folder"
        )
    if PROMPTS.value is not None:
        raise UserError(
            f"--prompts: {model.name} is class-conditional; choose images with --labels or "
            f"--num_images"
        )
    labels = settings.choose_labels(LABELS.value, NUM_IMAGES.value, model.num_classes)
    policy = get_policy(POLICY.value, BUDGET.value, command_line.typed_pairs(POLICY_ARGS.value))
    policy.check_images(len(labels))
    sampling = Sampling.recommended(
        dict(model.metadata.get("sampling", {})),
        cfg=CFG.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        greedy=GREEDY.value,
        more_smooth=MORE_SMOOTH.value,
    )
    calibration = settings.read_calibration(
        CALIBRATION.value, policy, model.geometry, model, sampling
    )
    plan = plan_cache(model.geometry, policy, calibration)
    vocabulary = model.transformer.config.vocab_size
    generation.plan_segments(model.geometry.schedule, SEGMENTS.value)
    dtype = DTYPE.value or generation.default_dtype()
    dense_dtype = generation.storage_dtype(dtype)
    kv_dtype = jnp.dtype(KV_DTYPE.value or dense_dtype)
    return settings.RunSettings(
        model=model,
        labels=labels,
        policy=policy,
        plan=plan,
        sampling=sampling.check(vocabulary),
        seed=settings.check_seed(SEED.value),
        batch_size=_batch_size(model, plan, len(labels), dtype, kv_dtype),
        dtype=dtype,
        kv_dtype=kv_dtype,
        dense_dtype=dense_dtype,
        matmul_precision=PRECISION.value,
        segments=SEGMENTS.value,
        attention=settings.check_attention(ATTENTION.value),
        compare=COMPARE.value,
        save_arrays=SAVE_ARRAYS.value,
        given_tokens=settings.read_given_tokens(
            GIVEN_TOKENS.value, len(labels), model.geometry, vocabulary
        ),
        given_scales=_given_scales(model.geometry.schedule.num_scales),
        calibration=None if calibration is None else calibration.digest,
        remarks=tuple(plan.policy.plan_lines(model.geometry, calibration)),
    )


def _given_scales(num_scales: int) -> int | None:
    given = GIVEN_SCALES.value
    if given is not None and (not GIVEN_TOKENS.value or not 0 <= given <= num_scales):
        raise UserError(
            f"--given_scales={given}: 0 to {num_scales} scales, together with --given_tokens=FILE"
        )
    return given


def _batch_size(model, plan, num_images: int, dtype, kv_dtype) -> int:
    asked = BATCH_SIZE.value
    if asked is not None and asked < 1:
        raise UserError(f"--batch_size={asked}: at least 1")

    def predict(size):
        return memory.predict(plan, model.transformer, model.codec, size, dtype, kv_dtype)

    if DRY_RUN.value:
        return asked or min(num_images, USUAL_BATCH)
    if asked is not None and memory.largest_batch(predict, asked, memory.available_bytes()) < asked:
        memory.choose_batch_size(predict, asked, asked, USUAL_BATCH)
    return memory.choose_batch_size(predict, asked, num_images, USUAL_BATCH)


def generate_series(
    run: settings.RunSettings, model: Model, folder: RunFolder, series: str
) -> Generator:
    """Run what is missing of one series of batches ("main": the policy, "full": the full cache) and
    keep every batch."""
    policy, plan = (
        (run.policy, run.plan) if series == "main" else settings.full_plan(model.geometry)
    )
    generator = Generator(
        model,
        policy,
        sampling=run.sampling,
        batch_size=run.batch_size,
        segments=run.segments,
        attention=run.attention,
        kv_dtype=run.kv_dtype if series == "main" else run.dense_dtype,
        matmul_precision=run.matmul_precision,
        keep_logits=run.save_arrays and series == "main",
        cache_plan=plan,
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
    progress.note(f"{policy.name}: compiled in {generator.timing.compile_s:.1f} s")
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
