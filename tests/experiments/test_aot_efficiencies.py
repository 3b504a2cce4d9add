"""What was measured on chips: the file, its refusals, and the times that follow from it."""

import json
from collections import Counter
from dataclasses import asdict, astuple, replace
from pathlib import Path

import pytest

from experiments.aot import efficiencies, fitting, modelled_report
from experiments.aot.efficiencies import FORMAT, GAPS, Efficiency
from experiments.aot.modelled import Modelled
from experiments.aot.work import ASSUMED, SMALL, Work, by_operation
from pallas_kernels import chips
from pallas_kernels.chips import CHIPS
from tests.experiments.test_aot_modelled import FLOPS, GPU, H200, V5E, WEIGHTS, X, Y
from varjax.engine.cost import PallasWork
from varjax.errors import UserError

RECORD = {
    "chip": "h100",
    "device": "NVIDIA H100",
    "driver": "1.2",
    "jax": "0.0.1",
    "date": "2026-01-02",
    "revision": "abc",
    "source": "made up",
    "peaks": {"bf16_flops": CHIPS["h100"].bf16_flops, "bandwidth": CHIPS["h100"].bandwidth},
    "operations": {
        "products": {"call_us": 2, "bandwidth": 0.5, "flops": 0.25},
        GAPS: {"call_us": 1},
    },
}


def content(**changes) -> dict:
    return {**FORMAT, "chips": [{**RECORD, **changes}]}


def test_a_record():
    [record] = efficiencies.checked(content()).values()
    assert record.operations == {
        "products": Efficiency(2e-6, 0.5, 0.25),
        GAPS: Efficiency(1e-6),
    }
    assert record.said == "NVIDIA H100, 2026-01-02" and record.gap == 1e-6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "its format should be 'varjax efficiencies'"),
        ({"format": "tuned tiles"}, "its format should be"),
        ({**content(), "version": 2}, "version=2: this varjax reads version 1"),
        ({**FORMAT, "chips": {}}, "must be a list"),
        ({**FORMAT, "chips": [3]}, r"chips\[0\]: 3: a record must be a table"),
        ({**FORMAT, "chips": [RECORD, RECORD]}, r"chips\[1\]: a second record of h100"),
        (content(chip="h101"), "unknown chip 'h101': choose one of"),
        (content(chip="h200"), r"h200 has .*: name the chip that was measured"),
        (content(chip="tpu-v5e"), "records are of GPUs"),
        (content(peaks=None), "peaks=None: h100 has"),
        (content(date="yesterday"), "write year-month-day"),
        (content(driver=580), "driver=580: it must be a text"),
        (content(clock=1), "unknown field 'clock'"),
        (content(operations=[]), "must be a table"),
        (
            content(operations={"product": {}}),
            "unknown operation 'product'.*did you mean 'products'",
        ),
        (content(operations={"write": 3}), "write=3: it must be a table of numbers"),
        (content(operations={"write": {}}), "write: call_us=None: it must be a number"),
        (content(operations={"write": {"call_us": -1}}), "call_us=-1 is outside"),
        (content(operations={"write": {"call_us": 1, "flops": 0}}), "flops=0 is outside"),
        (
            content(operations={"write": {"call_us": 1, "bandwidth": 1.1}}),
            "bandwidth=1.1 is outside",
        ),
        (content(operations={"write": {"call_us": 1, "speed": 1}}), "unknown number 'speed'"),
        (content(operations={"write": {"call_us": 1, "basis": "felt"}}), "unknown basis 'felt'"),
        (content(operations={GAPS: {"call_us": 1, "flops": 1}}), "gaps: unknown number 'flops'"),
    ],
)
def test_what_is_refused(tmp_path, given, message):
    path = tmp_path / "efficiencies.json"
    path.write_text(json.dumps(given))
    with pytest.raises(UserError, match=message) as error:
        efficiencies.read(path)
    assert str(error.value).startswith(str(path))


def test_a_damaged_file_is_refused_before_compiling(call, monkeypatch):
    def damaged():
        raise UserError("efficiencies.json: version=7")

    monkeypatch.setattr(efficiencies, "_known", damaged)
    monkeypatch.setattr(chips, "why_unavailable", lambda *names: None)
    status, out, err = call("aot", "--target=h200")
    assert status == 2 and "version=7" in err and err.count("\n") == 1 and not out


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "damaged.json").write_text("{")
    for name in ("damaged.json", "missing.json"):
        with pytest.raises(UserError, match=name):
            efficiencies.read(tmp_path / name)


def test_adopting_a_record(tmp_path):
    """It takes the place of an older one of its chip, and nothing is written if it is wrong."""
    path = tmp_path / "efficiencies.json"
    efficiencies.adopt(RECORD, path)
    a100 = CHIPS["a100"]
    peaks = {"bf16_flops": a100.bf16_flops, "bandwidth": a100.bandwidth}
    efficiencies.adopt({**RECORD, "chip": "a100", "peaks": peaks}, path)
    efficiencies.adopt({**RECORD, "date": "2027-01-01", "operations": {}}, path)
    found = efficiencies.read(path)
    assert list(found) == ["h100", "a100"] and found["h100"].operations == {}
    before = path.read_bytes()
    for wrong in ({**RECORD, "chip": "b200"}, {**RECORD, "operations": {"magic": {}}}):
        with pytest.raises(UserError):
            efficiencies.adopt(wrong, path)
    path.write_bytes(before.replace(b'"version": 1', b'"version": 0'))
    with pytest.raises(UserError, match="version=0"):
        efficiencies.adopt(RECORD, path)
    assert b'"version": 0' in path.read_bytes() and len(list(tmp_path.iterdir())) == 1


def test_seconds_of_a_call():
    slow = Efficiency(1.0, bandwidth=0.5, flops=0.25)
    assert slow.seconds(moving=3.0, computing=1.0) == 1 + 6
    assert slow.seconds(moving=1.0, computing=3.0) == 1 + 12
    # 5 programs on 2 cores take 3 turns; each computes a fifth on a core with half of the peak
    turns = Efficiency(1.0, flops=0.5, program=10.0, copy=2.0)
    computing = 3 * (10 + 0.5 * 2 / 5 / 0.5)
    assert turns.seconds_in_turns(0, 0.5, 5, 0.0, 2) == pytest.approx(1 + computing)
    assert turns.seconds_in_turns(0, 0.5, 5, 4.0, 2) == 1 + 3 * (10 + 4 * 2)
    assert turns.seconds_in_turns(90.0, 0.5, 5, 4.0, 2) == 91


ATTENTION = PallasWork("ragged_attention", 1e9, 1e6, True, programs=264, copies=10.0)


@pytest.fixture
def on_h100(monkeypatch):
    """A record of an H100 and none of other chips; returns a function that models a program."""
    found = efficiencies.checked(content())
    monkeypatch.setattr(efficiencies, "_known", lambda: found)
    pallas = Counter({ATTENTION: 30})
    return lambda chip: Modelled.of(GPU, CHIPS[chip], pallas)


def test_the_time_expected_on_a_chip(on_h100):
    """What was measured, what was not, and gaps; the model's own time is another one."""
    found, chip = on_h100("h100"), CHIPS["h100"]
    parts = found.by_operation()
    assert list(parts) == ["fusions", "products", "attention", GAPS]
    moving, computing = (X + WEIGHTS + Y) / chip.bandwidth, FLOPS / chip.bf16_flops
    product = 2e-6 + max(moving / 0.5, computing / 0.25)
    assert parts["products"].expected == pytest.approx(30 * product)
    assert parts["products"].basis == "measured" and parts["fusions"].basis == "assumed"
    assert parts["fusions"].expected == parts["fusions"].ideal
    assert parts[GAPS].calls == 30 and parts[GAPS].expected == pytest.approx(30e-6)
    assert sum(p.ideal for p in parts.values()) == pytest.approx(found.seconds)
    assert found.expected_seconds == pytest.approx(sum(p.expected for p in parts.values()))


def test_calls_that_are_smaller_than_all_that_were_measured():
    """They take what is assumed, and no gap beside it."""
    numbers = {"products": {"call_us": 9, "least_bytes": 1e6, "least_flops": 1e9}}
    numbers |= {GAPS: {"call_us": 1}}
    [record] = efficiencies.checked(content(operations=numbers)).values()
    chip = CHIPS["h100"]
    large = Work("products", False, 1e6, 1e9, chip.bf16_flops)
    small = replace(large, bytes=9e5), replace(large, flops=9e8)
    parts = by_operation({large: 2.0, **dict.fromkeys(small, 5.0)}, chip, record)
    assert parts["products"].calls == 2 and parts["products"].basis == "measured"
    assert parts["products, smaller than measured"].calls == 10
    assert parts["products, smaller than measured"].basis == "assumed"
    assert parts[GAPS].calls == 2


def test_a_chip_on_which_nothing_was_measured(on_h100):
    found = on_h100("h200")
    assert found.expected_seconds is None
    parts = found.by_operation()
    assert {p.basis for p in parts.values()} == {"assumed"} and GAPS not in parts
    assert all(p.expected == p.ideal for p in parts.values())
    on_tpu = Modelled.of(GPU, V5E, Counter())
    assert on_tpu.by_operation() == {} and on_tpu.expected_seconds is None


def test_the_report_says_what_was_measured(on_h100):
    for chip, said, seconds in (
        ("h100", "measured on NVIDIA H100, 2026-01-02", True),
        ("h200", "assumed", False),
    ):
        program = modelled_report.describe(on_h100(chip))
        json.dumps(program)
        result = {
            "platform": "gpu",
            "programs": {n: {"modelled": program} for n in ("codes", "pixels")},
            "roofline_s": 1.0,
        }
        rows = {name.strip(): row(result) for name, row in modelled_report.ROWS}
        assert rows["efficiencies"] == said and bool(rows["codes, expected"]) == seconds
        if seconds:
            parts = program["operations"].values()
            assumed = sum(p["expected"] for p in parts if p["basis"] == "assumed")
            assert 0 < assumed < program["expected_s"]
            share = f"{assumed / program['expected_s']:.0%}"
            assert rows["assumed of these"] == share
        else:
            assert rows["assumed of these"] == ""
        lines = "\n".join(modelled_report.notes(chip, "codes", program))
        assert ("products (measured)" in lines) == ("fusions (assumed)" in lines) == seconds
        # the work that is written gives the same times again
        work = {
            Work(**{k: v for k, v in w.items() if k != "calls"}): w["calls"]
            for w in program["work"]
        }
        again = by_operation(work, CHIPS[chip], efficiencies.of(CHIPS[chip]))
        assert {name: asdict(part) for name, part in again.items()} == program["operations"]


# --- fitting ---


def program(scale: float, numbers: dict[str, Efficiency], gap: float) -> fitting.Measured:
    """A made-up program whose operations take what `numbers` say."""
    work = {
        Work("products", False, 1e8 * scale, 1e9, H200.bf16_flops): 10.0,
        Work("products", False, 1e6, 1e11 * scale, H200.bf16_flops): 30.0,
        Work("write", True, 1e7 * scale, 0.0, H200.bf16_flops): 20.0,
        Work("attention", True, 1e6, 1e9 * scale, H200.bf16_flops, int(132 * scale), 20.0): 5.0,
        Work("attention", True, 1e6, 1e9 * scale, H200.bf16_flops, int(66 * scale), 50.0): 5.0,
    }
    each = Counter()
    for w, calls in work.items():
        each[w.operation] += calls * w.seconds(H200, numbers[w.operation])
    whole = sum(each.values()) + gap * sum(work.values())
    return fitting.Measured(work, each, whole)


GIVEN = Efficiency(0.0, flops=0.4, copy=150e-9)


def test_fitting_finds_the_numbers():
    numbers = {
        "products": Efficiency(4e-6, 0.7, 0.7),
        "write": Efficiency(2e-6, 0.5, 0.5),
        "attention": replace(GIVEN, call=3e-6, program=4e-6),
    }
    programs = [program(scale, numbers, 2e-6) for scale in (1, 8)]
    found = fitting.fit(programs, H200, {"attention": GIVEN})
    assert list(found) == [*numbers, GAPS]
    for name, wanted in {**numbers, GAPS: Efficiency(2e-6)}.items():
        got, right = (astuple(e)[:5] for e in (found[name], wanted))
        assert got == pytest.approx(right, rel=1e-6), name


def test_nothing_is_faster_than_the_peaks():
    fast = {name: ASSUMED for name in ("products", "write", "attention")}
    fast["write"] = Efficiency(5e-6, 2.0, 2.0)
    programs = [program(scale, fast, 0.0) for scale in (1, 8)]
    found = fitting.fit(programs, H200, {})
    assert found["write"].bandwidth == 1 and 0 < found["write"].call < 5e-6
    assert found[GAPS].call == pytest.approx(0, abs=1e-12)


# --- the numbers of an H200 ---

# Work of the programs that were measured, as compiled with jax 0.10.2; milliseconds as in
# docs/lab/h200.md. Operation, whether ours, calls, bytes, FLOPs, rate, programs, copies.
MEASURED = json.loads((Path(__file__).parent / "measured_programs" / "h200.json").read_text())
FITTED = "VAR-d30, batch 1", "VAR-d30, batch 8"


def work_of(name: str) -> dict[Work, float]:
    return {Work(row[0], row[1], *row[3:]): row[2] for row in MEASURED[name]["work"]}


def expected(name: str) -> dict[str, float]:
    """{operation: milliseconds}, small calls with the others."""
    found = Counter()
    for operation, part in by_operation(work_of(name), H200, efficiencies.of(H200)).items():
        found[operation.removesuffix(SMALL)] += 1e3 * part.expected
    return found


@pytest.mark.parametrize("name", FITTED)
def test_operations_take_what_was_measured(name):
    """15 %, and what one digit after the point of a millisecond leaves open."""
    found, measured = expected(name), MEASURED[name]["measured_ms"]["operations"]
    for operation, wanted in measured.items():
        assert found[operation] == pytest.approx(wanted, rel=0.15, abs=0.05), operation
    kernels = sum(found.values()) - found[GAPS]
    assert kernels == pytest.approx(sum(measured.values()), rel=0.05)


@pytest.mark.parametrize("name", MEASURED)
def test_programs_take_what_was_measured(name):
    """Two are fitted. The others are predicted."""
    measured = MEASURED[name]["measured_ms"]["whole"]
    assert sum(expected(name).values()) == pytest.approx(measured, rel=0.15)


def test_the_numbers_of_the_file_are_those_that_fitting_finds():
    programs = []
    for name in FITTED:
        measured = MEASURED[name]["measured_ms"]
        seconds = {operation: 1e-3 * ms for operation, ms in measured["operations"].items()}
        programs.append(fitting.Measured(work_of(name), seconds, 1e-3 * measured["whole"]))
    record = efficiencies.of(H200).operations
    given = {"attention": Efficiency(0.0, flops=0.43, copy=137e-9)}  # counted
    found = fitting.fit(programs, H200, given)
    assert found.keys() == record.keys()
    for operation, numbers in found.items():
        written = astuple(record[operation])[:5]
        assert written == pytest.approx(astuple(numbers)[:5], rel=0.01), operation
