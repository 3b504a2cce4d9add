"""A small sweep folder as `experiments.sweep` writes it, without running one."""

import json
import pathlib
from dataclasses import asdict

import numpy as np

from varjax.calibration import files as measured
from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.planner import plan_cache
from varjax.core.sampling import Sampling
from varjax.core.sequence import Schedule
from varjax.policies import get_policy

GEOMETRY = Geometry(
    schedule=Schedule.square([1, 2, 3, 4, 6]), num_layers=3, num_heads=4, head_dim=8
)


def cell(label, budget, number):
    plan = plan_cache(GEOMETRY, get_policy(label, budget))
    slot = plan.num_bytes(1, "float32") // plan.pool_tokens
    kv = {"dense_bytes": plan.dense_bytes(1, "float32"), "slot_bytes": slot}
    kv |= {"planned_bytes": plan.num_bytes(1, "float32"), "fraction": plan.fraction}
    kv |= {"allocated_bytes": plan.num_bytes(1, "float32"), "pool_slots": plan.pool_tokens}
    kv |= {"dense_slots": GEOMETRY.dense_tokens}
    close = {"psnr": 20.0 + number, "ssim": 0.9, "token_agreement": 0.5, "kl": 0.1 / number}
    return {
        "label": label,
        "policy": label,
        "budget": budget,
        "status": "done",
        "samples": f"c{number}",
        "kv": kv,
        "time": {"steady_s_per_image": 0.1},
        "fidelity": close,
        "samples_fidelity": {"psnr": [20.0, "inf"], "ssim": [0.9, 1], "kl": [0.1, 0.0]},
        "live_tokens": plan.live_tokens.tolist(),
        "used_slots": (plan.blocks_after_store * plan.block_size).tolist(),
    }


def write_sweep(folder: pathlib.Path) -> None:
    """A folder as `experiments.sweep` writes it."""
    reason = "the budget is <b>too</b> small & </script> harmless"
    cells = [cell("swa", 0.2, 1), cell("swa", 0.5, 2), cell("streaming", 0.5, 3)]
    cells += [{"label": "streaming", "policy": "streaming", "budget": 0.2}]
    cells[-1] |= {"status": "infeasible", "reason": reason}
    cells += [{"label": "heatkv", "policy": "heatkv", "budget": None}]
    cells[-1] |= {"status": "skipped", "reason": "needs a calibration"}
    full = cell("full", 1.0, 9)
    del full["fidelity"]
    settings = {"model": "made <up>", "labels": [3, 7], "seed": 0, "batch_size": 1}
    settings |= {"dtype": "float32", "kv_dtype": "float32", "sampling": asdict(Sampling())}
    fields = {name: getattr(GEOMETRY, name) for name in ("num_layers", "num_heads", "head_dim")}
    report = {
        "format_version": 1,
        "settings": settings | {"calibration": None},
        "geometry": fields | {"rows_per_image": 2, "schedule": str(GEOMETRY.schedule)},
        "device": "cpu: cpu",
        "versions": {"varjax": "0"},
        "sample_names": ["an apple", "a pear"],
        "definitions": {"KL <i>": "nats </script>"},
        "reference": full,
        "cells": cells,
    }
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps(report))
    rng = np.random.default_rng(0)
    names = ["full", "c1", "c2", "c3"]
    images = {name: rng.integers(0, 256, (2, 16, 16, 3), np.uint8) for name in names}
    np.savez(folder / "samples.npz", labels=np.array([3, 7]), **images)


def write_calibration(path: pathlib.Path) -> None:
    """A file with everything that can be drawn."""
    rng = np.random.default_rng(1)
    layers, heads, scales = GEOMETRY.num_layers, GEOMETRY.num_heads, GEOMETRY.schedule.num_scales
    beta = np.tril(rng.uniform(0.1, 1, (layers, heads, scales, scales)))
    beta[0, 0, -1, 1] = 0  # has no logarithm
    made = Calibration(
        schedule=GEOMETRY.schedule,
        num_layers=layers,
        num_heads=heads,
        num_samples=2,
        beta=beta / beta.sum(-1, keepdims=True),
        key_discrepancy=rng.uniform(size=(layers, scales)),
        query_variance=rng.uniform(size=(layers, heads)),
        selectivity=rng.uniform(size=(layers, scales)),
        rank_dispersion=rng.uniform(size=4),
    )
    measured.save(made, path)
