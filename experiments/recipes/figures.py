"""Figures of quality that are known of a policy on a model: what the rows of recipes print."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping

from experiments.recipes import recipe as recipes
from experiments.recipes.recipe import Recipe
from varjax.models.model import Model
from varjax.storage.checkpoint import DEMOS
from varjax.storage.values import parse_pairs

UNKNOWN = "quality   no recipe has figures of this policy, model and budget"
OF_SWEEP = re.compile(r"sweep-([\w-]+): (\w+):?([\w=:]*), ([\d.]+)")
NEAR = 0.02  # of a budget: 1/6 is written 0.1667, HeatKV's 10 % is 10.117 %


def rows(recipe: Recipe) -> Iterator[tuple[dict[str, str], Mapping[str, str]]]:
    """Yield ({flag: value}, {model: figures}) of every row that has figures."""
    flags, models = recipe.content.get("rows", {}), recipe.content["models"]
    for name, text in recipe.content["published"].items():
        if found := OF_SWEEP.fullmatch(name):
            model, policy, given, budget = found.groups()
            arguments = given.replace(":", ",")
            yield {"policy": policy, "policy_args": arguments, "budget": budget}, {model: text}
        # a text that does not say of which model is of the only one
        elif name in flags and (isinstance(text, Mapping) or len(models) == 1):
            words = (word.removeprefix("--").partition("=") for word in shlex.split(flags[name]))
            of_models = text if isinstance(text, Mapping) else {models[0]: text}
            yield {flag: value for flag, _, value in words}, of_models


def lines(
    model: Model, policy: str, given: Mapping[str, str], asked: float | None, budget: float
) -> list[str]:
    """Return a line for every row about a policy on a model of these sizes; of embedded models, on
    them. given: arguments of the policy, which the row has, too. asked: the budget, if one was
    asked for; a row may leave it to its arguments. budget: that of the plan."""
    found, place = [], model.directory and (model.directory.parent.name, model.directory.name)
    demo = next((n for n, folder in DEMOS.items() if place == ("ported_weights", folder)), None)
    for recipe in map(recipes.load, recipes.names()):
        name = demo if "steps" in recipe.content else recipe.name_of(model)
        for flags, figures in rows(recipe):
            has = parse_pairs(flags.get("policy_args", ""))
            same = asked is None and given == has
            if "budget" in flags:
                near = math.isclose(budget, float(flags["budget"]), rel_tol=NEAR)
                same = near and given.items() <= has.items()
            if same and flags["policy"] == policy and name in figures:
                more = ",".join(f"{k}={v}" for k, v in has.items() if k not in given)
                said = f"({name}, recipe {recipe.name}{', with ' * bool(more)}{more})"
                head = "" if found else "quality"
                found.append(f"{head:10s}{figures[name]} {said}: {recipe.content['title']}")
    return found or [UNKNOWN] * (policy != "full")
