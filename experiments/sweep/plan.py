"""The cells of a sweep, policies with arguments times budgets, planned before anything is
compiled."""

import hashlib
import itertools
import json
import math
import pathlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.budgets import parse_bytes
from experiments.generation import Generation, policy_arguments
from experiments.judges import Judges
from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError, about, choose
from varjax.core.plan import CachePlan
from varjax.core.planner import plan_cache
from varjax.generation import memory
from varjax.policies import POLICIES, get_policy
from varjax.storage.values import parse_pairs

ALL = "all"
NOT_IN_ALL = ("full", "table")  # the reference, and a policy that needs a file
_NEXT_ENTRY = re.compile(r",(?=\s*[A-Za-z_]\w*\s*(?:[:,]|$))")
_NEXT_ARGUMENT = re.compile(r"[+:](?=\s*\w+\s*=)")
OR = "|"  # between the values of an argument
MANY, MOST = 1000, 10**5  # cells that have to be confirmed, and that no sweep has


@dataclass(frozen=True)
class Entry:
    """A policy and its arguments, as --policies gives them. named: `all` is not the only reason."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    named: bool = True

    @property
    def label(self) -> str:
        """The entry as users write it on the command line."""
        pairs = "+".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.name}:{pairs}" if pairs else self.name


@dataclass(frozen=True, eq=False)
class Cell:
    """A policy at a budget. It has a plan or, if it cannot run, a reason.

    arguments: of the policy, defaults included, without what a calibration decides.
    budget: None if the policy cannot run at any budget.
    calibrated: whether a calibration decides anything, if there is one.
    """

    label: str
    name: str
    budget: float | None
    plan: CachePlan | None = None
    reason: str | None = None
    arguments: dict = field(default_factory=dict)
    calibrated: bool = False

    @property
    def key(self) -> str:
        """Name of the file of a finished cell. Cells that compute the same have the same key."""
        plan = self.plan
        content = [self.name, self.arguments, self.budget, plan.digest, plan.policy.content()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sweep(Generation):
    """A resolved sweep.

    full: the reference. samples: how many images are kept for the report. save_kept: also a picture
      of what every head kept, of the first image of each cell.
    calibration: the file of measurements; calibration_digest: SHA-256 of it and of the learned
      tables, with a + between them, as far as a policy uses them.
    judges: networks whose numbers are in the table.
    """

    cells: list[Cell]
    full: Cell
    samples: int
    save_kept: bool
    calibration: pathlib.Path | None
    calibration_digest: str | None
    judges: Judges = Judges()

    def describe(self) -> dict:
        """Return what decides the results of every cell, as JSON data."""
        own = {"samples": self.samples, "save_kept": self.save_kept}
        own |= {"calibration": self.calibration_digest}
        return super().describe() | own | self.judges.describe()


# --- reading flags ---


def parse_entries(text: str, budgets: int = 1, confirmed: bool = False) -> list[Entry]:
    """Read `"all"`, `"headkv:window=2|4:sinks=0|2,streaming:sinks=3+block_size=8"`; several values
    stand for an entry each, with those of other arguments for every pair. `UserError` for an empty
    or malformed entry, an unknown policy, the same entry twice, or more than `MANY` cells at so
    many budgets, unless they are confirmed.

    A comma separates entries only before a word that ends in a colon, a comma or the end of the
    text; a plus or a colon separates arguments only before `key=`. So values may hold them.
    """
    grids = [_parse_entry(part.strip(), text) for part in _NEXT_ENTRY.split(text)]
    count = budgets * sum(math.prod(map(len, grid.values())) for _, grid in grids)
    if count > (MOST if confirmed else MANY):
        words = "give fewer values" if confirmed else "add --yes to run them all, or fewer values"
        raise UserError(f"--policies={text!r:.200} asks for {count} cells: {words}")
    named = [
        Entry(name, dict(zip(grid, values, strict=True)))
        for name, grid in grids
        for values in itertools.product(*grid.values())
    ]
    counts = Counter(entry.label for entry in named)
    if twice := [label for label, times in counts.items() if times > 1]:
        raise UserError(f"--policies={text!r:.200} names {twice[0]} twice: keep one of them")
    found: dict[str, Entry] = {}
    for entry in named:
        if entry.name != ALL:
            found[entry.label] = entry
            continue
        for name in (name for name in POLICIES if name not in NOT_IN_ALL):
            found.setdefault(name, Entry(name, named=False))
    return list(found.values())


def _parse_entry(part: str, text: str) -> tuple[str, dict[str, list[str]]]:
    """Return a policy's name and the values of its arguments."""
    name, colon, arguments = (piece.strip() for piece in part.partition(":"))
    pieces = _NEXT_ARGUMENT.split(arguments) if arguments else []
    if not re.fullmatch(r"\w+", name) or (colon and not all(pieces or [""])):
        raise UserError(
            f"cannot read {part!r} of --policies={text!r:.200}: write all, or policies separated "
            f"by commas, each with arguments if you like: streaming:sinks=3+block_size=8"
        )
    choose("policy", name, [ALL, *POLICIES])
    if name == ALL and arguments:
        raise UserError("--policies=all:... takes no arguments: name the policy they belong to")
    pairs: dict[str, list[str]] = {}
    for argument in pieces:
        key, value = next(iter(parse_pairs(argument).items()))
        if key == "budget":
            raise UserError(f"{part!r}: budgets are given once for all policies, with --budgets")
        if key in pairs:
            raise UserError(f"{part!r} gives {key} twice: keep one of them")
        pairs[key] = [one.strip() for one in value.split(OR)]
        if not all(pairs[key]) and len(pairs[key]) > 1:
            raise UserError(f"{part!r:.200}: {key} has an empty value beside a {OR}")
    return name, pairs


def parse_budgets(text: str) -> list[float]:
    """Read `"0.04,0.1,0.5"`: fractions in (0, 1], each once. Their order stays."""
    try:
        budgets = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--budgets={text!r}: write fractions separated by commas, for example 0.1,0.25,0.5"
        ) from None
    if outside := [budget for budget in budgets if not 0 < budget <= 1]:
        raise UserError(
            f"--budgets={text!r}: {outside[0]:g} is outside (0, 1]: budgets are fractions of the "
            f"full cache's bytes"
        )
    if len(set(budgets)) < len(budgets):
        raise UserError(f"--budgets={text!r} names a budget twice: keep one of them")
    return budgets


def budgets_of_bytes(text: str, full: int) -> list[float]:
    """Read `"1GiB,2GiB"` as fractions of the full cache's bytes, `full`."""
    with about(f"--kv_bytes={text}"):
        wanted = [parse_bytes(part) for part in text.split(",")]
        if max(wanted) > full:
            raise UserError(f"the full cache takes {memory.show_bytes(full)}: choose less")
        if len(set(wanted)) < len(wanted):
            raise UserError("a budget is there twice: keep one of them")
    return [size / full for size in wanted]


# --- planning ---


def plan_cells(
    entries: Sequence[Entry],
    budgets: Sequence[float],
    geometry: Geometry,
    calibration: Calibration | None,
    num_images: int,
) -> list[Cell]:
    """Return all cells, entry by entry; `all` stands for the policies that serve the model. A cell
    that cannot run has its reason. `UserError` if none of a named policy can run."""
    cells: list[Cell] = []
    for entry in entries:
        if entry.name == "full":
            continue  # the reference is always there
        if not entry.named and not POLICIES[entry.name].serves(geometry.kind):
            continue
        row = _plan_row(entry, budgets, geometry, calibration, num_images)
        if entry.named and not any(cell.plan for cell in row):
            raise UserError(f"{entry.label}: {row[0].reason}")
        cells += row
    return cells


def _plan_row(
    entry: Entry,
    budgets: Sequence[float],
    geometry: Geometry,
    calibration: Calibration | None,
    num_images: int,
) -> list[Cell]:
    try:
        default = get_policy(entry.name, None, entry.arguments)
        policies = [default]
        if default.budgeted:  # other policies have fixed contents, which decide the budget
            policies = [get_policy(entry.name, budget, entry.arguments) for budget in budgets]
    except UserError as error:
        if entry.named:
            raise
        return [Cell(entry.label, entry.name, None, reason=str(error))]
    row = []
    for policy in policies:
        used = policy.uses_calibration
        try:
            policy.check_images(num_images)
            plan = plan_cache(geometry, policy, calibration if used else None)
        except UserError as error:
            if used and calibration is None:  # at any budget
                return [Cell(entry.label, entry.name, None, reason=str(error))]
            row.append(Cell(entry.label, entry.name, policy.budget, reason=str(error)))
            continue
        decided = {"arguments": policy_arguments(plan.policy), "calibrated": used}
        row.append(Cell(entry.label, entry.name, plan.policy.budget, plan, **decided))
    return row


def show_sizes(sweep: Sweep) -> str:
    """Return the line that is printed before anything is compiled."""
    batch, feasible = sweep.batch_size, len({cell.key for cell in sweep.cells if cell.plan})
    refused = sum(cell.plan is None for cell in sweep.cells)
    dense = memory.show_bytes(sweep.full.plan.dense_bytes(batch, sweep.program.dtype))
    return (
        f"{sweep.model.name}: {feasible} of {feasible + refused} cells can run, "
        f"{len(sweep.condition)} images in batches of {batch}; the full cache takes {dense}"
    )
