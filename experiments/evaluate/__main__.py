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
pictures are resized; numbers of different protocols are not comparable.

Writes metrics.json, which says how everything was computed, and for --full also per_image.npz, into
--out (default: a new folder under results/). An interrupted evaluation started again with the same
flags continues where it stopped; SIGTERM ends it after the pictures in work, with status 0. With
--distributed many processes share the pictures.
"""

import functools
import math
import pathlib
import sys
from dataclasses import dataclass

import jax
import numpy as np
import scipy

from experiments import processes
from experiments.batch_files import Series
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags, about
from experiments.evaluate import inputs, pairs, sets
from experiments.evaluate.inputs import PictureSet
from experiments.evaluate.pairs import Pairs
from experiments.evaluate.sets import Comparison
from experiments.evaluation import extractors, protocols, references
from experiments.evaluation.extractors import CompiledNetwork
from experiments.evaluation.protocols import PROTOCOLS
from experiments.flags.distributed import DistributedFlag
from experiments.generation import aligned, environment
from experiments.json_text import json_safe, json_text
from experiments.output import BatchStore, FolderFlags
from experiments.recipes.recipe import RecipeFlag
from varjax.core import arguments
from varjax.core.errors import UserError, choose
from varjax.generation import hosts
from varjax.generation.mesh import MeshSpec
from varjax.storage.atomic import check_new_file, new_folder, write_text

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
SAMPLES = FLAGS.string(
    "samples", None, "Pictures to judge: a folder or an npz file.", required=True
)
REFERENCE = FLAGS.string("reference", None, "Pictures or statistics that they should be like.")
FULL = FLAGS.string("full", None, "The same pictures of the full cache, compared one by one.")
PROTOCOL = FLAGS.enum("protocol", "adm", list(PROTOCOLS), "How pictures are resized.")
SPLIT_SIZE = FLAGS.integer(
    "split_size", protocols.SPLIT_SIZE, "Pictures of a block of the Inception score.", lower_bound=1
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
    list(protocols.BY_FEATURES),
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
FLAGS_OF = {"inception": (PROTOCOL, SPLIT_SIZE, INCEPTION), DEMO: (CLASSIFIER,)}
AS_SETS = REFERENCE, "serves comparisons with a reference set: give --reference=DIR_OR_NPZ"
ONE_BY_ONE = FULL, "compares pictures one by one: give --full=DIR"


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
        # pictures whose features are in one file: whole batches
        size = self.batch_size * math.ceil(sets.LEAST_CHUNK / self.batch_size)
        if job := self.comparison:
            found = {n: Series(job.sides[n].pictures.count, size) for n in job.wanted}
        if self.pairs:
            found["pairs"] = Series(self.samples.pictures.count, size)
        return found

    def describe(self) -> dict:
        """Return what decides the results. Paths of files do not."""
        recipe = json_safe({"command": "evaluate", **self.recipe()})
        for side in ("samples", "reference", "full"):
            recipe.get(side, {}).pop("given", None)
        return {n: value for n, value in recipe.items() if n not in ("batch_size", "mesh")}

    def recipe(self) -> dict:
        """Return how everything is computed, for metrics.json."""
        protocol = PROTOCOLS[PROTOCOL.value].describe(SPLIT_SIZE.value)
        protocol = {"name": PROTOCOL.value, **protocol}
        found = {"protocol": protocols.DEMO if FEATURES.value == DEMO else protocol}
        found["samples"] = self.samples.describe()
        if job := self.comparison:
            found["reference"] = job.sides["reference"].describe()
            found["extractor"] = job.network and job.network.identity
            found["metrics"] = list(job.metrics)
        if recipe := RECIPE.describe():
            found["recipe"] = recipe
        if self.pairs:
            found["full"] = self.pairs.full.describe()
            found["paired_metrics"] = list(self.pairs.metrics)
            found["ssim"] = "torchmetrics: Gaussian window of 11, sigma 1.5, mirrored edges, 0..1"
            found["psnr"] = "mean over pictures that are not identical, 0..1"
            if self.pairs.network:
                found["lpips"] = self.pairs.network.identity
        return found | {"batch_size": self.batch_size, "mesh": str(self.mesh)}


def resolve() -> Evaluation:
    """Check every flag and every file. Compile and write nothing."""
    of_sets, of_pairs = _asked()
    mesh = _mesh()
    if STATISTICS.value:
        check_new_file(STATISTICS.value, overwrite=False, flag="--save_statistics")
    is_demo, protocol = FEATURES.value == DEMO, PROTOCOLS[PROTOCOL.value]
    fit = None if is_demo else protocol.fit  # pairs are compared as they are
    samples = inputs.open_set("--samples", SAMPLES.value, None if FULL.value else fit)
    of_recipe: list[str] = []
    if recipe := RECIPE.recipe:
        if samples.pictures is not None:
            recipe.check_samples(samples.where, samples.pictures.count, samples.labels)
        of_recipe = RECIPE.remarks(recipe.report_remarks(samples.report))
    comparison = paired = None
    remarks: list[str] = []
    if REFERENCE.value:
        reference = inputs.open_set("--reference", REFERENCE.value, fit)
        network = None  # files of statistics are compared without one
        if is_demo:
            network = extractors.open_classifier(CLASSIFIER.value)
        elif INCEPTION.value:
            network = extractors.open_inception(INCEPTION.value, protocol)
        comparison = sets.compare(
            {"samples": samples, "reference": reference},
            network,
            of_sets or (protocols.BY_FEATURES[DEMO] if is_demo else protocol.metrics),
            asked=bool(of_sets),
            split_size=SPLIT_SIZE.value,
            protocol=DEMO if is_demo else PROTOCOL.value,
        )
        remarks += comparison.remarks
    if FULL.value:
        wanted = of_pairs or PAIRED[: 3 if LPIPS.value else 2]
        lpips = extractors.open_lpips(LPIPS.value) if "lpips" in wanted else None
        paired = pairs.pair(samples, inputs.open_set("--full", FULL.value), wanted, lpips)
        remarks += paired.remarks
    on_cpu = jax.default_backend() == "cpu"
    usual = extractors.CPU_BATCH if on_cpu else extractors.USUAL_BATCH
    batch_size = BATCH_SIZE.value or usual * mesh.data
    return Evaluation(
        samples, comparison, paired, batch_size, mesh, tuple(dict.fromkeys(remarks + of_recipe))
    )


def _asked() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the metrics of --metrics, those of sets and those of pairs. `UserError` for flags that
    contradict each other, and for those that nothing uses."""
    mine, names = FEATURES.value, METRICS.value or []
    other = "inception" if mine == DEMO else DEMO
    theirs = [f"--{holder.name}" for holder in FLAGS_OF[other] if holder.present]
    if RECIPE.recipe and mine == DEMO:
        theirs.append(f"recipe {RECIPE.recipe.name}")
    if theirs:
        raise UserError(
            f"{theirs[0]} belongs to --features={other}, --features={mine} is asked for: leave out"
            " one of them"
        )
    if not (REFERENCE.value or FULL.value):
        raise UserError(
            "there is nothing to compare with: give --reference=DIR_OR_NPZ (FID and others) or"
            " --full=DIR (PSNR and others)"
        )
    for name in names:
        with about(METRICS):
            choose("metric", name, protocols.METRICS)
        if name in protocols.BY_FEATURES[other]:
            raise UserError(
                f"{name} is of --features={other}: --features={mine} gives"
                f" {', '.join(protocols.BY_FEATURES[mine])}"
            )
    if "lpips" in names and FULL.value and not LPIPS.value:
        raise UserError(f"lpips needs --lpips=DIR: {extractors.WHERE_LPIPS}")
    given = [(name, ONE_BY_ONE if name in PAIRED else AS_SETS) for name in names]
    given += [(f"--{h.name}", AS_SETS) for h in (INCEPTION, CLASSIFIER, STATISTICS) if h.value]
    given += [("--lpips", ONE_BY_ONE)] * bool(LPIPS.value)
    for what, (needed, advice) in given:
        if not needed.value:
            raise UserError(f"{what} {advice}, or leave it out")
    of_pairs, of_sets = (
        tuple(name for name in protocols.METRICS if name in names and (name in PAIRED) == paired)
        for paired in (True, False)
    )
    used = ((REFERENCE, of_sets), (FULL, of_pairs), (LPIPS, "lpips" in names))
    if unused := [h.name for h, metrics in used if names and h.value and not metrics]:
        raise UserError(
            f"--{unused[0]} is given, but none of --metrics={','.join(names)} uses it: name one"
            " that does, or leave it out"
        )
    return of_sets, of_pairs


def _mesh() -> MeshSpec:
    """Return the devices that pictures are split over: of many processes all."""
    available, many = len(jax.devices()), hosts.count() > 1
    with about(MESH):
        mesh = MeshSpec.parse(MESH.value or ("data=-1" if many else None), available)
        if mesh.model > 1:
            raise UserError("networks of evaluation are not divided: use data alone")
        batch, where = BATCH_SIZE.value or mesh.data, hosts.where()
        mesh.check(batch_size=batch, num_heads=1, available=available, where=where)
        if many and mesh.data < available:
            raise UserError(f"{mesh} leaves out devices of {where}: use all, as with data=-1")
    return mesh


def compute(job: Evaluation, store: BatchStore, stop: processes.Stop) -> None:
    """Compute everything that is missing. `Stopped` if `stop` was asked meanwhile."""
    make = lambda network, size: CompiledNetwork(network, size, job.batch_size, job.mesh)  # noqa: E731
    program = functools.cache(make)  # of a network for pictures of a size
    for name in store.series:
        if store.missing(name):
            if name == "pairs":
                pairs.compute(job.pairs, store, program, job.batch_size, stop)
            else:
                sets.extract(job.comparison, name, store, program, stop)


def write_metrics(job: Evaluation, store: BatchStore) -> None:
    """Write metrics.json and per_image.npz from what is computed, and print the summary."""
    found: dict = {}
    per_image = None
    if job.pairs:
        found, per_image = pairs.measure(job.pairs, store)
    if job.comparison:
        figures, summaries = sets.measure(job.comparison, store)
        found |= figures
        if STATISTICS.value:
            file = pathlib.Path(STATISTICS.value)
            references.write_statistics(file, summaries, job.comparison.notes)
    recipe = job.recipe() | environment(scipy)
    files = ["metrics.json", *(["per_image.npz"] if per_image is not None else [])]
    content = {**found, "remarks": list(job.remarks), "recipe": recipe, "files": files}
    with new_folder(store.out, replaces=store.replaces) as out:
        if per_image is not None:
            np.savez(out / "per_image.npz", **per_image)
        write_text(out / "metrics.json", json_text(content))
    store.close()
    numbers = {key: value for key, value in found.items() if np.ndim(value) == 0}
    rows = [(key, f"{value:.6g}") for key, value in numbers.items()]
    rows += [("protocol", recipe["protocol"]["name"]), ("written to", str(store.out))]
    print(aligned(rows), *(f"note: {remark}" for remark in job.remarks), sep="\n")


def main(argv: list[str]) -> None:
    job = DISTRIBUTED.resolve(resolve)
    if hosts.is_first():
        print(*job.remarks, sep="\n", file=sys.stderr)
    stem = f"evaluate-{DEMO if FEATURES.value == DEMO else PROTOCOL.value}"
    store = OUT.open(stem, job.describe(), job.series())
    with store.working():
        with processes.Stop() as stop:
            compute(job, store, stop)
        with processes.together():
            if hosts.is_first():
                write_metrics(job, store)


if __name__ == "__main__":
    command_line.run(main)
