"""The floor of a token, and the rows of the table, on numbers counted by hand."""

import pytest

from experiments.aot import occupancy, per_token, report
from pallas_kernels.chips import CHIPS
from varjax import api
from varjax.cache.allocation import Geometry
from varjax.policies import POLICIES

H200, V5E = CHIPS["h200"], CHIPS["tpu-v5e"]
GEOMETRY = Geometry.parse("layers=3,heads=2,head_dim=8,tokens=10,condition=2,line=5")
XL = Geometry.parse("layers=36,heads=20,head_dim=64,tokens=576,condition=1,line=24")


def planned(geometry, policy, **arguments):
    return api.plan(geometry, POLICIES[policy](**arguments))


def test_full_cache_reads_what_is_in_use():
    """Tokens 0 to 8 are read: the first finds the condition and itself, 3 slots, the last 11."""
    plan = planned(GEOMETRY, "full")
    assert per_token.used_slots(plan)[:, 0].tolist() == list(range(3, 12))
    assert per_token.slots_read(plan) == 3 * 7
    assert occupancy.plan_occupancy(plan, ()).slots_in_use == list(range(3, 12))


def test_a_ring_is_full_soon():
    plan = planned(GEOMETRY, "swa", budget=6 / 11)
    assert plan.layer_slots == (6, 6, 6)
    assert per_token.used_slots(plan)[:, 0].tolist() == [3, 4, 5] + 6 * [6]


def test_a_policy_that_decides_reads_all_slots():
    plan = planned(XL, "headkv", budget=1 / 6)
    assert set(plan.layer_slots) == {96}
    assert per_token.slots_read(plan) == 36 * 96
    assert occupancy.plan_occupancy(plan, ()).slots_in_use is None
    scales = Geometry.parse("layers=3,heads=2,head_dim=8,schedule=1x1;2x2;3x3")
    assert occupancy.plan_occupancy(planned(scales, "full"), ()).slots_in_use is None


@pytest.mark.parametrize(
    ("chip", "rows", "slots", "expected"),
    [
        # 36 layers of 12.4 x 1280^2 and a head of 1280 x 16384: 752 M parameters
        (H200, 256, 96, 0.390 + 0.944),
        (H200, 256, 289, 0.390 + 2.841),
        (H200, 2, 289, 0.314 + 0.022),
        (V5E, 64, 96, 1.837 + 1.383),
    ],
)
def test_floor_of_the_note(chip, rows, slots, expected):
    """LlamaGen-XL at 384 pixels: milliseconds as counted by hand, of weights and of slots."""
    parameters = 36 * 12.4 * 1280**2 + 1280 * 16384
    found = per_token.floor(
        chip,
        weight_bytes=2 * parameters,
        parameters=parameters,
        rows=rows,
        cache_bytes=rows * slots * 184_320,
    )
    assert 1e3 * found == pytest.approx(expected, abs=2e-3)


def test_floor_of_products_in_8_bits():
    least = {"weight_bytes": 0, "parameters": 1e9, "rows": 64, "cache_bytes": 0}
    plain, eight = per_token.floor(H200, **least), per_token.floor(H200, **least, peak=2e15)
    assert plain == 128e9 / H200.bf16_flops and eight == 128e9 / 2e15


def test_rows_of_the_table():
    each = {"image_tokens": 576, "slots_per_head": 96.0, "floor_s": 1e-3, "modelled_s": 2e-3}
    each |= {"over_floor": 2.0, "kernels": 300.25, "expected_s": 3e-3}
    shown = [row({"per_token": each}) for _, row in per_token.ROWS]
    assert shown == ["2", "3", "1", "2.00", "300"]
    assumed = {"per_token": {**each, "expected_s": None}}  # nothing was measured on the chip
    assert [row(assumed) for _, row in per_token.ROWS] == ["2", "", "1", "2.00", "300"]
    for nothing in ({}, {"per_token": None}, {"per_token": {**each, "modelled_s": None}}):
        assert not any(row(nothing) for _, row in per_token.ROWS)
    assert set(per_token.ROWS) <= set(report._ROWS)
