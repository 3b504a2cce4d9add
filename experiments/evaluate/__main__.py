"""Measure the quality of pictures: FID, sFID, Inception score, precision and recall against a
reference set; PSNR, SSIM, LPIPS and equal tokens against the pictures of the full cache.

    python -m experiments.evaluate --samples=results/run --inception=DIR \\
        --reference=VIRTUAL_imagenet256_labeled.npz --protocol=adm --out=DIR
    python -m experiments.evaluate --samples=results/headkv --full=results/full --lpips=DIR
    python -m experiments.evaluate --samples=PICTURES --reference=PHOTOS --protocol=clean-fid \\
        --inception=DIR
    python -m experiments.evaluate --samples=results/demo --reference=fruits64/val.npz \\
        --features=demo
    python -m experiments.evaluate --recipe=var-fid50k --samples=DIR --reference=NPZ --inception=DIR

--samples, --reference and --full are folders of experiments.run, folders of pictures, or npz files
with pictures (`arr_0`); a reference may also be a file of statistics (`mu`, `sigma`, for sFID
`mu_s`, `sigma_s`), as ADM and pytorch-fid publish them. The networks are the published ones,
converted once by `python -m ported_weights` (docs/howto/evaluate.md). --protocol chooses how
pictures are resized and what is computed by default; numbers of different protocols are not
comparable.

Writes metrics.json, which says how everything was computed, and for --full also per_image.npz, into
--out (default: a new folder under results/). An interrupted evaluation started again with the same
flags continues where it stopped; SIGTERM ends it after the pictures in work, with status 0. With
--distributed many processes share the pictures.
"""

import functools
import pathlib
import sys
from dataclasses import dataclass
from functools import partial

import jax
import scipy

from experiments.batch_files import Series
from experiments.evaluate import features, inputs, pairs, results, sets
from experiments.evaluate.inputs import PictureSet
from experiments.evaluate.pairs import Pairs
from experiments.evaluate.sets import Comparison
from experiments.flags.distributed import DistributedFlag
from experiments.generation import environment
from experiments.output import BatchStore, FolderFlags
from experiments.recipes.recipe import RecipeFlag
from experiments.stopping import Stopped, say_stopped
from varjax import arguments
from varjax.cli import command_line
from varjax.cli.flags import CommandFlags, about
from varjax.errors import UserError, choose
from varjax.evaluation import extractors, protocols
from varjax.evaluation.extractors import Network, Program
from varjax.evaluation.pictures import Fit
from varjax.evaluation.protocols import PROTOCOLS
from varjax.io.json_text import json_safe
from varjax.parallel import processes
from varjax.parallel.split import MeshSpec
from varjax.parallel.stopping import Stop
from varjax.storage.atomic import check_new_file

PAIRED = ("psnr", "ssim", "lpips")
DEMO = "demo"  # value of --features

FLAGS = CommandFlags(
    "python -m experiments.run --num_images=8 --out=full\n"
    "python -m experiments.run --num_images=8 --policy=headkv --out=headkv\n"
    "--samples=headkv --full=full",
    "samples reference full metrics inception lpips out",
    compiles=True,
)
RECIPE = RecipeFlag(FLAGS, "evaluate")
SAMPLES = FLAGS.string("samples", None, "Pictures to judge: a folder or an npz file.")
REFERENCE = FLAGS.string("reference", None, "Pictures or statistics that they should be like.")
FULL = FLAGS.string("full", None, "The same pictures of the full cache, compared one by one.")
PROTOCOL = FLAGS.enum("protocol", "adm", list(PROTOCOLS), "How pictures are resized.")
SPLIT_SIZE = FLAGS.integer(
    "split_size",
    protocols.SPLIT_SIZE,
    "Pictures of a block of the Inception score.",
    lower_bound=1,
)
INCEPTION = FLAGS.string("inception", None, "Folder of the converted network of FID.")
LPIPS = FLAGS.string("lpips", None, "Folder of a converted LPIPS network.")
METRICS = FLAGS.list(
    "metrics",
    None,
    f"Some of {', '.join(protocols.METRICS)}; default: what the protocol and the files allow.",
)
FEATURES = FLAGS.enum(
    "features",
    "inception",
    list(extractors.EXTRACTORS),
    "Whose features are compared; demo: of a small classifier of fruit, 64x64 pixels (no FID).",
)
CLASSIFIER = FLAGS.string(
    "classifier", None, "With --features=demo: folder of a classifier (docs/howto/evaluate.md)."
)
BATCH_SIZE = FLAGS.integer(
    "batch_size",
    None,
    f"Pictures per program call, on all devices; default: {extractors.CPU_BATCH} on CPU, else"
    f" {extractors.USUAL_BATCH} per device; fewer where large pictures take much memory.",
    lower_bound=1,
    upper_bound=arguments.LARGEST_BATCH,
)
MESH = FLAGS.string("mesh", None, "Devices to split pictures over: data=4.")
STATISTICS = FLAGS.string(
    "save_statistics", None, "npz file for the samples' statistics, a reference for later."
)
FLAGS.heading("Output")
DISTRIBUTED = DistributedFlag(FLAGS)
OUT = FolderFlags(FLAGS)
FLAGS.require("samples")


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A resolved evaluation: `comparison` of two sets, `pairs` compared picture by picture."""

    samples: PictureSet
    comparison: Comparison | None
    pairs: Pairs | None
    batch_size: int
    mesh: MeshSpec
    remarks: tuple[str, ...]

    def series(self) -> dict[str, Series]:
        """Return the files of everything that is computed, by name."""
        found: dict[str, Series] = {}
        size = features.chunk(self.batch_size)
        if job := self.comparison:
            for name, side in job.sides.items():
                if job.wanted[name]:
                    wanted = job.wanted[name]
                    found[name] = features.series(side.pictures, job.network, wanted, size)
        if self.pairs:
            found["pairs"] = self.pairs.series(size)
        return found

    def program(self, network: Network, size: tuple[int, int]) -> Program:
        """Return the program of a network for pictures of a size (height, width)."""
        return Program(network, size, self.batch_size, self.mesh)

    def describe(self) -> dict:
        """Return what decides the results. Paths of files do not."""
        recipe = json_safe({"command": "evaluate", **self.recipe()})
        for side in ("samples", "reference", "full"):
            recipe.get(side, {}).pop("given", None)
        return {n: value for n, value in recipe.items() if n not in ("batch_size", "mesh")}

    def recipe(self) -> dict:
        """Return how everything is computed, for metrics.json."""
        protocol, job = PROTOCOLS[PROTOCOL.value], self.comparison
        described = {"name": PROTOCOL.value, **protocol.describe(SPLIT_SIZE.value)}
        if FEATURES.value == DEMO:
            described = protocols.DEMO
        found = {"protocol": described, "samples": self.samples.describe()}
        if job:
            found["reference"] = job.reference.describe()
            found["extractor"] = job.network and job.network.identity
            found["metrics"] = list(job.metrics)
        if recipe := RECIPE.describe():
            found["recipe"] = recipe
        if self.pairs:
            found |= {
                "full": self.pairs.full.describe(),
                "paired_metrics": list(self.pairs.metrics),
            }
            found["ssim"] = "torchmetrics: Gaussian window of 11, sigma 1.5, mirrored edges, 0..1"
            found["psnr"] = "mean over pictures that are not identical, 0..1"
            if self.pairs.network:
                found["lpips"] = self.pairs.network.identity
        return found | {"batch_size": self.batch_size, "mesh": str(self.mesh)}


def resolve() -> Evaluation:
    """Check every flag and every file. Compile and write nothing."""
    _check_features()
    asked, mesh = _asked(), _mesh()
    if not (REFERENCE.value or FULL.value):
        raise UserError(
            "there is nothing to compare with: give --reference=DIR_OR_NPZ (FID and others) or"
            " --full=DIR (PSNR and others)"
        )
    _check_used(asked)
    if STATISTICS.value:
        check_new_file(STATISTICS.value, overwrite=False, flag="--save_statistics")
    fit = None if FULL.value else _fit()  # pairs are compared as they are
    samples = inputs.open_set("--samples", SAMPLES.value, fit)
    of_recipe = _recipe_remarks(samples)
    comparison = _comparison(samples, asked) if REFERENCE.value else None
    paired = _pairs(samples, asked) if FULL.value else None
    parts = [part.remarks for part in (comparison, paired) if part]
    remarks = tuple(dict.fromkeys(remark for found in (*parts, of_recipe) for remark in found))
    batch_size = BATCH_SIZE.value or extractors.usual_batch(mesh.data)
    return Evaluation(samples, comparison, paired, batch_size, mesh, remarks)


def _recipe_remarks(samples: PictureSet) -> list[str]:
    """Return what to know about the recipe, if there is one; `UserError` unless the samples are the
    pictures that it takes."""
    if (recipe := RECIPE.recipe) is None:
        return []
    if samples.pictures is not None:
        recipe.check_samples(samples.where, samples.pictures.count, samples.labels)
    return RECIPE.remarks(recipe.report_remarks(samples.report))


def _asked() -> tuple[str, ...]:
    """Return the metrics that --metrics names, in the order of `protocols.METRICS`."""
    names = METRICS.value or []
    with about(METRICS):
        for name in names:
            choose("metric", name, protocols.METRICS)
    mine = FEATURES.value
    for name in names:
        other = [whose for whose, held in protocols.BY_FEATURES.items() if name in held]
        if other and mine not in other:
            raise UserError(
                f"{name} is of --features={other[0]}: --features={mine} gives"
                f" {', '.join(protocols.BY_FEATURES[mine])}"
            )
        if name in PAIRED and not FULL.value:
            raise UserError(f"{name} compares pictures one by one: give --full=DIR")
        if name not in PAIRED and not REFERENCE.value:
            raise UserError(f"{name} compares with a reference set: give --reference=DIR_OR_NPZ")
    if "lpips" in names and not LPIPS.value:
        raise UserError(f"lpips needs --lpips=DIR: {extractors.WHERE_LPIPS}")
    return tuple(name for name in protocols.METRICS if name in names)


def _mesh() -> MeshSpec:
    """Return the devices that pictures are split over: of many processes all."""
    available, many = len(jax.devices()), processes.count() > 1
    with about(MESH):
        mesh = MeshSpec.parse(MESH.value or ("data=-1" if many else None), available)
        if mesh.model > 1:
            raise UserError("networks of evaluation are not divided: use data alone")
        batch, where = BATCH_SIZE.value or mesh.data, processes.where()
        mesh.check(batch_size=batch, num_heads=1, available=available, where=where)
        if many and mesh.data < available:
            raise UserError(f"{mesh} leaves out devices of {where}: use all, as with data=-1")
    return mesh


def _comparison(samples: PictureSet, asked: tuple[str, ...]) -> Comparison | None:
    wanted = tuple(name for name in asked if name not in PAIRED)
    if asked and not wanted:
        raise UserError(f"--reference is given, but none of --metrics={','.join(asked)} uses it")
    reference = inputs.open_set("--reference", REFERENCE.value, _fit())
    protocol = PROTOCOLS[PROTOCOL.value]
    network, name, folder = None, PROTOCOL.value, INCEPTION.value
    metrics = protocol.metrics
    if FEATURES.value == DEMO:
        name, folder, metrics = DEMO, CLASSIFIER.value, protocols.BY_FEATURES[DEMO]
    if folder or name == DEMO:  # files of statistics are compared without one
        network = extractors.EXTRACTORS[FEATURES.value](folder, protocol.preparation)
    return sets.compare(
        samples,
        reference,
        network,
        wanted or metrics,
        asked=bool(wanted),
        split_size=SPLIT_SIZE.value,
        protocol=name,
    )


def _fit() -> Fit | None:
    """Return what the protocol does with pictures of several sizes; None: it takes none."""
    return None if FEATURES.value == DEMO else PROTOCOLS[PROTOCOL.value].fit


def _check_features() -> None:
    """Refuse flags that belong to other features than --features, and recipes with other features
    than Inception's, which all recipes take."""
    if RECIPE.recipe and FEATURES.value == DEMO:
        raise UserError(
            f"recipe {RECIPE.recipe.name} is of --features=inception, --features={DEMO} is asked"
            " for: leave out one of them"
        )
    theirs = (CLASSIFIER,) if FEATURES.value != DEMO else (PROTOCOL, SPLIT_SIZE, INCEPTION)
    for holder in theirs:
        if holder.present:
            other = "inception" if FEATURES.value == DEMO else DEMO
            raise UserError(
                f"--{holder.name} belongs to --features={other}, --features={FEATURES.value} is"
                " asked for: leave out one of them"
            )


def _check_used(asked: tuple[str, ...]) -> None:
    """Refuse flags that nothing which is asked for uses."""
    if not REFERENCE.value:
        for holder in (INCEPTION, CLASSIFIER, STATISTICS):
            if holder.value:
                raise UserError(
                    f"--{holder.name} serves comparisons with a reference set: give"
                    f" --reference=DIR_OR_NPZ, or leave out --{holder.name}"
                )
    if LPIPS.value and not FULL.value:
        raise UserError("--lpips compares pictures one by one: give --full=DIR, or leave it out")
    if LPIPS.value and asked and "lpips" not in asked:
        raise UserError(f"--lpips is given, but none of --metrics={','.join(asked)} uses it")


def _pairs(samples: PictureSet, asked: tuple[str, ...]) -> Pairs:
    wanted = tuple(name for name in asked if name in PAIRED)
    if asked and not wanted:
        raise UserError(f"--full is given, but none of --metrics={','.join(asked)} uses it")
    wanted = wanted or PAIRED[: 3 if LPIPS.value else 2]
    network = extractors.open_lpips(LPIPS.value) if "lpips" in wanted else None
    return pairs.pair(samples, inputs.open_set("--full", FULL.value), wanted, network)


def compute(job: Evaluation, store: BatchStore, stop: Stop) -> bool:
    """Compute everything that is missing. Return whether all is done; not so if `stop` was asked
    meanwhile."""
    done = True
    if sides := job.comparison:
        program = functools.cache(partial(job.program, sides.network))
        for name, side in sides.sides.items():
            if done and (wanted := sides.wanted[name]):
                done = features.extract(store, name, side.pictures, wanted, program, stop)
    if done and job.pairs:
        program = partial(job.program, job.pairs.network)
        done = pairs.compute(job.pairs, store, program, job.batch_size, stop)
    return done


def measured(job: Evaluation, store: BatchStore) -> dict:
    """Write the results from what is computed; return what metrics.json says."""
    found: dict = {}
    per_image = None
    if job.pairs:
        found, per_image = pairs.measure(job.pairs, store)
    if sides := job.comparison:
        found |= sets.measure(sides, store)
        if STATISTICS.value:
            sets.save_statistics(pathlib.Path(STATISTICS.value), sides, store)
    recipe = job.recipe() | environment(scipy)
    content = {**found, "remarks": list(job.remarks), "recipe": recipe}
    results.write(store, content, per_image)
    return content


def main(argv: list[str]) -> None:
    DISTRIBUTED.start()
    job = DISTRIBUTED.resolve(resolve)
    if processes.is_first():
        print(*job.remarks, sep="\n", file=sys.stderr)
    stem = f"evaluate-{DEMO if FEATURES.value == DEMO else PROTOCOL.value}"
    store = OUT.open(stem, job.describe(), job.series())
    try:
        make(job, store)
    except Stopped as stopped:
        say_stopped(stopped)


def make(job: Evaluation, store: BatchStore) -> None:
    """Compute everything, alone or with other processes, and write the results. `Stopped` if the
    system asks to end meanwhile."""
    with store.working():
        with Stop() as stop:
            done = compute(job, store, stop)
        if not done:
            counts = [(store.finished(name), made.count) for name, made in store.series.items()]
            raise Stopped(*map(sum, zip(*counts, strict=True)), "pictures")
        with processes.together():
            if processes.is_first():
                print(results.summary(measured(job, store), store.out))


if __name__ == "__main__":
    command_line.run(main)
