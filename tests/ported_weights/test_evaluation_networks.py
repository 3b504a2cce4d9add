"""Converting the networks of evaluation: all tensors once, widths from shapes, clear errors."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments.evaluation.extractors import open_inception, open_lpips
from experiments.evaluation.protocols import PROTOCOLS
from ported_weights.convert import convert_part
from tests.experiments.evaluation import recipe
from varjax.core.errors import UserError
from varjax.storage import parameters

HEADS = {net: str(recipe.FIXTURES / f"{net}_heads.pth") for net in ("alex", "vgg")}


@pytest.fixture(scope="module")
def weights():
    return recipe.inception()


def converted(tmp_path, model, arrays, name="w.safetensors", **options):
    save_file(arrays, tmp_path / name)
    convert_part(model, str(tmp_path / name), str(tmp_path / "out"), say=recipe.quiet, **options)
    return tmp_path / "out"


def test_inception_from_a_torch_file(torch_zip, weights, tmp_path):
    """Counters of training steps may be there; every tensor finds its place."""
    counters = {
        name.replace("running_mean", "num_batches_tracked"): np.array(3)
        for name in weights
        if name.endswith("running_mean")
    }
    source = torch_zip.save(tmp_path / "w8.pth", weights | counters)
    lines = []
    convert_part("inception-fid", str(source), str(tmp_path / "out"), say=lines.append)
    assert "472 tensors read" in lines[0] and "94 counters of training steps ignored" in lines[0]
    network = open_inception(str(tmp_path / "out"), PROTOCOLS["adm"])
    assert network.widths == {"pool": 256, "spatial": 2023, "logits": 126}
    found = parameters.named(network.module)
    assert sum(a.size for a in found.values()) == sum(a.size for a in weights.values())
    kernel = weights["Mixed_7b.branch3x3_2a.conv.weight"]
    np.testing.assert_array_equal(
        found["Mixed_7b/branch3x3_2a/kernel"], kernel.transpose(2, 3, 1, 0)
    )
    assert not network.identity["published_weights"]
    described = json.loads((tmp_path / "out" / "inception.json").read_text())
    assert described["sources"] == network.identity["sources"]


PROBLEMS = {
    "missing": (
        lambda w: w.pop("Mixed_6c.branch7x7_2.bn.bias"),
        "missing: Mixed_6c.branch7x7_2.bn.bias",
    ),
    "shape": (
        lambda w: w.update({"Mixed_7a.branch3x3_1.bn.weight": np.zeros(3, np.float32)}),
        r"wrong shape: Mixed_7a.branch3x3_1.bn.weight is \[3\]",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_other_weights_are_refused(weights, tmp_path, case):
    change, problem = PROBLEMS[case]
    arrays = dict(weights)
    change(arrays)
    with pytest.raises(UserError, match=problem):
        converted(tmp_path, "inception-fid", arrays)
    assert not (tmp_path / "out").exists()


def test_lpips_takes_two_files(tmp_path):
    backbone = recipe.lpips_backbone("alex")
    backbone["classifier.1.weight"] = np.zeros((4, 4), np.float32)
    out = converted(tmp_path, "lpips-alex", backbone, heads_source=HEADS["alex"])
    network = open_lpips(str(out))
    assert [source["file"] for source in network.identity["sources"]] == [
        "w.safetensors",
        "alex_heads.pth",
    ]
    assert network.identity["name"] == "lpips alex, version 0.1"
    assert (np.asarray(network.module.head_0[...]) >= 0).all()


LPIPS = {
    "no heads": (None, "--heads_source is required: the file alex.pth"),
    "other heads": (HEADS["vgg"], r"wrong shape: lin1.model.1.weight"),
    "no heads in it": (str(recipe.FIXTURES / "fid.npz"), "is a zip archive but not one"),
}


@pytest.mark.parametrize("case", LPIPS)
def test_other_heads_are_refused(tmp_path, case):
    heads, problem = LPIPS[case]
    with pytest.raises(UserError, match=problem):
        converted(tmp_path, "lpips-alex", recipe.lpips_backbone("alex"), heads_source=heads)
    assert not (tmp_path / "out").exists()
