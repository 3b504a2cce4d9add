"""What the tests of AMS-KV share: the fixture, geometries, a random calibration."""

import functools
import json
import pathlib

import numpy as np

from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.sequence import Schedule
from varjax.policies.amskv_rules import VAR_256, VAR_512

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures/policies/amskv/amskv.npz"
DEMO = Geometry(schedule=Schedule.square((1, 2, 3, 4, 6, 8)), num_layers=8, num_heads=2, head_dim=4)
D30 = Geometry(schedule=VAR_256, num_layers=30, num_heads=30, head_dim=64)
D36 = Geometry(schedule=VAR_512, num_layers=36, num_heads=36, head_dim=64)
CASES = (
    *("d30_paper_efficient", "d30_paper_demanding", "d36_paper_efficient", "d36_paper_demanding"),
    *("d30_cmin41_efficient", "d30_cmin41_demanding", "d36_cmax1029_efficient"),
    *("d36_cmax1029_demanding", "d30_late_demanding", "d30_skip_big"),
)


@functools.cache
def fixture(name: str) -> dict:
    with np.load(FIXTURE) as archive:
        found = {k.split(".")[1]: archive[k] for k in archive.files if k.startswith(name + ".")}
        return found | json.loads(str(archive["meta_json"]))[name]


def calibration(geometry: Geometry, seed: int = 0) -> Calibration:
    shape = (geometry.num_layers, geometry.schedule.num_scales)
    discrepancy = np.random.default_rng(seed).uniform(0.5, 1.5, shape)
    discrepancy[:, 0] = 0
    return Calibration(key_discrepancy=discrepancy)
