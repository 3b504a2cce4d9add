"""Conversion of the fixtures: parameters, numbers of the original implementation, refusals."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ported_weights.readers import sources
from tests.models_under_test import fixture_model
from tests.often import often
from tests.ported_weights.conftest import convert_request
from tests.ported_weights.conversions import assert_same
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.storage import checkpoint, parameters

NAMES = ("a_k10", "b_k6_sharedaln", "c_k5_nol2norm")
LOGITS = 3e-4  # float32 against the original in float32, whose own error is 3.2e-5


def _quiet(request, lines=None):
    convert_request(request, say=(lines if lines is not None else []).append)
    return Path(request["out"])


def _load(request, lines=None):
    """The parts of the converted checkpoint, read from disk, and its description."""
    return checkpoint.load(_quiet(request, lines), registry.CATALOGUE)


@pytest.mark.parametrize("name", often(NAMES[2:], NAMES))
def test_both_containers_give_the_same_parameters(name, request_for, tmp_path, torch_zip):
    """Also the tokenizer, rewritten into the other container."""
    request = request_for(name, "pth")
    tokenizer = sources.open_source(request["tokenizer_source"])
    arrays = {n: np.ascontiguousarray(t.read()) for n, t in tokenizer.tensors.items()}
    if tokenizer.path.suffix == ".pth":
        save_file(arrays, tmp_path / "other")
    else:
        torch_zip.save(tmp_path / "other", arrays)
    request = dict(request, tokenizer_source=str(tmp_path / "other"))
    for part, module in _load(request)[0].items():
        assert_same(module, fixture_model(name).parts[part])


@pytest.mark.parametrize("name", NAMES)
def test_teacher_forced_logits(name, fixtures):
    data = np.load(fixtures / name / "forward.npz")
    transformer = fixture_model(name).transformer
    null = np.full_like(data["labels"], transformer.config.null_label)
    codes = jnp.asarray(data["x_BLCv_wo_first_l"])
    forward = jax.jit(lambda model, labels: model(labels, codes))
    with jax.default_matmul_precision("highest"):
        for labels, key in ((data["labels"], "logits"), (null, "logits_null")):
            logits = forward(transformer, labels)[:, data["logit_pos"]]
            chex.assert_trees_all_close(logits, data[key], atol=LOGITS, rtol=0, custom_message=key)


def test_description(request_for, fixtures):
    parts, content = _load(request_for("c_k5_nol2norm"))
    given = json.loads((fixtures / "c_k5_nol2norm" / "config.json").read_text())
    assert {k: given[k] for k in content["transformer"]} == content["transformer"]
    assert content["format_version"] == 1 and content["family"] == "var"
    assert content["schedule"] == [[n, n] for n in (1, 2, 3, 4, 5)]
    assert content["num_classes"] == 6 and content["dtype"] == "float32"
    maps = [list(pair) for pair in parts["codec"].config.schedule.maps]
    assert maps == content["schedule"]  # not the tokenizer's own six scales
    assert [s["file"] for s in content["sources"]] == ["var.pth", "vae.safetensors"]
    counted = sum(map(parameters.count, parts.values()))
    assert content["parameters"] == counted


def test_storage_type_classes_and_sampling(request_for, tmp_path):
    names = [f"class {i}" for i in range(10)]
    (tmp_path / "classes.json").write_text(json.dumps({"classes": names}))
    (tmp_path / "sampling.json").write_text(json.dumps({"cfg": 3, "top_k": 9, "seed": 1}))
    request = request_for(
        "b_k6_sharedaln",
        dtype="bfloat16",
        class_names=str(tmp_path / "classes.json"),
        sampling=str(tmp_path / "sampling.json"),
    )
    parts, content = _load(request)
    assert parts["transformer"].dtype == jnp.bfloat16
    assert content["dtype"] == "bfloat16"
    assert content["class_names"] == names
    assert content["sampling"] == {"cfg": 3, "top_k": 9, "top_p": 0.0, "more_smooth": False}


# --- refusals: each leaves nothing behind ---------------------------------------------------------


def _refused(request, match, folder):
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=match):
        _quiet(request)
    assert sorted(folder.rglob("*")) == before


def test_swapped_files(request_for, tmp_path):
    request = request_for("b_k6_sharedaln")
    swapped = dict(request, source=request["tokenizer_source"], tokenizer_source=request["source"])
    _refused(swapped, "looks like VQVAE tokenizer weights.*belongs to --tokenizer_source", tmp_path)
    twice = dict(request, tokenizer_source=request["source"])
    _refused(twice, "looks like VAR transformer weights.*belongs to --source", tmp_path)


def test_missing_and_surplus_of_both_files_are_reported_together(request_for, fixtures, tmp_path):
    weights = load_file(fixtures / "b_k6_sharedaln" / "var.safetensors")
    weights["blocks.1.attn.extra"] = weights.pop("blocks.2.ffn.fc1.bias")
    tokenizer = load_file(fixtures / "vae_small" / "vae.safetensors")
    del tokenizer["decoder.conv_out.bias"]
    save_file(weights, tmp_path / "var")
    save_file(tokenizer, tmp_path / "vae")
    request = request_for(
        "b_k6_sharedaln", source=str(tmp_path / "var"), tokenizer_source=str(tmp_path / "vae")
    )
    expected = (
        r"(?s)missing: blocks\.2\.ffn\.fc1\.bias.*surplus: blocks\.1\.attn\.extra"
        r".*missing: decoder\.conv_out\.bias"
    )
    _refused(request, expected, tmp_path)


CONFIGS = {
    "schedule": ({"patch_nums": [1, 3, 2, 4, 6, 8]}, "belongs to another schedule"),
    "attention": ({"attn_l2_norm": False}, "scale_mul_1H11.*attn_l2_norm false, the weights true"),
    "modulation": ({"shared_aln": False}, "shared_aln false, the weights true"),
    "classes": ({"num_classes": 9}, r"class_emb\.weight is \[11, 48\], but \[10, 48\]"),
    "depth": ({"depth": 3}, r"surplus: blocks\.3\.ada_gss .*no place"),
    "vocabulary": ({"vocab_size": 64}, "vocab_size is 64 for .* 128"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_do_not_fit(case, request_for, fixtures, tmp_path):
    changes, match = CONFIGS[case]
    config = json.loads((fixtures / "b_k6_sharedaln" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    request = request_for("b_k6_sharedaln", config=str(tmp_path / "config.json"))
    _refused(request, match, tmp_path)


def test_a_tokenizer_with_one_phi_per_scale_needs_the_same_schedule(
    request_for, fixtures, tmp_path
):
    config = json.loads((fixtures / "vae_small" / "config.json").read_text())
    (tmp_path / "vae.json").write_text(json.dumps({**config, "share_quant_resi": 0}))
    request = request_for("c_k5_nol2norm", tokenizer_config=str(tmp_path / "vae.json"))
    _refused(request, "one phi convolution for each of its 6 scales", tmp_path)


FLAGS = {
    "model": ({"model": "var-d17"}, "unknown model 'var-d17'.*var-d16.*did you mean"),
    "no_config": ({"config": None}, "needs --config=FILE.json"),
    "config_of_a_preset": ({"model": "var-d16"}, "--config is for .*-custom models"),
    "no_tokenizer": ({"tokenizer_source": None}, "--tokenizer_source is required"),
    "no_tokenizer_config": ({"tokenizer_config": None}, "vocab_size .* the published tokenizer"),
    "absent_source": ({"source": "nowhere.pth"}, "no file or folder nowhere.pth"),
    "dtype": ({"dtype": "int8"}, "choose one of float32, bfloat16"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_wrong_requests(case, request_for, tmp_path):
    changes, match = FLAGS[case]
    _refused(request_for("b_k6_sharedaln", **changes), match, tmp_path)


@pytest.mark.parametrize(
    "flag, content, match",
    [
        ("class_names", ["a", "b"], "2 class names, the model has 10"),
        ("class_names", {"x": 1}, "must hold a list of texts"),
        ("sampling", {"cfg": "high"}, "cfg='high'"),
        ("sampling", [1], "names and values"),
        ("sampling", {"cfg": float("nan")}, "small.json: cfg=nan"),
        ("tokenizer_config", {"beta": float("nan")}, "beta is nan"),
    ],
)
def test_wrong_small_files(flag, content, match, request_for, tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(content))
    request = request_for("b_k6_sharedaln", **{flag: str(tmp_path / "small.json")})
    _refused(request, match, tmp_path)


def test_overwriting(request_for, tmp_path):
    request = request_for("b_k6_sharedaln")
    out = _quiet(request)
    before = (out / "model.json").stat().st_mtime_ns
    _refused(request, "exists already.*overwrite", tmp_path)
    again = dict(request, overwrite=True)
    _refused(dict(again, source="nowhere.pth"), "no file", tmp_path)
    (out / "calibration.json").write_text("hours of work")
    _refused(again, "holds 'calibration.json' and is not replaced", tmp_path)
    (out / "calibration.json").unlink()
    _quiet(again)
    assert (out / "model.json").stat().st_mtime_ns > before
    assert checkpoint.load(out, registry.CATALOGUE)[1]["family"] == "var"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_interruption_leaves_nothing(request_for, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("varjax.storage.manifest.write_manifest", interrupted)
    request = request_for("b_k6_sharedaln", out=str(tmp_path / "new" / "folder" / "out"))
    with pytest.raises(KeyboardInterrupt):
        _quiet(request)
    assert list(tmp_path.iterdir()) == []
