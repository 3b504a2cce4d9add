"""Rule tables of Infinity and its tokenizer, and the conversion of both."""

import dataclasses
import json

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

from ported_weights import rules
from ported_weights.configurations import PublishedModel
from ported_weights.readers import sources
from ported_weights.tables.registry import RULE_TABLES
from tests import released_shapes
from tests.ported_weights.infinity_requests import HERE, WEIGHTS, a_request, converted, refused
from varjax.codecs.bsq import model as bsq
from varjax.errors import UserError
from varjax.models import registry
from varjax.models.infinity.transformer import InfinityConfig
from varjax.nn import parameters

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


def _assert_same(one, other):
    ours, theirs = parameters.named(one), parameters.named(other)
    assert list(ours) == list(theirs)
    for name in ours:
        chex.assert_trees_all_equal(np.float32(ours[name]), np.float32(theirs[name]))


# --- names and shapes of the published sizes ------------------------------------------------------


@pytest.mark.parametrize(
    "name, preset, part, parameters_expected",
    [
        ("infinity_2b", "infinity-2b", "transformer", 2_204_564_032),
        ("infinity_8b", "infinity-8b", "transformer", 8_375_791_824),
        ("bsqvae_d32_f16", "infinity-2b", "codec", 110_118_051),
        ("bsqvae_d14_f8_patchify", "infinity-8b", "codec", 81_624_209),
    ],
)
def test_released_names_and_shapes(name, preset, part, parameters_expected):
    """Every released name matches one rule, and all full-size parameters are filled once."""
    preset = registry.preset(preset)
    kind, config = FAMILY.parts[part], preset.configs[part]
    tensors = released_shapes.read(HERE / "released_shapes.json.gz", name)
    module = kind.abstract(config)
    table = RULE_TABLES[kind.name].rules(config, tensors)
    taken = released_shapes.check(table, tensors, module)
    ignored = sum(n.endswith(("zero_k_bias", "lfq.mask")) for n in tensors)
    assert taken == len(tensors) - ignored
    assert parameters.count(module) == parameters_expected
    if part == "codec":  # names as some releases have them, without the wrappers
        bare = {_without_wrapper(n): t for n, t in tensors.items()}
        assert len(bare) == len(tensors) and set(bare) != set(tensors)
        assert released_shapes.check(table, bare, module) == taken


def _without_wrapper(name: str) -> str:
    """encoder.conv_in.conv.weight -> encoder.conv_in.weight, likewise for norms."""
    *path, wrapper, kind = name.split(".")
    return ".".join([*path, kind]) if wrapper in ("conv", "norm") else name


def test_both_names_of_one_convolution():
    config = registry.preset("infinity-2b").configs["codec"]
    tensors = released_shapes.read(HERE / "released_shapes.json.gz", "bsqvae_d32_f16")
    tensors["decoder.conv_in.bias"] = tensors["decoder.conv_in.conv.bias"]
    with pytest.raises(
        UserError, match="given twice: decoder/conv_in/bias by decoder.conv_in.bias"
    ):
        released_shapes.check(
            RULE_TABLES["BSQVAE"].rules(config, tensors),
            tensors,
            FAMILY.parts["codec"].abstract(config),
        )


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
        _assert_same(_apply(plain, dataclasses.replace(config, block_chunks=chunks))[0], ported)


def _renumbered(arrays: dict) -> dict:
    """The same with names of a model of one chunk."""
    plain = {}
    for name, array in arrays.items():
        match name.split("."):
            case ["block_chunks", i, "module", j, *rest]:
                name = ".".join(["blocks", str(2 * int(i) + int(j)), *rest])
        plain[name] = array
    return plain


def test_modulation_keeps_its_order():
    arrays = _tensors()
    found = _apply(arrays, _config())[0].blocks.modulation_offset[...]
    name = "block_chunks.1.module.0.ada_gss"
    chex.assert_trees_all_equal(found[2], arrays[name][0, 0])


def _problems(arrays, **changes) -> str:
    with pytest.raises(UserError) as caught:
        _apply(arrays, _config(**changes))
    return str(caught.value)


@pytest.mark.parametrize("chunks", [1, 4])
def test_other_chunks_than_configured(chunks):
    """The names in the file say how long a chunk is; reports go by them."""
    arrays, config = _tensors(), _config()
    other = dataclasses.replace(config, block_chunks=chunks)
    _assert_same(_apply(arrays, other)[0], _apply(arrays, config)[0])
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


def test_containers_give_the_same_parameters(tmp_path, torch_zip):
    """Safetensors in bfloat16; a torch file in float32, nested as trainers save it."""
    found, described, said = converted(a_request(tmp_path))
    assert "97 tensors read" in said and "took vae" in said and "739,651 parameters" in said
    arrays = {n: a.astype(np.float32) for n, a in _tensors().items()}
    other = torch_zip.save(tmp_path / "infinity_A.pth", {"trainer": {"gpt_fsdp": arrays}})
    request = a_request(tmp_path, source=str(other), out=str(tmp_path / "again"))
    again, again_described, said = converted(request)
    assert "took trainer/gpt_fsdp" in said
    for part in ("transformer", "codec"):
        _assert_same(found[part], again[part])
    assert described["dtype"] != again_described["dtype"] == "float32"
    assert described["sampling"] == {"cfg": 3.0, "tau": 0.5, "top_k": 900, "top_p": 0.97}
    assert found["transformer"].config.codebook_dim == 16  # left out: the tokenizer says it


def test_shards_and_patchify(tmp_path):
    request = a_request(tmp_path, "infinity_B_sharded", dtype="float32")
    found, described, said = converted(request)
    assert "78 tensors read" in said and found["transformer"].config.bits == 32
    assert described["sampling"]["tau"] == 1.0
    arrays = {}
    for shard in (HERE / "infinity_B_sharded").glob("*.safetensors"):
        arrays |= load_file(shard)
    named = parameters.named(found["transformer"])
    chex.assert_trees_all_equal(
        named["word_embedding/kernel"], arrays["word_embed.weight"].astype(np.float32).T
    )
    for i in range(3):
        expected = arrays[f"block_chunks.{i}.module.0.sa.scale_mul_1H11"].astype(np.float32)
        chex.assert_trees_all_equal(named["blocks/log_scale"][i], expected.reshape(-1))


def test_configuration_files(tmp_path):
    """One configuration per file, or several of which that called as the weights is taken."""
    (tmp_path / "one.json").write_text(json.dumps({**CONFIGS["infinity_A"], "size": "0.25M"}))
    request = a_request(tmp_path, config=str(tmp_path / "one.json"))
    transformer, codec, _ = _configurations(request)
    assert transformer.schedule.num_scales == 10
    assert (transformer.depth, transformer.codebook_dim, codec.base_ch) == (4, 16, 24)
    with pytest.raises(UserError, match=r"several configurations \(bsqvae_p16.*'weights.pth'"):
        _configurations(a_request(tmp_path, source="weights.pth"))


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


def test_presets():
    for name, bits, tau in (("infinity-2b", 32, 0.5), ("infinity-8b", 14, 1.0)):
        transformer, codec, sampling = _configurations({"model": name})
        assert transformer.codebook_dim == codec.codebook_dim == bits and sampling["tau"] == tau


def test_files_of_other_models(tmp_path):
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
    var = HERE.parent / "var" / "c_k5_nol2norm"
    other = dict(request, source=str(var / "var.pth"), config=str(tmp_path / "config.json"))
    refused(other, "looks like VAR transformer weights", tmp_path)
    codec = HERE.parent / "var" / "vae_small"
    wrong = dict(
        model="var-custom",
        source=request["source"],
        tokenizer_source=str(codec / "vae.safetensors"),
        config=str(var / "config.json"),
        tokenizer_config=str(codec / "config.json"),
        out=str(tmp_path / "out"),
    )
    refused(wrong, "looks like Infinity transformer weights", tmp_path)


def test_configurations_that_do_not_fit(tmp_path):
    file = tmp_path / "config.json"
    for changes, match in (
        ({"codebook_dim": 8}, "codebook_dim is 8 for the transformer and 16 for the codec"),
        ({"depth": 6}, r"missing: block_chunks\.2\.module\.0\.ada_gss"),
        ({"embed_dim": 65}, "not a multiple"),
        ({"rms_norm": True}, "rms_norm=True is not supported"),
        ({"size": "2M"}, "unknown size '2M'"),
    ):
        file.write_text(json.dumps({**CONFIGS["infinity_A"], **changes}))
        refused(a_request(tmp_path, config=str(file)), match, tmp_path)
    file.write_text(json.dumps({**CONFIGS["bsqvae_p16_d16"], "codebook_dim": 8}))
    refused(
        a_request(tmp_path, tokenizer_config=str(file)),
        r"(?s)quantizer\.lfq\.mask has shape \[16\]: .*codebook_dim 8",
        tmp_path,
    )
    for name, content, match in (
        ("sampling", {"tau": 0}, "tau=0"),
        ("sampling", {"cfg": [1, 2]}, "cfg lists 2 numbers, the schedule has 13 scales"),
        ("class_names", ["a"], "1 class names, the model has 0 classes"),
    ):
        file.write_text(json.dumps(content))
        refused(a_request(tmp_path, **{name: str(file)}), match, tmp_path)
    refused(
        a_request(tmp_path, tokenizer_source=None),
        "published for Infinity: infinity_vae_d32reg.pth",
        tmp_path,
    )
    refused(a_request(tmp_path, config=None), 'for example {"depth": 32', tmp_path)
