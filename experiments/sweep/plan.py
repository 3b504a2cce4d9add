"""What a sweep runs: rows (a policy with its arguments) times budgets, planned before anything is
compiled."""

import hashlib
import json
import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments import settings
from experiments.flags.generation import GenerationSettings
from varjax.cache.geometry import Geometry
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.calibration import Calibration
from varjax.cli.command_line import typed_pairs
from varjax.engine import memory
from varjax.errors import UserError, choose
from varjax.policies import POLICIES, Policy, get_policy

ALL = "all"
NOT_IN_ALL = ("full", "table")  # the reference, and what needs a file of its own
_NEXT_ENTRY = re.compile(r",(?=\s*[A-Za-z_]\w*\s*(?:[:,]|$))")
_NEXT_ARGUMENT = re.compile(r"\+(?=\s*\w+\s*=)")


@dataclass(frozen=True)
class Entry:
    """One row of the table: a policy and its arguments. `named`: asked for by name, not by
    `all`."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    named: bool = True

    @property
    def label(self) -> str:
        """The entry as it is written on the command line."""
        pairs = "+".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.name}:{pairs}" if pairs else self.name


@dataclass(frozen=True, eq=False)
class Cell:
    """A policy at a budget. Either `plan` or the `reason` why there is none.

    policy: as the program runs it, with what the calibration decides filled in; arguments: as they
      were before, defaults included.
    budget: None for what a calibration is missing for, at any budget.
    """

    label: str
    name: str
    budget: float | None
    policy: Policy | None = None
    plan: CachePlan | None = None
    reason: str | None = None
    arguments: dict = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Names the file of a finished cell: equal for what computes the same."""
        assert self.plan is not None and self.policy is not None
        content = [
            self.name,
            self.arguments,
            self.budget,
            self.plan.digest,
            self.policy.content(),
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False, kw_only=True)
class SweepSettings(GenerationSettings):
    """A resolved sweep. calibration: SHA-256 of the calibration file. samples: so many images are
    kept for the report."""

    cells: list[Cell]
    full: Cell
    samples: int
    calibration: str | None
    calibration_path: pathlib.Path | None = None

    def storage(self, cell: Cell) -> Any:
        """Type of a cell's pool: the full cache is never compressed."""
        return self.dense_dtype if cell is self.full else self.kv_dtype

    def describe(self) -> dict:
        """JSON-able content: what decides the results of every cell."""
        return {
            **super().describe(),
            "samples": self.samples,
            "calibration": self.calibration,
        }


# --- reading flags ---


def parse_entries(text: str) -> list[Entry]:
    """Read `"all"`, `"headkv,streaming:sinks=3+block_size=8"`.

    A comma separates entries only before a word that ends in a colon, a comma or the end of the
    text; a plus separates arguments only before `key=`. So values may hold both.

    Raises:
      UserError: an empty or malformed entry, an unknown policy, or the same entry twice.
    """
    parts = [part.strip() for part in _NEXT_ENTRY.split(text)]
    if parts.count(ALL) > 1:
        raise UserError(f"--policies={text!r:.200} names {ALL} twice: keep one of them")
    entries = [entry for part in parts for entry in _parse_entry(part, text)]
    found: dict[str, Entry] = {}
    for entry in entries:
        before = found.get(entry.label)
        if before is not None and before.named and entry.named:
            raise UserError(f"--policies={text!r:.200} names {entry.label} twice: keep one of them")
        if before is None or entry.named:
            found[entry.label] = entry
    return list(found.values())


def _parse_entry(part: str, text: str) -> list[Entry]:
    name, colon, arguments = (piece.strip() for piece in part.partition(":"))
    if part == ALL:
        return [Entry(p, named=False) for p in POLICIES if p not in NOT_IN_ALL]
    if not re.fullmatch(r"\w+", name) or (colon and not arguments):
        raise UserError(
            f"cannot read {part!r} of --policies={text!r:.200}: write all, or policies separated "
            f"by commas, each with arguments if you like: streaming:sinks=3+block_size=8"
        )
    choose("policy", name, [ALL, *POLICIES])
    if name == ALL:
        raise UserError("--policies=all:... takes no arguments: name the policy they belong to")
    pairs: dict[str, str] = {}
    for argument in _NEXT_ARGUMENT.split(arguments) if arguments else []:
        key, value = next(iter(typed_pairs(argument).items()))
        if key == "budget":
            raise UserError(f"{part!r}: budgets are given once for all policies, with --budgets")
        if key in pairs:
            raise UserError(f"{part!r} gives {key} twice: keep one of them")
        pairs[key] = value
    return [Entry(name, pairs)]


def parse_budgets(text: str) -> list[float]:
    """Read `"0.04,0.1,0.5"`: fractions in (0, 1], each once, in the order given."""
    try:
        budgets = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--budgets={text!r}: write fractions separated by commas, for example 0.1,0.25,0.5"
        ) from None
    for budget in budgets:
        if not 0 < budget <= 1:
            raise UserError(
                f"--budgets={text!r}: {budget:g} is outside (0, 1]: budgets are fractions of the "
                f"full cache's bytes"
            )
    if len(set(budgets)) < len(budgets):
        raise UserError(f"--budgets={text!r} names a budget twice: keep one of them")
    return budgets


# --- planning ---


def plan_policy(
    geometry: Geometry, policy: Policy, calibration: Calibration | None
) -> tuple[Policy, CachePlan]:
    """(the policy as the program runs it, its plan): the one place where a sweep plans."""
    calibration = calibration if policy.uses_calibration else None
    plan = plan_cache(geometry, policy, calibration)
    return plan.policy, plan


def plan_cells(
    entries: Sequence[Entry],
    budgets: Sequence[float],
    geometry: Geometry,
    calibration: Calibration | None,
    num_images: int,
) -> list[Cell]:
    """All cells, row by row. What cannot work becomes a cell with its reason.

    Raises:
      UserError: nothing of a policy that was asked for by name can work.
    """
    cells: list[Cell] = []
    for entry in entries:
        if entry.name == "full":
            continue  # the reference is always there
        row = _plan_row(entry, budgets, geometry, calibration, num_images)
        if entry.named and not any(cell.plan for cell in row):
            raise UserError(f"{entry.label}: {row[0].reason}")
        cells += row
    return cells


def _plan_row(entry, budgets, geometry, calibration, num_images) -> list[Cell]:
    try:
        budgeted = get_policy(entry.name, None, entry.arguments).budgeted
        policies = [
            get_policy(entry.name, budget, entry.arguments)
            for budget in (budgets if budgeted else [None])
        ]
    except UserError as error:
        if entry.named:
            raise
        return [Cell(entry.label, entry.name, None, reason=str(error))]
    row = []
    for policy in policies:
        cell = _plan_cell(entry, policy, geometry, calibration, num_images)
        if cell.plan is None and policy.uses_calibration and calibration is None:
            return [Cell(entry.label, entry.name, None, reason=cell.reason)]
        row.append(cell)
    return row


def _plan_cell(entry, policy, geometry, calibration, num_images) -> Cell:
    try:
        policy.check_images(num_images)
        prepared, plan = plan_policy(geometry, policy, calibration)
    except UserError as error:
        return Cell(entry.label, entry.name, policy.budget, reason=str(error))
    arguments = settings.policy_arguments(policy)
    return Cell(entry.label, entry.name, prepared.budget, prepared, plan, arguments=arguments)


def show_sizes(sweep: SweepSettings) -> str:
    """One line before anything is compiled."""
    dense = sweep.full.plan.dense_bytes(sweep.batch_size, sweep.dense_dtype)
    feasible = sum(cell.plan is not None for cell in sweep.cells)
    return (
        f"{sweep.model.name}: {feasible} of {len(sweep.cells)} cells can run, "
        f"{len(sweep.condition)} images in batches of {sweep.batch_size}; the full cache takes "
        f"{memory.show_bytes(dense)}"
    )
