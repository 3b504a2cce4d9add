"""`experiments.bench --adopt`: times of a machine become a record of the cost model and tuned
tiles, and nothing is written of what cannot be taken. All times are made up."""

import json
from collections import Counter
from dataclasses import asdict

import pytest

from experiments.aot import efficiencies
from experiments.aot.efficiencies import Efficiency
from experiments.aot.work import ASSUMED, Work
from experiments.aot.worker import versions
from experiments.bench import adopt, machine
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
        "steps": [{"name": "a", "status": "finished"}],
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
    assert call("bench", "--machine", f"--adopt={files(content())}")[0] == 0
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
        (content(steps=[{"name": "x", "status": "not run"}]), r"1 steps were not run \(x\)"),
        (content(steps=[]), "0 steps were not run"),
        (content(steps=None), "steps=None"),
        (content(rows=[]), "no times of kernels or products"),
        (content(rows=[{"call": 3}]), "its rows cannot be read"),
        (content(tuned=[WRONG_TILES]), "tuned tiles of NVIDIA H200 cannot be read"),
        (content(tuned=[3]), "tuned tiles of NVIDIA H200 cannot be read"),
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
    (tmp_path / "m.json.partial").mkdir()
    for name in ("m.json", "m.json.partial"):
        with pytest.raises(UserError, match="m.json.partial is the folder of an unfinished run"):
            adopt.show_adopted(str(tmp_path / name))
    with pytest.raises(UserError, match="there is no file"):
        adopt.show_adopted(str(tmp_path / "other.json"))


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
