"""Finished cells of an unfinished sweep count only if everything of them is there."""

from types import SimpleNamespace

import numpy as np

from experiments.sweep import cells as sweep_cells
from tests.experiments import made_up_sweep
from varjax.core.planner import plan_cache
from varjax.policies import get_policy

GEOMETRY = made_up_sweep.GEOMETRY


def made_up_cell(key, name, budget, policy):
    plan = plan_cache(GEOMETRY, policy)
    return SimpleNamespace(key=key, name=name, budget=budget, arguments={"n": (1,)}, plan=plan)


def made_up_runner(folder):
    """Return the runner of a sweep, and its only cell."""
    full = made_up_cell("full", "full", 1.0, get_policy("full", None))
    cell = made_up_cell("a", "swa", 0.5, get_policy("swa", 0.5))
    sweep = SimpleNamespace(full=full, cells=[cell])
    store = SimpleNamespace(work=SimpleNamespace(path=folder, digest="d"))
    return sweep_cells.CellRunner(sweep, store), cell


def content_of(cell):
    """(row, arrays) as a run leaves them."""
    row = made_up_sweep.cell("swa", 0.5, 1) | {"plan": cell.plan.digest}
    row |= {"policy": cell.name, "budget": cell.budget, "policy_args": {"n": [1]}}
    arrays = {f"per_image/{key}": np.ones(3) for key in ("psnr", "ssim", "kl")}
    return row, arrays | {"samples": np.zeros((2, 12, 12, 3), np.uint8)}


def test_a_damaged_cell_is_run_again(tmp_path):
    """A truncated file counts as missing."""
    runner, cell = made_up_runner(tmp_path)
    row, arrays = content_of(cell)
    runner.keep(cell, row, arrays)
    found = runner.results(cell)
    assert found["row"] == row and all((found[k] == v).all() for k, v in arrays.items())
    path = runner.path(cell)
    path.write_bytes(path.read_bytes()[:-30])
    assert runner.results(cell) is None
