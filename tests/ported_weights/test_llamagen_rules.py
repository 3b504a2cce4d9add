"""Rule tables of LlamaGen and its tokenizer, and the conversion of both from all containers."""

import dataclasses
import json

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ported_weights import rules
from ported_weights.configurations import PublishedModel
from ported_weights.convert import convert
from ported_weights.readers import sources
from ported_weights.tables.registry import RULE_TABLES
from tests import models_under_test as models
from tests import released_shapes
from varjax.codecs.vq.config import VQConfig
from varjax.errors import UserError
from varjax.models import registry
from varjax.nn import parameters
from varjax.storage import checkpoint

HERE = models.LLAMAGEN_FIXTURES
FAMILY = registry.family("llamagen")
CONFIGS = json.loads((HERE / "configs.json").read_text())


def weights(file: str = "gpt_c2i.pt") -> dict[str, np.ndarray]:
    """{published name: array} of a fixture."""
    return {n: np.array(t.read()) for n, t in sources.open_source(HERE / file).tensors.items()}


def converted(tmp_path, weights_file: str = "gpt_c2i.pt", **changes) -> tuple[dict, dict, str]:
    """Parts and description of the checkpoint, read from disk, and what the command says."""
    lines = []
    convert(files(tmp_path, weights_file, **changes), str(tmp_path / "out"), say=lines.append)
    return *checkpoint.load(tmp_path / "out", registry.CATALOGUE), "\n".join(lines)


def refused(tmp_path, match: str, **changes) -> None:
    published = files(tmp_path, "gpt_c2i.pt", **changes)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=match):
        convert(published, str(tmp_path / "out"), say=lambda line: None)
    assert sorted(tmp_path.rglob("*")) == before


def files(tmp_path, weights_file: str, **changes) -> PublishedModel:
    """With files of one configuration each, for weights that are called otherwise."""
    config, tokenizer = one_config(tmp_path, "gpt_c2i"), one_config(tmp_path, "vq")
    changes = {"config": config, "tokenizer_config": tokenizer, **changes}
    return dataclasses.replace(models.llamagen_files(weights_file), **changes)


def one_config(tmp_path, name: str, **changes) -> str:
    path = tmp_path / f"{name}{len(changes)}.json"
    path.write_text(json.dumps({**CONFIGS[name], **changes}))
    return str(path)


def assert_same(one, other) -> None:
    ours, theirs = parameters.named(one), parameters.named(other)
    assert list(ours) == list(theirs)
    for name in ours:
        chex.assert_trees_all_equal(np.float32(ours[name]), np.float32(theirs[name]))


# --- names and shapes of the published sizes ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "preset", "count"),
    [
        ("GPT-B_c2i", "llamagen-b-256", 110_888_448),
        ("GPT-L_c2i", "llamagen-l-384", 342_910_976),
        ("GPT-XL_c2i", "llamagen-xl-384", 774_699_520),
        ("GPT-XXL_c2i", "llamagen-xxl-384", 1_410_972_672),
        ("GPT-3B_c2i", "llamagen-3b-384", 3_096_659_200),
        ("GPT-XL_t2i", "llamagen-t2i-xl-256", 777_923_840),
        ("GPT-XL_t2i", "llamagen-t2i-xl-512", 777_923_840),
        ("VQ-16", "llamagen-b-256", 71_883_403),
        ("VQ-8", "llamagen-b-256", 70_109_835),
    ],
)
def test_released_names_and_shapes(name, preset, count):
    """Every released name matches one rule, and all full-size parameters are filled once."""
    part = "codec" if name.startswith("VQ") else "transformer"
    kind, config = FAMILY.parts[part], registry.preset(preset).configs[part]
    if name == "VQ-8":
        config = VQConfig(ch_mult=(1, 2, 2, 4))
    tensors = released_shapes.read(HERE / "released_shapes.json.gz", name)
    module = kind.abstract(config)
    taken = released_shapes.check(RULE_TABLES[kind.name].rules(config, tensors), tensors, module)
    assert taken == len(tensors) and parameters.count(module) == count


# --- containers -----------------------------------------------------------------------------------


def test_all_containers_give_the_same_parameters(tmp_path, torch_zip):
    """A state dict under "model", bare, of data parallelism, and a safetensors file."""
    arrays, expected = weights(), models.fixture_model("llamagen_c2i").transformer
    bare = torch_zip.save(tmp_path / "c2i_XXL_384.pt", arrays)
    wrapped = torch_zip.save(tmp_path / "w.pt", {f"module.{n}": a for n, a in arrays.items()})
    save_file(arrays, tmp_path / "c2i.safetensors")
    part, config = FAMILY.parts["transformer"], expected.config
    for source in (bare, wrapped, tmp_path / "c2i.safetensors"):
        tensors = sources.open_source(source, RULE_TABLES[part.name].signature).tensors
        table = RULE_TABLES[part.name].rules(config, tensors)
        assert_same(rules.apply(table, tensors, part.abstract(config))[0], expected)


def test_a_training_checkpoint(tmp_path, torch_zip):
    """Weights and their average beside each other: the user says which; the script's arguments, an
    object of a class, are no obstacle."""
    arrays = weights()
    script = torch_zip.Instance(torch_zip.Name("argparse", "Namespace"), {"lr": 0.1})
    averaged = {n: a / 2 for n, a in arrays.items()}
    content = {"model": arrays, "ema": averaged, "steps": 10, "args": script}
    pickled = torch_zip.save(tmp_path / "train.pt", content)
    refused(tmp_path, "several state dicts: model .25 tensors., ema", source=str(pickled))
    parts, _, said = converted(tmp_path, source=str(pickled), source_key="ema")
    expected = parameters.named(models.fixture_model("llamagen_c2i").transformer)
    found = parameters.named(parts["transformer"])
    chex.assert_trees_all_close(found, {n: a / 2 for n, a in expected.items()}, rtol=1e-6)
    assert "took ema" in said


def test_fixtures_of_both_containers_are_equal(shared_dir, tmp_path):
    """The original's own safetensors file holds bfloat16 of the same values."""
    file = shared_dir / "fixtures" / "llamagen" / "gpt_c2i.safetensors"
    parts, described, _ = converted(tmp_path, source=str(file))
    assert described["dtype"] == "bfloat16"
    assert_same(parts["transformer"], models.fixture_model("llamagen_c2i").transformer)


# --- what is beside the weights -------------------------------------------------------------------


def test_buffers_are_ignored(tmp_path):
    """The tokenizer's record of used codes, which released files have; buffers of a run."""
    codec = load_file(HERE / "vq.safetensors")
    codec["quantize.codebook_used"] = np.zeros(65536, np.float32)
    save_file(codec, tmp_path / "vq_ds16_c2i.safetensors")
    gpt = weights() | {"freqs_cis": np.zeros((65, 8, 2), np.float32)}
    gpt["layers.0.attention.kv_cache.k_cache"] = np.zeros((2, 4, 72, 16), np.float32)
    save_file(gpt, tmp_path / "gpt.safetensors")
    parts, described, said = converted(
        tmp_path,
        source=str(tmp_path / "gpt.safetensors"),
        tokenizer_source=str(tmp_path / "vq_ds16_c2i.safetensors"),
    )
    model = models.fixture_model("llamagen_c2i")
    assert_same(parts["transformer"], model.transformer)
    assert_same(parts["codec"], model.codec)
    assert "ignored quantize.codebook_used: statistics of the training run" in said
    assert "ignored freqs_cis" in said and "kv_cache.k_cache: the cache of a run" in said
    assert (described["num_classes"], described["schedule"]) == (20, [[8, 8]])
    assert described["sampling"]["cfg"] == 1.75


def test_texts_instead_of_classes(tmp_path):
    parts, described, _ = converted(
        tmp_path, "gpt_t2i.safetensors", config=one_config(tmp_path, "gpt_t2i")
    )
    assert "num_classes" not in described
    assert described["sampling"] == {
        **{"cfg": 7.5, "tau": 1.0, "cfg_interval": -1, "top_k": 256, "top_p": 0.0}
    }
    assert_same(parts["transformer"], models.fixture_model("llamagen_t2i").transformer)


# --- what does not fit ----------------------------------------------------------------------------


def test_another_record_of_used_codes(tmp_path):
    codec = load_file(HERE / "vq.safetensors")
    codec["quantize.codebook_used"] = np.zeros(100, np.float32)
    save_file(codec, tmp_path / "vq.safetensors")
    match = r"wrong value: quantize.codebook_used has shape \[100\] instead of \[65536\]"
    refused(tmp_path, match, tokenizer_source=str(tmp_path / "vq.safetensors"))


CASES = {
    "another depth": ({"n_layer": 4}, "missing: layers.3.attention.wo.weight"),
    "fewer layers": ({"n_layer": 2}, "surplus: layers.2.attention.*no place for it"),
    "another width": ({"dim": 128}, r"output.weight is \[256, 64\], which becomes \[64, 256\]"),
    "another rounding": ({"multiple_of": 256}, r"w1.weight is \[192, 64\].*\[64, 256\]"),
    "other classes": (
        {"num_classes": 30},
        r"embedding_table.weight is \[21, 64\], but \[31, 64\] is expected",
    ),
    "no class for none": ({"class_dropout_prob": 0}, r"but \[20, 64\] is expected"),
    "texts": (
        {"model_type": "t2i", "caption_dim": 32, "cls_token_num": 120},
        "the configuration says model_type t2i, the weights c2i",
    ),
    "another vocabulary": ({"vocab_size": 128}, "vocab_size is 128 .* and 256 for the codec"),
    "grouped queries": ({"n_kv_head": 2}, "n_kv_head=2 is not supported"),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_of_another_size(tmp_path, case):
    values, match = CASES[case]
    refused(tmp_path, match, config=one_config(tmp_path, "gpt_c2i", **values))


def test_weights_of_a_published_size(tmp_path):
    """Both files are read before anything is refused."""
    preset = {"model": "llamagen-b-256", "config": None, "tokenizer_config": None}
    for match in ("missing: layers.11.ffn_norm", r"decoder.conv_in.bias is \[32\], but \[512\]"):
        refused(tmp_path, match, **preset)
    match = "--config is for .-custom models; llamagen-b-256 has a published configuration"
    refused(tmp_path, match, model="llamagen-b-256")


def test_swapped_files(tmp_path):
    names = {"source": "vq.safetensors", "tokenizer_source": "gpt_c2i.pt"}
    swapped = {flag: str(HERE / name) for flag, name in names.items()}
    match = "looks like VQ tokenizer weights, not LlamaGen transformer weights"
    refused(tmp_path, match, **swapped)


def test_a_text_encoder_for_classes(tmp_path):
    refused(tmp_path, "LlamaGen draws classes, not texts", text_encoder_source=str(tmp_path))
