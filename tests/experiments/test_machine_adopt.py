"""`experiments.bench --adopt`: times of a machine become a record of the cost model and tuned
tiles, and nothing is written of what cannot be taken. All times are made up."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict

import pytest

from experiments.aot import efficiencies
from experiments.aot.efficiencies import Efficiency
from experiments.aot.work import ASSUMED, Work
from experiments.aot.worker import versions
from experiments.bench import adopt, machine, possible
from experiments.bench.rows import Call, Row
from pallas_kernels.chips import get_chip
from pallas_kernels.ragged_attention import config
from varjax.errors import UserError

H200 = get_chip("h200")
RATE = H200.bf16_flops
TRUE = {
    "products": Efficiency(3e-6, 0.7, 0.7),
    "finish": Efficiency(4e-6, 0.5, 0.5),
    "write": Efficiency(5e-6, 0.4, 0.4),
    "choosing": Efficiency(6e-6, 0.3, 0.3),
    "token attention": Efficiency(2e-6, 0.6, 0.6),
    "attention": Efficiency(2.5e-6, flops=0.5, program=4e-6, copy=150e-9),
}
GAP = 1.5e-6
TILES = config.MosaicConfig(warpgroups=2, block_k=64, buffers=3)
CALL = config.Call(
    operation="attend",
    queries=256,
    slots=512,
    head_dim=64,
    block_size=16,
    dtype="bfloat16",
    kv_dtype="bfloat16",
)


def works(size: int) -> dict[str, Work]:
    """A call of every operation."""
    programs, copies = {1: (1320, 2.0), 3: (132, 54.0), 10: (3960, 30.0)}[size]
    attention = Work("attention", True, 1e6, 1e9 * size, RATE, programs, copies)
    sizes = {"finish": 1e6, "write": 3e6, "choosing": 2e6, "token attention": 4e6}
    found = {n: Work(n, True, b * size, 0.0, RATE) for n, b in sizes.items()}
    products = Work("products", False, 1e8, 1e10 * size, RATE)
    return found | {"attention": attention, "products": products}


def seconds_of(work: Counter) -> float:
    return sum(n * w.seconds(H200, TRUE.get(w.operation, ASSUMED)) for w, n in work.items())


def row(operation: str, work: Counter, gap: float = 0.0, images: int = 1) -> Row:
    seconds = seconds_of(work) + gap * sum(n for w, n in work.items() if w.operation in TRUE)
    return Row(Call(operation, "s", "mosaic", "bfloat16", images), seconds).with_work(work, H200)


def rows() -> list[Row]:
    """Calls as `--machine` times them: attention and write with the kernel that finishes."""
    found = []
    for size in (1, 3, 10):
        each = works(size)
        finish = each["finish"]
        for name, work in each.items():
            with_finish = name in ("attention", "write")
            found.append(row(name, Counter([work] + [finish] * with_finish)))
        program = Counter(
            {**dict.fromkeys(each.values(), 30), Work("fusions", False, 1e6, 0, 0): 9}
        )
        found.append(row("codes", program, GAP))
    return found


def step(name: str, status: object) -> dict:
    return {"name": name, "status": status}


def content(**changes) -> dict:
    """A file of results of an H200."""
    device = {"platform": "gpu", "kind": "NVIDIA H200", "chip": "h200", "versions": versions()}
    entry = {"operation": "attend", "implementation": "mosaic"}
    found = {
        **machine.FORMAT,
        "date": "2026-01-02",
        "quick": False,
        "revision": "abc",
        "device": device | changes.pop("device", {}),
        "driver": "580.1",
        "clocks": {},
        "steps": [step("a", "finished")],
        "rows": [r.as_json() for r in rows()],
        "tuned": [{**entry, "call": asdict(CALL), "config": asdict(TILES)}],
    }
    return found | changes


@pytest.fixture
def files(monkeypatch, tmp_path):
    """files(content): the path of a file that holds it. The data of the cost model and the tuned
    tiles are elsewhere."""
    data = tmp_path / "data" / "efficiencies.json"
    data.parent.mkdir()
    data.write_text(json.dumps({**efficiencies.FORMAT, "chips": []}))
    monkeypatch.setattr(efficiencies, "FILE", data)
    monkeypatch.setattr(efficiencies.adopt, "__defaults__", (data,))
    monkeypatch.setattr(config, "TUNED", tmp_path / "tuned")

    def write(found):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(found) if isinstance(found, (dict, list)) else found)
        return path

    write.data, write.tuned = data, tmp_path / "tuned"
    yield write
    config.tuned.cache_clear()


def test_numbers_are_found_again(call, files):
    status, out, err = call("bench", f"--adopt={files(content())}")
    assert status == 0, err
    [record] = efficiencies.read(files.data).values()
    for name, true in TRUE.items():
        found = record.operations[name]
        work = [works(size)[name] for size in (1, 3, 10)]
        seconds = [w.seconds(H200, found) for w in work]
        assert seconds == pytest.approx([w.seconds(H200, true) for w in work], rel=0.02), name
        assert f"  {name}: call_us" in out
    assert record.operations["attention"].copy > 0  # it copies block by block
    assert record.gap == pytest.approx(GAP, rel=0.05)
    assert record.content["driver"] == "580.1" and record.said == "NVIDIA H200, 2026-01-02"
    assert record.content["revision"] == "abc" and record.content["jax"] == versions()["jax"]
    assert config.read_tuned("NVIDIA H200", "attend", "mosaic") == {CALL: TILES}
    # once more, beside other tiles
    more = {CALL.bucket(): TILES}
    config.write_tuned("NVIDIA H200", "attend", "mosaic", {**more, other_call(): TILES})
    assert call("bench", f"--adopt={files(content())}")[0] == 0
    assert len(config.read_tuned("NVIDIA H200", "attend", "mosaic")) == 2


def other_call() -> config.Call:
    return config.Call(**{**asdict(CALL), "queries": 16})


def test_a_tpu_gives_tiles_only(call, files):
    device = {"platform": "tpu", "kind": "TPU v5 lite", "chip": "tpu-v5e"}
    tiles = config.TPUConfig(block_q=512, copy_keys=128, own_keys=256)
    entry = {"operation": "attend", "implementation": "tpu", "call": asdict(CALL)}
    found = content(device=device, tuned=[{**entry, "config": asdict(tiles)}], rows=[])
    status, out, _ = call("bench", f"--adopt={files(found)}")
    assert status == 0 and "no efficiencies are kept" in out
    assert config.read_tuned("TPU v5 lite", "attend", "tpu") == {CALL: tiles}
    assert not efficiencies.read(files.data)


WRONG_TILES = {"operation": "attend", "implementation": "mosaic", "call": {}, "config": {}}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("{", "cannot read .* as JSON"),
        ([], "no file that `experiments.bench --machine` has written"),
        ({"format": "tuned"}, "no file that"),
        (content(version=9), "it has version 9, this varjax reads 1: measure again"),
        (content(device={"platform": "cpu"}), "measured on a CPU, where kernels are interpreted"),
        (content(device={"kind": "NVIDIA L40S"}), "of the chip 'NVIDIA L40S', whose peaks"),
        (content(device={"kind": None}), "of the chip None, whose peaks are not known"),
        (content(device={"kind": "NVIDIA H100"}), "says chip 'h200', but NVIDIA H100 is h100"),
        (content(device={"versions": versions() | {"jax": "0.9"}}), "jax 0.9, here is 0"),
        (content(device={"versions": None}), "measured with varjax None"),
        ({**content(), "device": 3}, "device=3: give a dict"),
        (content(quick=True), "from --quick, which measures too little"),
        (content(steps=[step("x", "not run")]), r"1 steps were not run \(x\)"),
        (content(steps=[step("x", "failed")]), r"1 steps failed \(x\): .* without them: --skip=x"),
        (content(steps=[step("x", None)]), "unknown status of step x None"),
        (content(steps=[1]), r"steps\[0\]=1: give a step"),
        (content(steps=[]), "0 steps were not run"),
        (content(steps=None), "steps=None"),
        (content(rows=[]), "no times of kernels or products"),
        (content(rows=[{"call": 3}]), "its rows cannot be read"),
        (content(tuned=[WRONG_TILES]), "tuned tiles of NVIDIA H200 cannot be read"),
        (content(tuned=[3]), "tuned tiles of NVIDIA H200 cannot be read"),
        (content(rows=[{}]), r"its rows cannot be read: rows\[0\]"),
        (content(tuned=[{**WRONG_TILES, "implementation": "triton"}] * 2), "cannot be read"),
        ({k: v for k, v in content().items() if k != "driver"}, "driver=None: it must be a text"),
        ({k: v for k, v in content().items() if k != "date"}, "date=None: it must be a text"),
        ({k: v for k, v in content().items() if k != "revision"}, "revision=None"),
        (content(date="today"), "date='today': write year-month-day"),
    ],
)
def test_what_is_refused(call, files, found, message):
    path, before = files(found), files.data.read_bytes()
    with pytest.raises(UserError, match=message):
        adopt.show_adopted(str(path))
    assert call("bench", f"--adopt={path}")[0] == 2
    assert files.data.read_bytes() == before and not files.tuned.exists()


def test_an_unfinished_run_is_refused(files, tmp_path):
    partial = tmp_path / "m.json.partial"
    partial.mkdir()
    with pytest.raises(UserError, match="a folder that no --machine has made: name the file"):
        adopt.show_adopted(str(partial))
    settings = dict.fromkeys(machine.OF_A_MACHINE, "")
    (partial / "settings.json").write_text(json.dumps(settings))
    for name in ("m.json", "m.json.partial"):
        with pytest.raises(UserError, match="m.json.partial is the folder of an unfinished run"):
            adopt.show_adopted(str(tmp_path / name))
    with pytest.raises(UserError, match="there is no file"):
        adopt.show_adopted(str(tmp_path / "other.json"))


# --- what cannot be ---


def changed(row: int, **numbers) -> dict:
    """The file with other numbers in a row; those of its kernels under "work"."""
    found = content()
    work = numbers.pop("work", {})
    found["rows"][row] |= numbers
    for kernel in found["rows"][row]["work"]:
        kernel |= work
    return found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            changed(3, seconds=-1.0),
            r"rows\[3\] \('token attention' 's', 'mosaic'\): seconds=-1 is outside",
        ),
        (changed(3, seconds=0.0), "seconds=0 is outside"),
        (changed(3, seconds=math.nan), "seconds=nan is outside"),
        (changed(3, seconds=math.inf), "seconds=inf is outside"),
        (changed(3, seconds=1e300), "no call has more than 3600 s"),
        (changed(3, seconds=1e-12), "1e-12 s: it takes 1e-07 s at least: no kernel starts"),
        (changed(5, seconds=6e-6), "takes 7.77e-06 s at least: for what it computes"),
        (
            changed(6, seconds=2e-5, work={"calls": 10.0}),
            "for what it computes, at the peak of h200",
        ),
        (changed(3, seconds=1e-3, bytes=8e9), "for what it moves, as fast as h200 can"),
        (changed(3, seconds=2e-7, bytes=5e7), "for what it moves, as fast as h200 can"),
        (changed(3, work={"calls": 0}), "work: calls=0 is outside"),
        (changed(3, work={"calls": 1.5}), "work: calls=1.5: it must be a whole number"),
        (changed(5, work={"rate": 1e300}), "work: rate=1e[+]300: h200 has no units of that peak"),
        (changed(3, bytes=math.nan), "bytes=nan is outside"),
        (changed(3, flops=-1), "flops=-1 is outside"),
        (changed(3, work={"programs": -1}), "programs=-1: choose 0 to"),
        (changed(3, work={"more": 1}), "does not have the entries bytes, calls"),
    ],
)
def test_what_no_chip_can_do_is_refused(call, files, found, message):
    path, before = files(found), files.data.read_bytes()
    with pytest.raises(UserError, match=message):
        adopt.show_adopted(str(path))
    status, _, err = call("bench", f"--adopt={path}")
    assert status == 2 and err.count("error:") == 1
    assert files.data.read_bytes() == before and not files.tuned.exists()


def test_data_that_lie_in_the_cache_may_move_faster_than_memory():
    """40 MB in 4 us are 10 TB/s, of 4.8 that the memory has; 8-bit products have a peak of their
    own."""
    fast = Row(Call("finish", "s", "mosaic", "bfloat16"), 4e-6, bytes=40e6)
    possible.check(0, fast, H200)
    work = Work("products, other types", False, 1e6, 1.5e9, H200.int8_flops)
    kernel = {**asdict(work), "calls": 1.0}
    possible.check(0, Row(fast.call, 1e-6, work=(kernel,)), H200)
    with pytest.raises(UserError, match="for what it computes"):
        possible.check(0, Row(fast.call, 1e-6, work=({**kernel, "rate": RATE},)), H200)


MISSING = object()
BAD = (MISSING, None, -1, 0, "x", [], {}, math.nan, math.inf, 1e300, 10**400, True)


def leaves(found: object, path: tuple = ()) -> Iterator[tuple]:
    """The ways to everything that a file holds."""
    inner = found.items() if isinstance(found, dict) else ()
    inner = enumerate(found) if isinstance(found, list) else inner
    for key, value in inner:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def test_any_damage_is_refused_or_does_no_harm(files, monkeypatch):
    """Every value is replaced by such as no run writes, and left out."""
    monkeypatch.setattr(machine, "commit", lambda: None)  # asked of a process each time
    good, before = content(), files.data.read_bytes()
    good["rows"] = good["rows"][4:7]  # attention, products, codes
    good["rows"][2]["work"] = good["rows"][2]["work"][:1]
    taken = 0
    for *path, last in leaves(good):
        for bad in BAD:
            found = deepcopy(good)
            place = found
            for key in path:
                place = place[key]
            place[last] = bad
            if bad is MISSING:
                del place[last]
            try:
                adopt.show_adopted(str(files(found)))
            except UserError:
                assert files.data.read_bytes() == before, (path, last, bad)
            else:
                taken += 1
                efficiencies.read(files.data)
                files.data.write_bytes(before)
    assert taken


# --- steps that failed, other revisions ---


def test_failed_steps_are_left_out_by_name(call, files):
    """Operations that were not measured then keep the numbers of an older record, and say so."""
    assert call("bench", f"--adopt={files(content())}")[0] == 0
    older = efficiencies.read(files.data)["h200"].content["operations"]["write"]
    steps = [step("a", "finished"), step("b", "failed"), step("c", "failed")]
    rows_ = [r for r in content()["rows"] if r["call"]["operation"] != "write"]
    found = content(steps=steps, rows=rows_, date="2026-02-03", revision="def")
    status, _, err = call("bench", f"--adopt={files(found)}", "--skip=b")
    assert status == 2 and "1 steps failed (c)" in err and "--skip=b,c" in err
    for skip, why in (("b,c,a", "step a is finished"), ("b,c,d", "unknown step 'd'")):
        status, _, err = call("bench", f"--adopt={files(found)}", f"--skip={skip}")
        assert status == 2 and why in err
    for _ in range(2):  # the second time the record already says where they are from
        status, out, err = call("bench", f"--adopt={files(found)}", "--skip=b,c")
        assert status == 0, err
        assert "  write: kept: of 2026-01-02 at abc\n" in out
        assert "without the steps that failed: b, c; kept numbers are older ones" in out
        record = efficiencies.read(files.data)["h200"].content
        kept = {**older, "note": "kept: of 2026-01-02 at abc"}
        assert record["operations"]["write"] == kept and record["date"] == "2026-02-03"


def test_another_revision_is_named(call, files, monkeypatch):
    monkeypatch.setattr(machine, "commit", lambda: "0123456789ab")
    for revision, said in (("abc", True), ("0123456789ab", False), ("0123456", False)):
        status, out, _ = call("bench", f"--adopt={files(content(revision=revision))}")
        assert status == 0
        assert (f"it was measured at {revision}, here is 0123456789ab: kernels may" in out) == said
        assert efficiencies.read(files.data)["h200"].content["revision"] == revision
    monkeypatch.setattr(machine, "commit", lambda: None)
    assert "it was measured at" not in call("bench", f"--adopt={files(content())}")[1]


# --- tiles ---


def test_tiles_are_those_of_the_chip(files):
    """One implementation for an operation, the one that runs there, and tiles that are tried."""
    [entry] = content()["tuned"]
    triton = {"block_q": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
    of_triton = {**entry, "implementation": "triton", "config": triton}
    huge = {**entry, "config": entry["config"] | {"block_k": 2**70}}
    tpu = {"platform": "tpu", "kind": "TPU v5 lite", "chip": "tpu-v5e"}
    for found, message in (
        (content(tuned=[entry, of_triton]), r"tuned\[1\]: they are of triton, h200 runs mosaic"),
        (content(tuned=[entry], device=tpu, rows=[]), "they are of mosaic, tpu-v5e runs tpu"),
        (content(tuned=[huge]), "--tune does not try MosaicConfig"),
    ):
        with pytest.raises(UserError, match=message):
            adopt.show_adopted(str(files(found)))
        assert not files.tuned.exists()


def test_tuned_tiles_of_another_device_are_not_replaced(files):
    """Nothing is written then, the data of the cost model neither."""
    other = config.write_tuned("NVIDIA H100", "attend", "mosaic", {})
    target = config.tuned_path("NVIDIA H200", "attend")
    target.parent.mkdir()
    target.write_bytes(other.read_bytes())
    before = files.data.read_bytes()
    with pytest.raises(UserError, match="device is 'nvidia-h100', needed is 'nvidia-h200'"):
        adopt.show_adopted(str(files(content())))
    assert files.data.read_bytes() == before and target.read_bytes() == other.read_bytes()
