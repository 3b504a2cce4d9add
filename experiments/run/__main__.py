"""Generate images with a KV-cache policy and report what the cache cost.

    python -m experiments.run --policy=headkv --budget=0.25 --labels=3,7,7 --out=DIR
    python -m experiments.run --policy=streaming --budget=0.1 --compare
    python -m experiments.run --model=infinity-8b --policy=headkv --batch_size=8 --dry_run
    python -m experiments.run --checkpoint=DIR --prompts="a red apple" --aspect=1.5 --size=0.25M
    python -m experiments.run --checkpoint=DIR --recipe=var-fid50k --policy=headkv --out=DIR

Writes grid.png, samples.npz (arr_0 uint8 images, arr_1 labels or prompt numbers), report.json and,
with --save_arrays, arrays.npz, with --save_kept, kept.npz and kept.png into --out (default: a new
folder under results/); from prompts also images/ with one file per image in the layout of the
prompt set. An interrupted run started again with the same flags continues where it stopped;
SIGTERM ends it after the batch that is drawn, with status 0. With --shard=I/N it makes part I of N,
with --distributed many processes work as one (docs/howto/many_processes.md).
"""

from functools import partial

import jax
import numpy as np

from experiments import judges, parts, processes, speed
from experiments.batch_files import Series
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags, about
from experiments.flags.condition import ConditionFlags
from experiments.flags.distributed import DistributedFlag
from experiments.flags.model import ModelFlags
from experiments.flags.policy import PolicyFlags, plan_remarks
from experiments.flags.program import ProgramFlags
from experiments.flags.sampling import SamplingFlags
from experiments.generation import Run
from experiments.judges import Judges
from experiments.output import BatchStore, FolderFlags, say
from experiments.parts import PartStore, ShardFlag
from experiments.recipes.recipe import RecipeFlag
from experiments.run import results as run_results
from pallas_kernels import chips
from varjax.core import errors
from varjax.core.errors import UserError, some
from varjax.core.plan import CachePlan
from varjax.generation import api, hosts, kept, memory
from varjax.generation.generator import Generator
from varjax.generation.progress import Progress
from varjax.models.model import Model
from varjax.storage import npz
from varjax.storage.values import require

LARGEST_SIDE = 2**13  # pixels, for --resize
LARGEST_KEPT = 2**33  # bytes of --save_kept

FLAGS = CommandFlags(
    "--policy=headkv --budget=0.25 --labels=3,7,22 --compare",
    "policy budget kv_bytes labels prompts num_images checkpoint batch_size seed out compare "
    "dry_run",
    compiles=True,
)
MODEL = ModelFlags(FLAGS, published="A model of --plugin; or, with --dry_run, a published name")
RECIPE = RecipeFlag(FLAGS, "run")
POLICY = PolicyFlags(FLAGS)
CONDITION = ConditionFlags(FLAGS)
SAMPLING = SamplingFlags(FLAGS)
PROGRAM = ProgramFlags(FLAGS, mesh=True)
FLAGS.heading("What is compared and written")
COMPARE = FLAGS.boolean("compare", False, "Also run the full cache and report fidelity to it.")
LPIPS = FLAGS.string(
    "lpips", None, "With --compare: folder of a converted LPIPS network (docs/howto/evaluate.md)."
)
SAVE_ARRAYS = FLAGS.boolean(
    "save_arrays", False, "Also write arrays.npz: tokens, code map, images, logits."
)
SAVE_KEPT = FLAGS.boolean(
    "save_kept",
    False,
    "Also write which tokens every head kept: kept.npz, and kept.png of the first image.",
)
RESIZE = FLAGS.integer(
    "resize",
    None,
    "Side of the pictures that are written, by torch's bicubic interpolation without antialiasing "
    "(LlamaGen's evaluation); default: as they are drawn.",
    lower_bound=8,
    upper_bound=LARGEST_SIDE,
)
DRY_RUN = FLAGS.boolean("dry_run", False, "Print the plan and predicted bytes; allocate nothing.")
GIVEN = FLAGS.group(
    "given",
    "Tokens that replace the draw, as tokens=FILE.npz,scales=3.",
    alone=("given_tokens", "given_bits", "given_scales"),
)
SHAPES = {"tokens": "int [N, L]", "bits": "uint8 [N, L of the image tokenizer, bits of a code]"}
GIVEN_FILES = {  # {name that a model gives its tokens: setting}
    name: GIVEN.string(name, None, f"npz file with `{name}` {shape}.")
    for name, shape in SHAPES.items()
}
GIVEN_SCALES = GIVEN.integer(
    "scales",
    None,
    "The first so many scales, or tokens of a model that draws token by token, take what is given; "
    "default: all.",
)
FLAGS.heading("Output")
DISTRIBUTED = DistributedFlag(FLAGS)
SHARD = ShardFlag(FLAGS, "images")
OUT = FolderFlags(FLAGS)


def resolve() -> Run:
    """Check every flag and plan the cache. Compile, allocate and write nothing."""
    dry_run = DRY_RUN.value
    if recipe := RECIPE.recipe:
        recipe.check_model(MODEL.named())
    model = MODEL.resolve(weights=not dry_run, otherwise="add --dry_run, or ")
    model, condition = MODEL.fitted(model, CONDITION.resolve(model, weights=not dry_run))
    model, policy = PROGRAM.stored(model), POLICY.resolve()
    policy.check_images(len(condition))
    with RECIPE.about():
        sampling = SAMPLING.sampling(model)
    program = PROGRAM.resolve(model)
    sizing = partial(PROGRAM.sizing, program, model, condition)
    groups = program.mesh.model
    policy, of_budget = POLICY.sized(policy, model, sampling, sizing, groups)
    plan, calibration = POLICY.plan(policy, model, sampling, groups)
    PROGRAM.check_plan(plan, program.mesh)
    given_tokens, given_scales = read_given(model, len(condition))
    of_recipe = []
    if recipe:
        # a dry run needs no prompts
        count = len(condition) if model.num_classes or not dry_run else None
        of_recipe = RECIPE.remarks(recipe.remarks(model, count))
    jobs = SHARD.shard.count if SHARD.shard else 1
    batch_size = PROGRAM.batch_size(program, model, plan, condition, dry_run=dry_run, jobs=jobs)
    chip, each = chips.of_kind(jax.local_devices()[0].device_kind), batch_size // program.mesh.data
    of_speed = speed.remark(model, plan, program, each, chip)
    return Run(
        model=model,
        condition=condition,
        sampling=sampling,
        seed=SAMPLING.seed(),
        batch_size=batch_size,
        program=program,
        policy=policy,
        plan=plan,
        compare=COMPARE.value,
        save_arrays=SAVE_ARRAYS.value,
        save_kept=_save_kept(plan, len(condition), program.mesh.num_devices),
        given_tokens=given_tokens,
        given_scales=given_scales,
        calibration=None if calibration is None else calibration.digest,
        remarks=(*of_budget, *plan_remarks(plan, calibration), *of_speed, *of_recipe),
        judges=_judges(model, batch_size),
        resize=RESIZE.value,
        recipe=RECIPE.describe(),
    )


def _save_kept(plan: CachePlan, images: int, devices: int) -> bool:
    """Return --save_kept; `UserError` where it cannot be done."""
    if SAVE_KEPT.value:
        with about(SAVE_KEPT):
            if devices > 1 and not plan.static_content:
                raise UserError("several devices do not tell what they decided: leave out --mesh")
            if (size := images * kept.num_bytes(plan)) > LARGEST_KEPT:
                much = f"{images} images take {memory.show_bytes(size)}"
                raise UserError(f"{much}, at most {memory.show_bytes(LARGEST_KEPT)}: draw fewer")
    return SAVE_KEPT.value


def _judges(model: Model, batch_size: int) -> Judges:
    """Return the networks that compare pictures; none without --compare."""
    if COMPARE.value:
        require("dm_pix", extra="eval", purpose="--compare")
        return judges.of_model(model, LPIPS, batch_size, RESIZE.value)
    if LPIPS.value:
        with about(LPIPS):
            raise UserError("it compares with the full cache: add --compare, or leave it out")
    return Judges()


def read_given(model: Model, num_images: int) -> tuple[np.ndarray | None, int | None]:
    """Return (given tokens of all images, as the model draws them; how many scales or tokens take
    them, None for all), checked against the model. Tokens are None if none are given."""
    mine, order = model.transformer.token_name, model.geometry.schedule
    steps = order.num_drawn
    for name, holder in GIVEN_FILES.items():
        if holder.value and name != mine:
            raise UserError(f"--given_{name}: {model.name} draws {mine}: use --given_{mine}")
    path, scales = GIVEN_FILES[mine].value, GIVEN_SCALES.value
    if scales is not None and (not path or not 0 <= scales <= steps):
        raise UserError(
            f"--given_scales={scales}: 0 to {steps} {order.kind}, together with --given_{mine}=FILE"
        )
    if not path:
        return None, None
    count = steps if scales is None else scales
    with errors.about(f"--given_{mine}={path}"):
        found = npz.load(path, [mine])
        if mine not in found:
            held = some(npz.names(path)) or "nothing"
            raise UserError(f"cannot read array `{mine}` of {path}: the file holds {held}")
        return model.token_arrays.tokens_from_file(found[mine], num_images, count), scales


def generate_series(
    run: Run, model: Model, store: BatchStore, series: str, stop: processes.Stop
) -> Generator:
    """Run the batches that a series lacks, and keep every batch. series: "main" is the policy,
    "full" the full cache. `Stopped` after a batch if `stop` was asked."""
    if series == "main":
        plan, kv_dtype = run.plan, run.program.kv_dtype
        keep = {"keep_logits": run.save_arrays}
        keep["keep_contents"] = run.save_kept and not plan.static_content
    else:
        plan = api.plan(run.plan.geometry, mesh=run.program.mesh)
        kv_dtype, keep = run.program.dtype, {}
    generator = run.generator(model, plan, kv_dtype, **keep)
    name, total = plan.policy.name, len(store.series[series].made)
    missing, done = store.missing(series), store.finished(series)
    segments = len(generator.spec.segments)
    what = f"{segments} segments" if segments else "the step of a token"
    say(f"{name}: compiling {what} for batches of {run.batch_size}")
    given = run.given_tokens
    first = np.zeros(generator.batch_size, np.int32)  # any: programs depend on shapes only
    generator.compile(run.condition.take(first), None if given is None else given[first])
    say(
        f"{name}: compiled in {generator.timing.compile_s:.1f} s (compilation cache "
        f"{generator.timing.cache})"
    )
    if done:
        say(f"{name}: {done} of {total} images are there already, continuing")
    if missing:
        say(f"{name}: drawing the first batch, {min(run.batch_size, total)} images")
    progress = Progress(f"{name}: image", total, first=done)
    drawn = generator.batches(
        run.condition,
        stop.steps(missing),
        seed=run.seed,
        given=given,
        given_scales=run.given_scales,
    )
    for index, results in drawn:
        store.add(series, index, run_results.kept(run, results, series == "main"))
        done += len(index)
        progress.update(done)
    if stop.asked:
        raise processes.Stopped(done, total)
    return generator


def draw(run: Run, model: Model, store: BatchStore) -> list[Generator]:
    """Draw all that is missing: the policy, then, to compare with, the full cache. `Stopped` if the
    system asks to end meanwhile."""
    with processes.Stop() as stop:
        return [generate_series(run, model, store, name, stop) for name in store.series]


def main(argv: list[str]) -> None:
    shard, run = SHARD.shard, DISTRIBUTED.resolve(resolve)
    made = shard and shard.images(len(run.condition), run.batch_size)
    stem, names = f"{run.model.name}-{run.policy.name}", ("main", "full")[: 1 + run.compare]
    series = dict.fromkeys(names, Series(len(run.condition), run.batch_size, made))
    said = run.describe()
    for name in () if shard else ("batch_size", "mesh"):
        said.pop(name)  # parts are divided by batches; without parts they decide no image
    store = SHARD.open(OUT, stem, said, series)
    if DRY_RUN.value:  # it refuses what the run would, the folder included
        print(run_results.dry_run_text(run))
        return
    say("\n".join([run_results.plan_line(run), *run.remarks]))
    make_part(run, store) if shard else make(run, store)


def make(run: Run, store: BatchStore) -> None:
    """Draw all images, alone or with other processes, and write the results."""
    with processes.together():
        run = run.encoded()
        say(f"{run.model.name}: reading the weights")
        model = run.load_model()
    with store.working():
        generator, *full = draw(run, model, store)
        with processes.together():
            if hosts.is_first():
                say(f"comparing and writing {store.out}" if run.compare else f"writing {store.out}")
                report = run_results.finish(run, store, generator, *full)
                print(run_results.summary(report, store.out))


def make_part(run: Run, store: PartStore) -> None:
    """Draw the images of one part, and keep them for `experiments.merge`."""
    made = store.series["main"].made
    said = f"{store.shard}: {len(made)} of {len(run.condition)} images"
    store.scan()
    if parts.is_written(store) and not any(store.missing(name) for name in store.series):
        print(f"{said} are there already, in {store.work.path}")
        return
    say(said)
    run = run.encoded() if made else run
    model = run.load_model() if made else None
    with store.working():
        run_results.write_part(run, store, draw(run, model, store)[0] if made else None)
    print(f"{said} are in {store.work.path}; experiments.merge {store.out} joins all parts")


if __name__ == "__main__":
    command_line.run(main)
