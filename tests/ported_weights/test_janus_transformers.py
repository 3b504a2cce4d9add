"""Janus-Pro as the package transformers saves it: the fixture under its names gives the same
checkpoint, and so do the names of the released sizes."""

import dataclasses
import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from ported_weights.configurations import PublishedModel
from ported_weights.readers import sources
from ported_weights.tables.janus import TRANSFORMERS
from tests import models_under_test as models
from tests.ported_weights.conversions import assert_same, converted, refused

# (part of an original name, that in transformers), applied in turn
RENAMED = [
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head", "lm_head"),
    (r"^gen_embed", "model.generation_embeddings"),
    (r"^gen_aligner\.layers\.0", "model.generation_aligner.fc1"),
    (r"^gen_aligner\.layers\.2", "model.generation_aligner.hidden_layers.0"),
    (r"^gen_head\.output_mlp_projector", "model.generation_head.proj_out"),
    (r"^gen_head\.vision_head", "model.generation_head.vision_head"),
    (r"^gen_vision_model", "model.vqmodel"),
    (r"(vqmodel\.decoder)\.conv_blocks", r"\1.up"),
    (r"(vqmodel\.encoder)\.conv_blocks", r"\1.down"),
    (r"(vqmodel\..*)\.res\.", r"\1.block."),
    (r"(vqmodel\..*\.mid)\.0", r"\1.block_1"),
    (r"(vqmodel\..*\.mid)\.1", r"\1.attn_1"),
    (r"(vqmodel\..*\.mid)\.2", r"\1.block_2"),
]
READERS = ["model.vision_model.encoder.layers.0.mlp.fc1.weight", "model.aligner.fc1.weight"]
BARE = {"model_type": "janus", "text_config": {}, "vq_config": {}, "vision_config": {}}
FULL = {
    **BARE,
    "architectures": ["JanusForConditionalGeneration"],
    "image_token_id": 100,
    "text_config": {
        "num_attention_heads": 4,
        "num_key_value_heads": None,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": 3,
        "_attn_implementation_autoset": True,
    },
    "vq_config": {"base_channels": 32, "channel_multiplier": [2, 1], "hidden_act": "gelu"},
    "vision_config": {"image_size": 96, "patch_size": 16},
    "prompt_tokens": 20,
}


def renamed(name: str) -> str:
    for pattern, ours in RENAMED:
        name = re.sub(pattern, ours, name)
    return name


def written(tmp_path, config: dict, **changes) -> PublishedModel:
    """The fixture in a folder as transformers saves it; None takes a tensor out, an array puts one
    in. `__` stands for a dot."""
    source = models.JANUS_FIXTURES / "janus_tiny"
    found = {renamed(n): t.read() for n, t in sources.open_source(source).tensors.items()}
    found |= {name.replace("__", "."): array for name, array in changes.items()}
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {n: np.array(a, order="C") for n, a in found.items() if a is not None}
    save_file(arrays, folder / "model.safetensors")
    return PublishedModel(model="janus-custom", source=str(folder))


def test_the_same_checkpoint(tmp_path):
    """What reads pictures or words is ignored; the padding of generation_config.json wins."""
    extra = {name.replace(".", "__"): np.ones((2, 2), np.float32) for name in READERS}
    extra["model__vqmodel__encoder__down__0__block__0__conv1__bias"] = np.ones(2, np.float32)
    published = written(tmp_path, FULL, **extra)
    (tmp_path / "saved" / "generation_config.json").write_text('{"pad_token_id": 117}')
    parts, _, said = converted(tmp_path, published)
    expected = models.fixture_model("janus_tiny")
    for name, part in parts.items():
        assert_same(part, expected.parts[name])
    config = dataclasses.replace(expected.config, grid=(6, 6), prompt_tokens=20)
    assert parts["transformer"].config == config
    assert parts["codec"].config == expected.codec.config
    assert "the network that reads pictures" in said and "the encoder: generation only" in said
    assert "ignored lm_head.weight: the head for words" in said and "has no" not in said


def test_sizes_of_the_shapes(tmp_path):
    """A configuration without any size; the output says what is the default of transformers."""
    parts, _, said = converted(tmp_path, written(tmp_path, BARE, lm_head__weight=None))
    expected = models.fixture_model("janus_tiny")
    for name, part in parts.items():
        assert_same(part, expected.parts[name])
    own = {"num_attention_heads": 32, "num_key_value_heads": 32, "pad_id": 0, "grid": (24, 24)}
    config = dataclasses.replace(expected.config, max_position_embeddings=2048, **own)
    assert parts["transformer"].config == config
    assert parts["codec"].config == expected.codec.config
    assert "no num_attention_heads: taking the default of transformers, 32" in said
    assert "no pad_token_id: padding of unconditional prompts is id 0" in said


@pytest.mark.parametrize("prefix", ["", TRANSFORMERS.codec])
def test_a_tokenizer_of_its_own(tmp_path, prefix):
    """It is known by its names, which are almost those of Chameleon's."""
    source = written(tmp_path, FULL)
    whole = sources.open_source(source.source).below(TRANSFORMERS.codec).tensors
    arrays = {prefix + n: np.array(t.read()) for n, t in whole.items()}
    save_file(arrays, tmp_path / "vq.safetensors")
    absent = {(TRANSFORMERS.codec + n).replace(".", "__"): None for n in whole}
    (tmp_path / "other").mkdir()
    alone = written(tmp_path / "other", FULL, **absent)
    refused(tmp_path, alone, "no image tokenizer .names that begin with .* or model.vqmodel.")
    vq = {"ch": 32, "ch_mult": [2, 1], "z_channels": 16, "num_res_blocks": 1}
    (tmp_path / "other" / "saved" / "config.json").write_text(json.dumps(FULL | {"vq_tiny": vq}))
    separate = dataclasses.replace(alone, tokenizer_source=str(tmp_path / "vq.safetensors"))
    codec = converted(tmp_path, separate)[0]["codec"]
    assert_same(codec, models.fixture_model("janus_tiny").codec)


WRONG = {
    "activation": (
        {"vq_config": {"hidden_act": "relu"}},
        "config.json: .*hidden_act must be 'gelu'",
    ),
    "positions": (
        {"text_config": {"rope_parameters": {"rope_type": "yarn"}}},
        "rope_scaling=.*yarn.*released models have None",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_model(tmp_path, case):
    changes, match = WRONG[case]
    refused(tmp_path, written(tmp_path, BARE | changes), match)
