"""Reproduce a published table: make all of its rows, and print its figures beside ours.

    python -m experiments.reproduce --recipe=amskv-table3 --checkpoint=DIR \\
        --reference=VIRTUAL_imagenet256_labeled.npz --inception=DIR --out=OUT
    python -m experiments.reproduce --recipe=heatkv-coco --checkpoint=DIR --inception=DIR \\
        --lpips=DIR --prompts=captions_val2017.json --rows=1,2 --out=OUT
    python -m experiments.reproduce --recipe=learned-demo --out=OUT

Every row is drawn by experiments.run and judged by experiments.evaluate, in a folder of its own in
--out; rows about closeness to the full cache by the table's row of the full cache. A recipe of
steps runs commands of varjax one after the other. What is finished is not made again: after an
interruption, or SIGTERM, the same command continues. --shard draws a part of every row; without it,
later, the parts are joined and judged.

Prints published | ours | interval of every row, and writes it to OUT/table.md. The interval of a
mean over pictures is one of 95 % (bootstrap); figures of a whole set (FID and others) have none.
"""

import contextlib
import gc
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import __main__ as overview
from experiments.batch_files import PART
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from experiments.evaluation.extractors import WHERE_INCEPTION, WHERE_LPIPS
from experiments.evaluation.protocols import BY_FEATURES
from experiments.json_text import json_text
from experiments.output import REPORTS, RESULTS, say
from experiments.parts import ShardFlag, parts_in
from experiments.recipes import recipe as recipes
from experiments.recipes.recipe import Recipe
from experiments.sweep import intervals
from varjax.core.errors import UserError
from varjax.models.loading import describe
from varjax.models.registry import found as found_model
from varjax.storage import npz
from varjax.storage.atomic import check_place, write_text
from varjax.storage.manifest import read_json

RECORD, TABLE = "recipe.json", "table.md"  # in --out: what it was begun with; the result
HEAD = ("row", "metric", "published", "ours", "interval")
LABELS = {"is": "IS", "fid": "FID", "sfid": "sFID", "kl": "KL", "precision": "precision"}
LABELS |= {"recall": "recall", "psnr": "PSNR", "ssim": "SSIM", "lpips": "LPIPS"}
WHERE = {  # files in the working folder that rows name
    "ORDERS.json": "HeatKV's order lists, of github.com/arm-research/heatkv, or a calibration",
    "CAL.json": "python -m experiments.calibrate --save=CAL.json measures it",
    "BUDGETS.json": "a budget file of github.com/StargazerX0/ScaleKV",
}

FLAGS = CommandFlags(
    "--recipe=learned-demo --dry_run", "recipe checkpoint reference inception rows out dry_run"
)
RECIPE = FLAGS.string("recipe", None, f"The table: {', '.join(recipes.names())}.", required=True)
CHECKPOINT = FLAGS.string("checkpoint", None, "Checkpoint of a model of the table.")
PROMPTS = FLAGS.string("prompts", None, "The table's prompts, for every row.")
REFERENCE = FLAGS.string("reference", None, "Pictures or statistics of the table's reference.")
INCEPTION = FLAGS.string("inception", None, "Folder of the converted network of FID.")
LPIPS = FLAGS.string("lpips", None, "Folder of a converted LPIPS network.")
RUN = FLAGS.string("run", "", "Further flags of every run: --run='--batch_size=64 --seed=1'.")
ROWS = FLAGS.list("rows", None, "Only these rows, by their numbers from 1 on: 1,3.")
SHARD = ShardFlag(FLAGS, "images of every row")
DRY_RUN = FLAGS.boolean("dry_run", False, "Print the commands; run none.")
OUT = FLAGS.string("out", None, "Folder of all results; default: results/RECIPE.")
OWN = frozenset(
    "recipe checkpoint prompts shard policy policy_args budget out dry_run help".split()
)
DRAWN, JUDGED = (CHECKPOINT, PROMPTS, RUN), (REFERENCE, INCEPTION, LPIPS)


@dataclass(frozen=True)
class Step:
    """A command of varjax, which writes `out`."""

    command: str
    arguments: Sequence[str]
    out: Path

    @property
    def is_finished(self) -> bool:
        """Whether the results are there, or those of this --shard."""
        names = [*REPORTS]
        if shard := SHARD.shard:
            names.append(f"part-{shard.index}-of-{shard.count}/{PART}")
        return self.out.is_file() or any((self.out / name).is_file() for name in names)

    def line(self) -> str:
        return f"python -m experiments.{self.command} {shlex.join(self.arguments)}"

    def run(self) -> int:
        """Run the command here, and return its status. Standard output is the table's."""
        say(self.line())
        module = overview.imported(f"experiments.{self.command}")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                command_line.run(module.main, [self.command, *self.arguments])
        except SystemExit as ended:
            gc.collect()  # weights on the device
            return int(ended.code or 0)


def steps_of(recipe: Recipe, out: Path) -> Iterator[Step]:
    """Yield the steps of a recipe that lists them; else what draws and judges the chosen rows."""
    for text in recipe.content.get("steps", ()):
        command, *given = shlex.split(text.replace("{out}", shlex.quote(str(out))))
        yield Step(command, given, Path(given[-1].removeprefix("--out=")))
    for row in chosen(recipe) if "rows" in recipe.content else ():
        yield from steps_of_row(recipe, row, folders(recipe, out))


def steps_of_row(recipe: Recipe, row: str, places: dict[str, Path]) -> Iterator[Step]:
    """Yield what draws and judges a row. places: folders of all rows."""
    full, shard, flags = full_row(recipe), SHARD.shard, recipe.content["rows"][row]
    samples, metrics = places[row] / "samples", places[row] / "metrics"
    given = {"recipe": recipe.name, "checkpoint": CHECKPOINT.value, "prompts": PROMPTS.value}
    given["shard"] = shard and f"{shard.index}/{shard.count}"
    own = [*_flags(given), *shlex.split(f"{RUN.value} {flags}"), f"--out={samples}"]
    yield Step("run", own, samples)
    if recipe.content["evaluate"] and not shard and row != full:
        theirs = full and places[full] / "samples"
        given = {"recipe": recipe.name, "samples": samples, "full": theirs}
        given |= {holder.name: holder.value for holder in JUDGED}
        if "fid" in metrics_of(recipe):
            given["reference"] = REFERENCE.value or theirs
        yield Step("evaluate", _flags(given | {"out": metrics}), metrics)


def _flags(given: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items() if value]


def folders(recipe: Recipe, out: Path) -> dict[str, Path]:
    words = lambda row: re.sub(r"\W+", "-", row).strip("-").lower()  # noqa: E731
    return {row: out / f"{i:02d}-{words(row)}" for i, row in enumerate(recipe.content["rows"], 1)}


def metrics_of(recipe: Recipe) -> list[str]:
    """Return the metrics that `evaluate` computes; none of tables with scorers of their own."""
    judged = recipe.content["evaluate"]
    return judged["metrics"].split(",") if judged else []


def full_row(recipe: Recipe) -> str | None:
    """Return the row that the others are compared with; None: the table has a reference set."""
    if {"psnr", "ssim", "lpips"}.isdisjoint(metrics_of(recipe)):
        return None
    return next(row for row, flags in recipe.content["rows"].items() if flags == "--policy=full")


def chosen(recipe: Recipe) -> list[str]:
    """Return the rows of --rows, after the one that they are compared with."""
    rows = {str(number): row for number, row in enumerate(recipe.content["rows"], 1)}
    found = [full] if (full := full_row(recipe)) else []
    for number in ROWS.value or rows:
        if number not in rows:
            raise UserError(f"--rows={number}: recipe {recipe.name} has rows 1 to {len(rows)}")
        found.append(rows[number])
    return list(dict.fromkeys(found))


def lacking(recipe: Recipe) -> list[str]:
    """Return what the rows need and nobody gave, each with where it is to be had."""
    what, metrics = recipe.content["images"].get("what"), set(metrics_of(recipe))
    texts = PROMPTS.value or re.search("--(text_features|prompt_ids)", RUN.value)
    lacks = [f"--prompts=FILE ({what})"] if what and not texts else []
    flags = " ".join(recipe.content["rows"][row] for row in chosen(recipe))
    files = [name for name in WHERE if name in flags and not Path(name).is_file()]
    lacks += [f"{name} in the working folder ({WHERE[name]})" for name in files]
    if SHARD.shard:
        return lacks
    if not metrics.isdisjoint(BY_FEATURES["inception"]):
        if not REFERENCE.value and not full_row(recipe):
            lacks.append(f"--reference=FILE ({recipe.content['reference']})")
        lacks += [] if INCEPTION.value else [f"--inception=DIR ({WHERE_INCEPTION})"]
    return lacks + [f"--lpips=DIR ({WHERE_LPIPS})"] * ("lpips" in metrics and not LPIPS.value)


def figures(recipe: Recipe, out: Path) -> Iterator[tuple[str, str, object, Sequence[float]]]:
    """Yield (row, metric, our figure or None, ends of its interval, if it has one)."""
    for step in steps_of(recipe, out) if "steps" in recipe.content else ():
        file = step.out / "sweep.json"
        for cell in read_json(file)["cells"] if file.is_file() else ():
            close, row = cell.get("fidelity"), f"{step.out.name}: {cell['label']}"
            for key in ("kl", "psnr") if close else ():
                ends = [close[f"{key}_{e}"] for e in ("low", "high") if f"{key}_{e}" in close]
                yield f"{row}, {cell['budget']:g}", key, close[key], ends
    for row, folder in folders(recipe, out).items() if "rows" in recipe.content else ():
        file, pictures = folder / "metrics" / "metrics.json", folder / "samples" / "images"
        found = read_json(file) if file.is_file() else {}
        for key in metrics_of(recipe):
            value = found.get("inception_score" if key == "is" else key)
            yield row, key, value, interval(file.with_name("per_image.npz"), key)
        if scorer := recipe.content.get("scorer"):
            yield row, scorer, str(pictures) if pictures.is_dir() else None, ()


def interval(file: Path, key: str) -> Sequence[float]:
    """Return the interval of a mean over the pictures of an evaluation, if it is known."""
    values = np.zeros(0)
    if file.is_file():
        values = npz.load(file, [key]).get(key, values).astype(np.float64)
    values = values[np.isfinite(values)]  # PSNR leaves out equal pictures
    return intervals.bootstrap(values[None])[0] if len(values) > 1 else ()


def table(recipe: Recipe, out: Path) -> str:
    """Return the table of all that is there, and what was published besides."""
    rows = "rows" in recipe.content
    model = recipe.name_of(describe(found_model(CHECKPOINT.value))) if rows else None
    lines, rest = [HEAD, ("---",) * len(HEAD)], dict(recipe.content["published"])
    for row, key, value, ends in figures(recipe, out):
        known = recipe.published(row, model).get(LABELS.get(key, key), "-")
        ours = "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"
        between = f"[{', '.join(f'{end:.4g}' for end in ends)}]" if len(ends) else "-"
        lines.append((row, LABELS.get(key, key), known, ours, between))
        if key in LABELS:
            rest.pop(row, None)
    shown = [f"| {' | '.join(cells)} |" for cells in lines]
    notes = [f"- published, {name}: {text}" for name, text in rest.items()]
    return "\n".join([recipe.content["title"], "", *shown, "", *notes]).rstrip()


def resolve() -> tuple[Recipe, list[Step], Path]:
    """Check the flags. Run and write nothing."""
    recipe = recipes.load(RECIPE.value)
    out = check_place(OUT.value or RESULTS / recipe.name, flag="--out")
    if "steps" in recipe.content:
        given = [f"--{h.name}" for h in (*DRAWN, *JUDGED, ROWS) if h.present]
        if given or SHARD.shard:
            said = (*given, "--shard")[0]
            raise UserError(f"{said}: the steps of {recipe.name} say what is done: leave it out")
        return recipe, list(steps_of(recipe, out)), out
    recipe.check_model(describe(found_model(CHECKPOINT.value)))
    try:
        given = [word.partition("=")[0].lstrip("-") for word in shlex.split(RUN.value)]
    except ValueError as error:
        raise UserError(f"--run={RUN.value:.60}: {error}") from None
    if own := sorted(set(given) & OWN):
        raise UserError(f"--run={RUN.value:.60}: --{own[0]} is said by the recipe or this command")
    steps = list(steps_of(recipe, out))
    lacks = lacking(recipe)
    if not CHECKPOINT.value:  # the demo would be drawn beside the table's figures
        lacks.append(f"--checkpoint=DIR ({', '.join(recipe.content['models'])})")
    if lacks:
        said = f"recipe {recipe.name} needs {'; '.join(lacks)}"
        if not DRY_RUN.value:
            raise UserError(said)
        say(said)
    for holder in () if DRY_RUN.value else JUDGED:
        if holder.value and not Path(holder.value).exists():
            raise UserError(f"--{holder.name}={holder.value}: there is no such file or folder")
    return recipe, steps, out


def claim(recipe: Recipe, out: Path) -> None:
    """Make the folder, and write down what it is of. `UserError` if it is of something else."""
    mine, before = {"recipe": recipe.name} | {h.name: h.value for h in DRAWN}, {}
    mine |= {h.name: h.value for h in JUDGED if h.value}  # a part is drawn without them
    if out.is_dir() and any(out.iterdir()):
        before = read_json(out / RECORD) if (out / RECORD).is_file() else None
        if not isinstance(before, dict) or "recipe" not in before:
            raise UserError(f"{out} holds other things than rows of a recipe: choose another --out")
        for name in mine:
            if mine[name] != (was := before.get(name, mine[name])):
                said = f"was begun with --{name}={was}" if was else f"was begun without --{name}"
                raise UserError(f"{out} {said}: give the same, or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RECORD, json_text(before | mine))


def main(argv: list[str]) -> int:
    recipe, steps, out = resolve()
    if DRY_RUN.value:
        print(*(step.line() for step in steps), sep="\n")
        return 0
    claim(recipe, out)
    status = 0
    for step in steps:
        if step.is_finished:
            say(f"{step.out} is there already")
            continue
        if step.command == "run" and not SHARD.shard and parts_in(step.out):
            step = Step("merge", [f"--out={step.out}"], step.out)
        if (status := step.run()) or not step.is_finished:
            say(f"recipe {recipe.name} is not finished: the same command continues")
            break
    if not SHARD.shard:
        text = table(recipe, out)
        write_text(out / TABLE, f"{text}\n")
        print(f"{text}\nwritten to {out / TABLE}")
    return status


if __name__ == "__main__":
    command_line.run(main)
