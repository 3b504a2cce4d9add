"""Recipes: the published settings of tables in papers, as data files in this folder. The flag
--recipe makes the settings of a recipe the defaults of a command's other flags.

    title, source     what the recipe is, and where its settings are published
    models            published names that the table is about, all of one family
    run, evaluate     {flag: value} of the two commands; without `evaluate` there is a `scorer`
    images            count; of classes: per_class, classes; of prompts: what
    batch             as published; results do not depend on it
    reference         what `evaluate` compares with
    rows              {row of the table: flags of `run` that make it}
    published         {row: what the paper prints, as "FID 2.07, IS 336.15", or {model: that}}, and
                      under other names what is no row's
    unknown           what the source leaves open, and what differs here

A recipe may list `steps` in place of run, evaluate, images, reference and rows: commands of varjax
that `experiments.reproduce` runs one after the other, each with --out={out}/NAME. Its rows are
"FOLDER OF A SWEEP: POLICY, BUDGET".
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from experiments.cli.flags import CommandFlags
from varjax.core import errors
from varjax.core.errors import UserError, choose
from varjax.models import registry
from varjax.models.model import Model

FOLDER = Path(__file__).parent
DOCS = "docs/howto/reproduce.md"
# Flags that decide what is drawn or measured, besides counts of pictures, which are checked. If a
# recipe does not name one of them and the user gives it, the report has to say so.
DECIDING = {
    "run": """
        cfg tau cfg_insertion_layer cfg_interval top_k top_p greedy more_smooth resize aspect size
        negative_prompts given_tokens given_bits given_scales
        dtype kv_dtype matmul_precision decode_dtype
    """.split(),
    "evaluate": ["protocol", "metrics", "split_size"],
}


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def load(name: str) -> "Recipe":
    """Return a recipe; `UserError` with the names of all recipes if it does not exist."""
    path = FOLDER / f"{choose('recipe', name, names())}.json"
    return Recipe(name, json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Recipe:
    """A recipe by its name. content: of its data file."""

    name: str
    content: Mapping

    def flags(self, command: str) -> Mapping[str, object]:
        """Return {flag: value} for the command "run" or "evaluate". `UserError` if another program
        computes the figures of the table."""
        if "steps" in self.content:
            advice = f"python -m experiments.reproduce --recipe={self.name}"
            raise UserError(f"recipe {self.name} is one of steps: `{advice}` runs them")
        if (found := self.content[command]) is None:
            raise UserError(
                f"recipe {self.name} is scored by {self.content['scorer']}'s own program on the"
                f" folder `images` of a run: see {DOCS}"
            )
        return found

    def check_model(self, model: Model) -> None:
        """Raise `UserError` for a model of another family, which has other flags."""
        preset = registry.preset(self.content["models"][0])
        condition = preset.configs["transformer"].condition
        if (model.family.name, model.condition) != (preset.family, condition):
            raise UserError(
                f"recipe {self.name} is of {', '.join(self.content['models'])}; {model.name} is a"
                f" model of the family {model.family.name} that draws from {model.condition}: give"
                " one of those, or another recipe"
            )

    def remarks(self, model: Model, count: int | None) -> list[str]:
        """Return remarks if the model is none of the table's, and if a run draws another number of
        pictures than the recipe says. count: of the pictures; None: not known."""
        known = [registry.preset(name).configs["transformer"] for name in self.content["models"]]
        images, found = self.content["images"], []
        if model.config not in known:
            listed = ", ".join(self.content["models"])
            found.append(f"recipe {self.name} is of {listed}, which {model.name} is not")
        if "per_class" in images:
            wanted = images["per_class"] * model.num_classes
            said = f"{images['per_class']} pictures of each class, {wanted} in all"
        else:
            wanted = images["count"]
            said = f"{wanted} pictures ({images['what']})"
        if count not in (None, wanted):
            found.append(f"recipe {self.name} takes {said}; this run draws {count}")
        return found

    def name_of(self, model: Model) -> str | None:
        """Return which of the table's models a model is, by its sizes."""
        presets = {name: registry.preset(name) for name in self.content["models"]}
        fits = [n for n, p in presets.items() if p.configs["transformer"] == model.config]
        return fits[0] if fits else None

    def published(self, row: str, model: str | None = None) -> dict[str, str]:
        """Return {name of a metric: figure} that the source prints for a row."""
        text = self.content["published"].get(row, "")
        text = text.get(model, "") if isinstance(text, Mapping) else text
        return dict(re.findall(r"(\w+) (\d+(?:\.\d+)?)(?![\w.])", text))

    def check_samples(self, where: str, count: int, labels: np.ndarray | None) -> None:
        """Raise `UserError` unless a set has the recipe's pictures, in all and of each class."""
        images = self.content["images"]
        each, said = images.get("per_class"), ""
        if labels is not None and each:
            found, counts = np.unique(labels, return_counts=True)
            if (counts != each).any() or len(found) != images["classes"]:
                said = f" ({len(found)} classes, {counts.min()} to {counts.max()} of each)"
        if count != images["count"] or said:
            of_each = f", {each} of each class" if each else ""
            raise UserError(
                f"{where} has {count} pictures{said}: recipe {self.name} takes {images['count']}"
                f"{of_each}; evaluate others without --recipe"
            )

    def report_remarks(self, report: Mapping | None) -> list[str]:
        """Return what a run's report.json says about differences to the recipe."""
        if report is None:
            return ["how the samples were drawn is not known: no report.json lies beside them"]
        made = report.get("recipe")
        made = made if isinstance(made, Mapping) else {}
        if made.get("name") != self.name:
            return [f"the samples were not drawn with --recipe={self.name}"]
        deviations = [made.get(name) for name in ("changed", "added")]
        flags = [flag for d in deviations if isinstance(d, Mapping) for flag in _written(d)]
        return [f"the samples were drawn with {flag}" for flag in flags]


def _written(flags: Mapping) -> list[str]:
    """Return flags as they are written on the command line."""
    texts = {name: ",".join(v) if isinstance(v, list) else v for name, v in flags.items()}
    return [f"--{name}={text}" for name, text in texts.items()]


class RecipeFlag:
    """--recipe. command: "run" or "evaluate"."""

    def __init__(self, flags: CommandFlags, command: str):
        self._flags, self._command = flags, command
        flags.used(
            "recipe",
            f"Published settings, as defaults of the other flags ({DOCS}): {', '.join(names())}.",
            self._use,
        )

    def _use(self, name: str) -> None:
        for flag, value in load(name).flags(self._command).items():
            next(v for v in self._flags.all_values() if flag in v).set_default(flag, value)

    @property
    def recipe(self) -> Recipe | None:
        name = self._flags.flag("recipe").value
        return load(name) if name else None

    def about(self) -> AbstractContextManager[None]:
        """Make errors inside name the recipe, if there is one: it may have set what is wrong."""
        return nullcontext() if self.recipe is None else errors.about(f"recipe {self.recipe.name}")

    def deviations(self) -> dict[str, dict[str, object]]:
        """Return {"changed": flags of the recipe that were given another value, "added": given
        flags that decide results and are not in the recipe}, each {flag: value}."""
        settings = self.recipe.flags(self._command)
        flags = {n: self._flags.flag(n) for n in (*settings, *DECIDING[self._command])}
        flags.pop("num_images", None)  # it is counted
        given = {name: flag.value for name, flag in flags.items() if flag.present}
        changed = {n: v for n, v in given.items() if n in settings and not _equal(v, settings[n])}
        return {
            "changed": changed,
            "added": {n: value for n, value in given.items() if n not in settings},
        }

    def describe(self) -> dict | None:
        """Return what reports say about the recipe; None without one."""
        if (recipe := self.recipe) is None:
            return None
        found = {name: recipe.content[name] for name in ("title", "source", "unknown")}
        return {"name": recipe.name, **found, **self.deviations()}

    def remarks(self, more: Sequence[str] = ()) -> list[str]:
        """Return what a user has to know: what the recipe leaves open, what was changed or added,
        and `more`."""
        if (recipe := self.recipe) is None:
            return []
        said = f"recipe {recipe.name}"
        unknown = [f"{said}: {text}" for text in recipe.content["unknown"]]
        found = self.deviations()
        changed = [f"{said} is changed by {flag}" for flag in _written(found["changed"])]
        added = [f"{said} does not name {f}, which is given" for f in _written(found["added"])]
        return [*unknown, *changed, *added, *more]


def _equal(value: object, setting: object) -> bool:
    """Compare the value of a flag with a recipe's setting. Recipes write lists with commas. Texts
    are equal if they hold the same numbers."""
    if isinstance(value, list):
        value = ",".join(value)
    if not isinstance(setting, str):
        return value == setting
    try:
        return [float(x) for x in value.split(",")] == [float(x) for x in setting.split(",")]
    except ValueError:
        return value == setting
