"""A model and a metric of the user's own, by every command that takes them."""

import csv
import json
import re
import sys

import numpy as np
import pytest

import varjax
from experiments.evaluation import metrics
from tests.conftest import ROOT
from varjax import conditions
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.storage import own_modules

EXAMPLE = ROOT / "docs" / "howto" / "own_model.py"
PAGE = (ROOT / "docs" / "howto" / "own_model.md").read_text("utf-8")
METRIC = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]
MODEL = (f"--plugin={EXAMPLE}", "--model=my-model")


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    """What a test registers and imports is gone after it."""
    kept = [(d, dict(d)) for d in (registry.PRESETS, registry.FAMILIES, metrics.METRICS)]
    monkeypatch.setattr(own_modules, "_LOADED", {})
    modules = set(sys.modules)
    yield
    for content, before in kept:
        content.clear()
        content.update(before)
    for name in set(sys.modules) - modules:
        if name.startswith(("own_mod", "mine_")):
            del sys.modules[name]


def write(folder, text: str) -> str:
    (folder / "mine.py").write_text(text, "utf-8")
    return str(folder / "mine.py")


@pytest.mark.slow
def test_run_and_metric(call, tmp_path):
    """The example is short, draws, keeps to its budget, and a metric of one's own measures it."""
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 120
    out = tmp_path / "out"
    flags = (MODEL[1], "--policy=headkv", "--budget=0.4", "--labels=1,2", "--compare")
    both = f"{MODEL[0]},{write(tmp_path, METRIC)}"
    status, text, err = call("run", *flags, both, f"--out={out}")
    assert status == 0, err
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["kv"]["fraction"] <= 0.4 and report["model"] == "my-model"
    assert 0 < report["fidelity"]["brightness"] < 1 and "brightness to full" in text
    assert np.load(out / "samples.npz")["arr_0"].shape == (2, 32, 32, 3)


def test_plan_and_aot(call, refused):
    status, out, err = call("plan", *MODEL, "--policy=h2o", "--budget=0.3")
    assert status == 0 and "3 layers, 4 heads of 16" in out, err
    refused("aot", "unknown chip", *MODEL, "--target=nothing")


def test_python(tmp_path):
    """Weights of a file of one's own, in the type that is asked for."""
    own = EXAMPLE.read_text("utf-8") + (
        "\n\ndef mine():\n"
        "    networks = {'transformer': MyTransformer, 'codec': MyCodec}\n"
        "    return {n: m(CONFIGS[n], rngs=nnx.Rngs(7)) for n, m in networks.items()}\n"
        "registry.register('other', transformer=MyTransformer, codec=MyCodec, configs=CONFIGS,"
        " weights=mine)\n"
    )
    assert registry.load_module(write(tmp_path, own)) == ("my-model", "other")
    models = [varjax.load(name) for name in ("my-model", "other")]
    first, other = (np.asarray(model.transformer.tokens[...]) for model in models)
    assert first.shape == (64, 64) and not np.array_equal(first, other)
    assert varjax.load("other", "bfloat16").transformer.dtype == "bfloat16"
    assert np.array_equal(first, varjax.load("my-model").transformer.tokens[...])


def test_an_existing_module():
    """docs/howto/own_module.py: an adapter of at most 60 lines gives the module's own logits,
    whatever its layers are called; and the cache is compressed."""
    file = EXAMPLE.with_name("own_module.py")
    adapter = file.read_text("utf-8").split("class Adapter")[1].split("\n# ---")[0]
    assert len(adapter.splitlines()) <= 60
    assert registry.load_module(file) == ("image-gpt",)
    model = varjax.load("image-gpt")
    theirs = sys.modules[type(model.transformer).__module__].trained()
    condition, build = conditions.resolve(model, labels=[3, 7]), varjax.Build(keep_logits=True)
    for policy, budget in (("full", 1), ("headkv", 0.4)):
        options = {"batch_size": 2, "sampling": model.sampling(cfg=1.0), "build": build}
        generator = varjax.Generator(model, policy, budget, **options)
        drawn = generator.draw(condition, np.arange(2))
        assert generator.allocated_bytes <= budget * generator.plan.dense_bytes(2, "float32")
        forward = np.asarray(theirs(condition.numbers, drawn["tokens"][:, :-1]))
        assert (np.abs(forward - drawn["logits"]).max() < 1e-4) == (policy == "full")


BASE = EXAMPLE.read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"mine\.py: line 1: ZeroDivisionError"),
        ("raise SystemExit", "SystemExit"),
        ("x = (", r"line 1: '\(' was never closed"),
        ("x = 1", "it registers no model"),
        (BASE.replace('"my-model"', '"var-d16"'), "model 'var-d16' is known already"),
        (BASE.replace("    hidden_dim: int = 256\n", ""), "its transformer has no hidden_dim"),
        (BASE.replace("transformer=MyTransformer", "transformer=Block"), "is no transformer"),
        (BASE.replace('"my-model"', '"a b"'), "give 1 to 64 ASCII letters"),
    ],
)
def test_models_that_cannot_be(refused, tmp_path_factory, text, message):
    path, known = write(tmp_path_factory.mktemp("own"), text), dict(registry.PRESETS)
    for _ in range(2):
        with pytest.raises(UserError, match=f"model module .*mine.py: .*{message}|{message}"):
            registry.load_module(path)
    assert registry.PRESETS == known and set(registry.FAMILIES).isdisjoint({"my-model"})
    refused("plan", "error: ", f"--plugin={path}", "--model=my-model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "it registers no metric"),
        (METRIC.replace('key="brightness"', 'key="psnr"'), "metric 'psnr' is known already"),
        (METRIC.replace('key="brightness"', 'key="A b"'), "give a key of 1 to 40 letters"),
        (METRIC.replace('needs="images"', 'needs="logits"'), "images or tokens"),
        (METRIC.replace("compare=brightness", "compare=None"), "is no Metric with a function"),
    ],
)
def test_metrics_that_cannot_be(tmp_path, text, message):
    known = set(metrics.METRICS)
    with pytest.raises(UserError, match=message):
        metrics.OWN.load(write(tmp_path, text))
    assert set(metrics.METRICS) == known


def test_a_sweep_has_its_columns(tmp_path):
    """They come last."""
    from experiments.sweep import tables

    before = tables.csv_fields()
    metrics.OWN.load(write(tmp_path, METRIC))
    after = tables.csv_fields()
    assert after[: len(before)] == before and len(set(after)) == len(after)
    assert {"brightness", "brightness_std", "brightness_low"} <= set(after[len(before) :])
    assert next(csv.reader([",".join(after)])) == after
