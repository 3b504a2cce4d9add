"""Every command with flags of its own and values that nobody should give: it ends with status 0 or
2, one message and no traceback, and writes nothing outside the folder it is called in.

The last, heavy step of each is taken away: encoding, loading weights, compiling, training.
"""

import contextlib
import functools
import importlib
import io
import os
import shutil
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import __main__ as overview
from experiments.aot import worker
from experiments.cli import command_line
from experiments.cli.reading import choices
from experiments.prompts import condition
from experiments.report import page
from experiments.training import loop
from tests import models_under_test as models
from tests import text_encoder_under_test as encoder
from tests.experiments import made_up_sweep
from tests.properties.mutations import emptied
from varjax.core.errors import UserError
from varjax.storage import checkpoint
from varjax.storage.families import Part
from varjax.storage.pictures import save_png

HEAVY = "here it would begin"  # instead of the last step of a command
FILES = "prompts.txt four.jsonl junk.json list.json object.json junk.npz x.npz junk.pth".split()
FILES += "pictures.npz features.npz own_policy.py broken.py sweep folder".split()
PLACES = [*FILES, "new", "new.json", "folder/new", "no/where", "/proc/x", "/dev/null", ".", ".."]
NUMBERS = ["0", "1", "2", "-1", "1.5", "nan", "inf", "-inf", "1e400", "1e-300", "2147483648"]
NUMBERS += ["9" * 40, "0x10", "1_0", "\u0663", "1,2", "1,,2", ",", "1,x", "3,7,7", " 1 ", "1e3"]
TEXTS = ["", " ", "\0", os.fsdecode(b"\xff"), "x" * 5000, "$", "{}", "%s", "../x", "été", "--help="]
TEXTS += ["all", "full", "auto", "off", "default", "true", "a=b", "a=b,a=c", "=", "a:b+c=d", "\n"]
SOUND = {  # by flag: what takes a command further than to its first check
    **dict.fromkeys(["out", "save", "json", "worker"], ["new", "folder/new"]),
    "model": ["var-d16", "var-custom", "flan-t5"],
    "size": ["small", "0.06M"],
    "geometry": ["layers=2,heads=2,head_dim=8,schedule=1x1;2x2;3x4"],
    "policy_args": ["sinks=1", "window=2", "block_size=8", "accounting=tokens", "path=x.npz"],
    "plugin": ["own_policy.py", "broken.py", "json"],
    "policies": ["swa", "headkv,streaming:sinks=1", "swa,table:path=x.npz", "hack"],
    "budgets": ["0.2", "0.1,0.5", "1"],
    "budget": ["0.2", "1"],
    "target": ["tpu-v5e", "h200,a100"],
    "mesh": ["data=1,model=1", "data=2"],
    "cfg": ["2", "1,2,3,4,5,6"],
    "labels": ["1,2", "43"],
    "prompts": ["prompts.txt", "four.jsonl", "a red apple", " ", "lines:four.jsonl"],
    "text_features": ["features.npz"],
    "given": ["tokens=x.npz", "bits=x.npz,scales=2"],
    "sampling": ["tau=2", "cfg_insertion_layer=0,greedy=true", "object.json"],
    "program": ["segments=2", "layers=scan,decode_batch=2"],
    "settings": ["patch_nums=1,2,8", "ch_mult=1,1,2,2,var_batch_size=16"],
    "num_images": ["2", "2/class", "2/prompt"],
    "calibration": ["calibration.json"],
    "sweep": ["sweep"],
    "data": ["pictures.npz"],
    "op": ["attend", "write"],
    "shape": ["var-d30-t1"],
    "config": ["object.json"],
    "image_size": ["64"],
    "image": ["fruit.png", "mask.png"],
    "mask": ["mask.png", "fruit.png"],
    "source_prompt": ["a dog"],
    "source_probability": ["0.9"],
    "host": ["127.0.0.1"],
    "port": ["0"],
    "kv_bytes": ["2MiB", "1KiB"],
    "api_key": ["prompts.txt"],
}
MOSTLY = {  # given nearly always, as what is required
    "experiments.sweep": ["policies"],
    "experiments.train": ["data", "settings"],
    "experiments.encode_text": ["prompts"],
    "experiments.edit": ["mask"],
    "experiments.serve": ["port"],
}
abstract = functools.cache(Part.abstract)


def _module(command: str):
    package = importlib.import_module(command)
    return importlib.import_module(
        f"{command}.__main__" if hasattr(package, "__path__") else command
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """(template of the working folder, checkpoints)."""
    root = tmp_path_factory.mktemp("commands")
    folder = root / "template"
    (folder / "folder").mkdir(parents=True)
    made_up_sweep.write_sweep(folder / "sweep")
    demo = checkpoint.embedded("demo", "model.json")
    shutil.copy(demo / "calibration.json", folder)
    for name in ("junk.json", "junk.npz", "junk.pth"):
        (folder / name).write_bytes(b"{\xff junk")
    for name, text in (
        ("prompts.txt", "a red apple\n\na dog\n"),
        ("four.jsonl", '{"prompt": "a", "tag": "b", "include": []}\n'),
        ("list.json", '["a", 1]'),
        ("object.json", '{"cfg": 2.0, "depth": 2}'),
        ("own_policy.py", "import varjax\n"),
        ("broken.py", "def ("),
    ):
        (folder / name).write_text(text)
    np.savez(folder / "x.npz", tokens=np.zeros((1, 130), np.int32), kv=np.zeros((2, 3)))
    mask = np.zeros((64, 64), np.uint8)
    mask[32:] = 255
    save_png(folder / "mask.png", mask)
    save_png(folder / "fruit.png", np.full((64, 64, 3), 90, np.uint8))
    pictures = np.zeros((40, 16, 16, 3), np.uint8)
    np.savez(folder / "pictures.npz", images=pictures, labels=np.arange(40) % 2)
    width = models.fixture_model("infinity_a").config.text_channels
    features = {"kv": np.zeros((3, width), np.float32), "lens": np.array([2, 1])}
    np.savez(folder / "features.npz", **features)
    encoder.write_folder(root / "encoder")
    return folder, [
        str(models.checkpoint_folder("infinity_a")),
        str(root / "encoder"),
        str(demo),
        "folder",
    ]


@pytest.fixture
def light(monkeypatch):
    """Nothing heavy starts."""

    def heavy(*_, **__):
        raise UserError(HEAVY)

    names = ("aot", "bench", "serve")
    aot, bench, serve = (_module(f"experiments.{name}") for name in names)
    for owner, name in (
        (condition, "encoded"),
        (condition.text_encoder, "encode_texts"),
        (worker, "here"),
        (loop, "run"),
        (bench.measured, "timed"),
        (bench.bench, "errors"),
        (bench.draw, "rows"),
        (page, "build"),
        (serve, "load_weights"),
    ):
        monkeypatch.setattr(owner, name, heavy)
    refused = {"status": "refused", "error": HEAVY, "needed_bytes": 2**30}
    monkeypatch.setattr(worker, "apart", lambda *_: dict(refused))
    monkeypatch.setattr(aot.listing, "text", lambda *given: "")
    monkeypatch.setattr(aot.chips, "why_unavailable", lambda *names: None)
    monkeypatch.setattr("varjax.generation.compilation_cache.use", lambda: None)
    monkeypatch.setattr("jax.config.update", lambda *_: None)
    # what is light but takes most of the time: shapes of the same few models, searches of tables
    monkeypatch.setattr("varjax.storage.parameters.count", lambda module: 10**6)
    monkeypatch.setattr(Part, "abstract", abstract)
    monkeypatch.setattr("varjax.policies.last_uses.FEW", 0)


@st.composite
def _sound(draw, name: str, flag, checkpoints) -> str:
    """An argument that may well be right."""
    if flag.boolean:
        return draw(st.sampled_from([f"--{name}", f"--no{name}"]))
    usual = [*choices(flag), *SOUND.get(name, ())]
    if name == "checkpoint":
        usual = checkpoints
    elif not usual:
        usual = {"int": ["1", "2", "8"], "float": ["0.5", "1"]}.get(flag.flag_type(), PLACES)
    return f"--{name}={draw(st.sampled_from(usual))}"


@st.composite
def _hostile(draw, name: str) -> str:
    value = draw(st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.sampled_from(PLACES))
    value = draw(st.just(value) | st.text(max_size=8).filter(lambda text: "/" not in text))
    return draw(st.sampled_from([f"--{name}={value}", f"--{name}", f"--{name}={value}", value]))


@st.composite
def _arguments(draw, command: str, flags, checkpoints) -> list[str]:
    """Some flags of a command that may be right, the required ones mostly, and few that are not."""
    names = sorted(flags)
    chosen = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    needed = [n for n in names if n in MOSTLY.get(command, ()) or _is_required(flags[n])]
    chosen += [name for name in needed if name not in chosen and draw(st.integers(0, 9)) < 9]
    given = [draw(_sound(name, flags[name], checkpoints)) for name in chosen]
    wrong = draw(st.lists(st.sampled_from(names), max_size=2)) if draw(st.booleans()) else []
    return draw(st.permutations(given + [draw(_hostile(name)) for name in wrong]))


def _is_required(flag) -> bool:
    return any("must have a value" in validator.message for validator in flag.validators)


def _called(module, arguments: list[str]) -> tuple[int, str, str]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    argv, status = [module.__name__, *arguments], None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line.run(module.main, argv)
        except SystemExit as stop:
            status = stop.code
    for stream in (out, err):
        stream.flush()
    return status, *(s.buffer.getvalue().decode("utf-8", "replace") for s in (out, err))


@pytest.mark.parametrize("command", overview.commands())
@given(data=st.data())
def test_nothing_but_results_and_one_message(command, data, places, light, tmp_path, monkeypatch):
    module, (template, checkpoints) = _module(command), places
    cwd = emptied(tmp_path) / "home" / "cwd"
    shutil.copytree(template, cwd)
    monkeypatch.chdir(cwd)
    arguments = data.draw(_arguments(command, module.FLAGS.values, checkpoints))
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    status, out, err = _called(module, arguments)
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status in (0, 2), (arguments, err)
    assert len(said) == (status == 2) and "Traceback" not in err, (arguments, err)
    assert list(tmp_path.iterdir()) == [cwd.parent] and list(cwd.parent.iterdir()) == [cwd]
    if status == 2:
        left = {p.relative_to(cwd) for p in cwd.rglob("*") if "__pycache__" not in p.parts}
        before = {p.relative_to(template) for p in template.rglob("*")}
        assert left == before, (arguments, left ^ before)
