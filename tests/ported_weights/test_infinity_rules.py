"""Rule tables of Infinity and its tokenizer, and the conversion of both."""

import dataclasses
import json

import chex
import numpy as np
import pytest

from ported_weights import rules
from ported_weights.configurations import PublishedModel
from ported_weights.readers import sources
from ported_weights.tables.registry import RULE_TABLES
from tests import released_shapes
from tests.ported_weights.conversions import assert_same
from tests.ported_weights.infinity_requests import HERE, WEIGHTS, a_request, refused
from varjax.codecs import bsq as bsq
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.models.infinity.transformer import InfinityConfig

CONFIGS = json.loads((HERE / "configs.json").read_text())
FAMILY = registry.family("infinity")


def _configurations(request, say=print):
    names = ("model", "source", "tokenizer_source", "config", "tokenizer_config")
    given = {name: request.get(name) for name in names}
    configs, sampling = PublishedModel(**given).configurations(say)
    return configs["transformer"], configs["codec"], sampling


def _tensors(name: str = "infinity_A") -> dict[str, np.ndarray]:
    source = sources.open_source(HERE / WEIGHTS[name][0])
    return {n: np.array(t.read()) for n, t in source.tensors.items()}


def _apply(arrays: dict, config: InfinityConfig):
    tensors = {n: released_shapes.Shape(a.shape, lambda _, a=a: a) for n, a in arrays.items()}
    part = FAMILY.parts["transformer"]
    return rules.apply(
        RULE_TABLES[part.name].rules(config, tensors), tensors, part.abstract(config)
    )


def _config(**changes) -> InfinityConfig:
    read = FAMILY.parts["transformer"].read({**CONFIGS["infinity_A"], "codebook_dim": 16})
    return dataclasses.replace(read, **changes)


# --- the rules ------------------------------------------------------------------------------------


def test_chunks_of_layers():
    """block_chunks.I.module.J is layer 2 I + J; the same weights with layers numbered through."""
    arrays, config = _tensors(), _config()
    ported = _apply(arrays, config)[0]
    for i in range(2):
        for j in range(2):
            expected = arrays[f"block_chunks.{i}.module.{j}.ffn.fc1.bias"]
            chex.assert_trees_all_equal(ported.blocks.fc1.bias[...][2 * i + j], expected)
    plain = _renumbered(arrays)
    for chunks in (1, 2):
        assert_same(_apply(plain, dataclasses.replace(config, block_chunks=chunks))[0], ported)


def _renumbered(arrays: dict) -> dict:
    """The same with names of a model of one chunk."""
    plain = {}
    for name, array in arrays.items():
        match name.split("."):
            case ["block_chunks", i, "module", j, *rest]:
                name = ".".join(["blocks", str(2 * int(i) + int(j)), *rest])
        plain[name] = array
    return plain


def _problems(arrays, **changes) -> str:
    with pytest.raises(UserError) as caught:
        _apply(arrays, _config(**changes))
    return str(caught.value)


@pytest.mark.parametrize("chunks", [1, 4])
def test_other_chunks_than_configured(chunks):
    """The names in the file say how long a chunk is; reports go by them."""
    arrays, config = _tensors(), _config()
    other = dataclasses.replace(config, block_chunks=chunks)
    assert_same(_apply(arrays, other)[0], _apply(arrays, config)[0])
    text = _problems(arrays, depth=8, block_chunks=chunks)
    assert "missing: block_chunks.2.module.0.ada_gss" in text
    text = _problems(arrays, depth=3, block_chunks=1)
    assert "surplus: block_chunks.1.module.1.ada_gss [1, 1, 6, 64] (the configuration has" in text
    assert "missing" not in text
    text = _problems(_renumbered(arrays), depth=8, block_chunks=chunks)
    assert "missing: blocks.4.ada_gss" in text and "surplus" not in text


def test_missing_in_one_chunk_and_a_key_bias():
    arrays = _tensors()
    del arrays["block_chunks.1.module.0.ca.mat_q.bias"]
    arrays["block_chunks.0.module.1.ca.zero_k_bias"][3] = 1
    arrays["text_proj_for_sos.ca.zero_k_bias"][0] = 1
    text = _problems(arrays)
    assert "missing: block_chunks.1.module.0.ca.mat_q.bias" in text
    assert "block_chunks.0.module.1.ca.zero_k_bias must be zero" in text
    assert "text_proj_for_sos.ca.zero_k_bias must be zero" in text
    far = {n.replace("module.", "module.9"): a for n, a in _tensors().items()}
    assert "surplus: block_chunks.1.module.91.ca_norm.bias" in _problems(far)


def test_length_of_the_unconditional_text():
    """Longer than text_maxlen: cut, and said; shorter: refused, with what to set."""
    arrays = _tensors()
    module, placement = _apply(arrays, _config(text_maxlen=20))
    found = module.unconditional_text[...]
    chex.assert_trees_all_equal(found, arrays["cfg_uncond"][:20])
    reason = "only the first 20 are used: text_maxlen is 20"
    assert ("rows 20 to 31 of cfg_uncond", reason) in placement.ignored
    text = _problems(arrays, text_maxlen=33)
    assert "cfg_uncond is [32, 256], but [33, 256] is expected: set text_maxlen to 32 or" in text
    assert "cfg_uncond is [32, 256], but [32, 128] is expected" in _problems(
        arrays, text_channels=128
    )


# --- conversion -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, tokenizer",
    [
        ({}, "bsq-d32"),
        ({"apply_spatial_patchify": 1}, "bsq-d56"),
        ({"codebook_dim": 16}, "bsq-d16"),
    ],
)
def test_published_tokenizer_is_the_default(changes, tokenizer, tmp_path):
    """It is the one that belongs to the transformer's configuration."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIGS["infinity_A"], "apply_spatial_patchify": 0, **changes}))
    lines = []
    request = a_request(tmp_path, config=str(file), tokenizer_config=None)
    transformer, codec, _ = _configurations(request, lines.append)
    assert codec == bsq.PRESETS[tokenizer]
    assert transformer.codebook_dim == codec.codebook_dim
    assert f"{codec.codebook_dim} bits per position" in "\n".join(lines)


def test_files_of_other_models(tmp_path, request_for):
    """Swapped files, and those of the other family, which shares some names."""
    request = a_request(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["infinity_A"]))
    swapped = dict(
        request,
        source=request["tokenizer_source"],
        tokenizer_source=request["source"],
        config=str(tmp_path / "config.json"),
        tokenizer_config=None,
    )
    refused(swapped, "looks like BSQ-VAE tokenizer weights.*--tokenizer_source", tmp_path)
    var = request_for("c_k5_nol2norm")
    other = dict(request, source=var["source"], config=str(tmp_path / "config.json"))
    refused(other, "looks like VAR transformer weights", tmp_path)
    wrong = dict(var, source=request["source"])
    refused(wrong, "looks like Infinity transformer weights", tmp_path)


CONFIGURATIONS = {
    "bits": ("config", {"codebook_dim": 8}, "codebook_dim is 8 for the transformer and 16 for the"),
    "depth": ("config", {"depth": 6}, r"missing: block_chunks\.2\.module\.0\.ada_gss"),
    "option": ("config", {"rms_norm": True}, "rms_norm=True is not supported"),
    "size": ("config", {"size": "2M"}, "unknown size '2M'"),
    "mask": (
        "tokenizer_config",
        {"codebook_dim": 8},
        r"lfq\.mask has shape \[16\]: .*codebook_dim",
    ),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_configurations_that_do_not_fit(tmp_path, case):
    flag, changes, match = CONFIGURATIONS[case]
    name = {"config": "infinity_A", "tokenizer_config": "bsqvae_p16_d16"}[flag]
    (tmp_path / "given.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    request = a_request(tmp_path, **{flag: str(tmp_path / "given.json")})
    refused(request, f"(?s){match}", tmp_path)


@pytest.mark.parametrize(
    ("flag", "content", "match"),
    [
        ("sampling", {"tau": 0}, "tau=0"),
        ("sampling", {"cfg": [1, 2]}, "cfg lists 2 numbers, the schedule has 13 scales"),
        ("class_names", ["a"], "1 class names, the model has 0 classes"),
        ("tokenizer_source", None, "published for Infinity: infinity_vae_d32reg.pth"),
        ("config", None, "docs/howto/port.md has one of each family"),
        ("source", "weights.pth", r"several configurations \(bsqvae_p16.*'weights.pth'"),
    ],
)
def test_other_files_that_do_not_fit(tmp_path, flag, content, match):
    if isinstance(content, (dict, list)):
        (tmp_path / "given.json").write_text(json.dumps(content))
        content = str(tmp_path / "given.json")
    refused(a_request(tmp_path, **{flag: content}), match, tmp_path)
