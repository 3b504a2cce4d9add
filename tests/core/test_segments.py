"""The segment planner against a search over all cuts, and the padded index maps."""

import itertools

import numpy as np
import pytest

import varjax
from varjax.core.errors import UserError
from varjax.core.segments import TILE_8_BITS, Segment, padded_tokens, plan_segments
from varjax.core.sequence import Schedule
from varjax.core.step_inputs import StepInputs
from varjax.generation import build

SCHEDULES = {
    "var-256": Schedule.square((1, 2, 3, 4, 5, 6, 8, 10, 13, 16)),
    "demo": Schedule.square((1, 2, 3, 4, 6, 8)),
    "wide": Schedule.parse("1x1;1x2;2x3;3x5;4x8;5x9"),
    "not monotone": Schedule.parse("4x4;1x1;3x3;2x7;1x2;5x1;2x2"),
    "single": Schedule.parse("3x2"),
    "two": Schedule.parse("1x1;9x9"),
}


def all_cuts(tokens, count):
    """Padded tokens of every way to cut into `count` segments, written from the definition."""
    for inner in itertools.combinations(range(1, len(tokens)), count - 1):
        edges = (0, *inner, len(tokens))
        runs = [tokens[a:b] for a, b in itertools.pairwise(edges)]
        yield sum(len(run) * max(run) for run in runs)


def check_cover(schedule, segments):
    """Segments are contiguous, cover all scales and are as long as their longest scale."""
    assert [k for segment in segments for k in segment.scales] == list(range(schedule.num_scales))
    for segment in segments:
        assert len(segment.scales) == segment.stop - segment.start >= 1
        assert segment.length == max(schedule.tokens[segment.start : segment.stop])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_count_is_optimal(name):
    schedule = SCHEDULES[name]
    for count in range(1, schedule.num_scales + 1):
        segments = plan_segments(schedule, count)
        assert len(segments) == count
        check_cover(schedule, segments)
        assert padded_tokens(segments) == min(all_cuts(schedule.tokens, count))


@pytest.mark.parametrize("name", SCHEDULES)
def test_auto_is_the_fewest_within_a_quarter(name):
    schedule = SCHEDULES[name]
    segments = plan_segments(schedule)
    check_cover(schedule, segments)
    exact = sum(schedule.tokens)
    assert padded_tokens(segments) <= 1.25 * exact
    for fewer in range(1, len(segments)):
        assert min(all_cuts(schedule.tokens, fewer)) > 1.25 * exact


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # 192 rows take as long as one: of one image up to 96 tokens, of eight 12, of 64 one and a
        # half
        (2, [(0, 8, 100), (8, 9, 172), (9, 10, 256)]),
        (16, [(0, 4, 16), (4, 6, 36), (6, 7, 64), (7, 8, 100), (8, 9, 169), (9, 10, 256)]),
    ],
)
def test_segments_of_large_models_follow_what_padding_costs(rows, expected):
    schedule = SCHEDULES["var-256"]
    segments = plan_segments(schedule, "auto", rows, 192)
    assert segments == tuple(Segment(*numbers) for numbers in expected)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rows", [1, 6, 1024])
def test_large_models_pad_a_twentieth(name, rows):
    schedule = SCHEDULES[name]
    segments = plan_segments(schedule, "auto", rows, 192)
    whole = tuple(  # without what fills tiles
        Segment(s.start, s.stop, max(schedule.tokens[s.start : s.stop])) for s in segments
    )
    check_cover(schedule, whole)
    for segment, exact in zip(segments, whole, strict=True):
        assert segment.length * rows % 8 == 0
        assert exact.length <= segment.length < exact.length + 8
    least = 192 / rows
    assert padded_tokens(whole, least) <= 1.05 * sum(max(n, least) for n in schedule.tokens)
    assert plan_segments(schedule, len(segments), rows, 192) == segments


def test_rows_in_8_bits_come_by_sixteen():
    """Two rows of 100 tokens would be padded and cut around every product."""
    found = plan_segments(SCHEDULES["var-256"], "auto", 2, 192, TILE_8_BITS)
    assert found == (Segment(0, 8, 104), Segment(8, 9, 176), Segment(9, 10, 256))


def test_auto_accepts_a_quarter_exactly():
    schedule = Schedule.parse("1x3;1x5")  # one segment of 2 x 5 tokens is 1.25 x 8
    assert plan_segments(schedule) == (Segment(0, 2, 5),)
    assert len(plan_segments(Schedule.parse("1x3;1x6"))) == 2  # 12 tokens would be 1.33 x 9


@pytest.mark.parametrize("segments", [0, 7, "many", 2.5, None, True])
def test_bad_counts_name_the_range(segments):
    with pytest.raises(UserError, match="'auto' or a whole number from 1 to 6") as error:
        plan_segments(SCHEDULES["demo"], segments)
    assert repr(segments) in str(error.value)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("how", [1, "auto"])
def test_index_maps(name, how):
    schedule = SCHEDULES[name]
    seen = []
    for segment in plan_segments(schedule, how):
        step = StepInputs.of(schedule, segment.scales, segment.length)
        index, real = step.token_index, step.length
        assert index.shape == (len(segment.scales), segment.length)
        assert index.dtype == real.dtype == np.int32
        for row, k in enumerate(segment.scales):
            assert real[row] == schedule.tokens[k]
            seen += index[row, : real[row]].tolist()
            assert (index[row, real[row] :] == schedule.ends[k] - 1).all()
    assert seen == list(range(schedule.total_tokens))


def test_a_large_model_in_8_bits_is_cut_for_its_products(monkeypatch):
    monkeypatch.setattr(build, "SCANNED_BYTES", 0)
    model, schedule = varjax.describe(), SCHEDULES["var-256"]
    lengths = {}
    for scheme in (None, "int8", "fp8"):
        networks = (model.quantized(scheme, emulated=scheme == "fp8") if scheme else model).networks
        cut = build.plan_segments(networks, schedule, "auto", 2, "gpu")
        lengths[scheme] = [segment.length for segment in cut]
    assert lengths == {None: [100, 172, 256], "int8": [100, 172, 256], "fp8": [104, 176, 256]}
