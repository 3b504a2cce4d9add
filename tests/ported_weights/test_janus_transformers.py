"""Janus-Pro as the package transformers saves it: the fixture under its names gives the same
checkpoint, and so do the names of the released sizes."""

import dataclasses
import json
import re

import chex
import numpy as np
import pytest
from safetensors.numpy import save_file

from ported_weights.configurations import PublishedModel
from ported_weights.convert import convert
from ported_weights.readers import sources
from ported_weights.tables.janus import TRANSFORMERS
from ported_weights.tables.registry import RULE_TABLES
from tests import models_under_test as models
from tests import released_shapes
from varjax.errors import UserError
from varjax.models import registry
from varjax.nn import parameters
from varjax.storage import checkpoint

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


def converted(tmp_path, published: PublishedModel) -> tuple[dict, str]:
    lines = []
    convert(published, str(tmp_path / "out"), say=lines.append)
    return checkpoint.load(tmp_path / "out", registry.CATALOGUE)[0], "\n".join(lines)


def refused(tmp_path, published: PublishedModel, match: str) -> None:
    with pytest.raises(UserError, match=match) as error:
        convert(published, str(tmp_path / "out"), say=lambda line: None)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def check_arrays(parts: dict) -> None:
    """All parameters are those that the original names give, which other tests check."""
    expected = models.fixture_model("janus_tiny")
    for name, part in parts.items():
        ours, theirs = parameters.named(part), parameters.named(expected.parts[name])
        assert list(ours) == list(theirs)
        for leaf in ours:
            chex.assert_trees_all_equal(np.float32(ours[leaf]), np.float32(theirs[leaf]))


def test_the_same_checkpoint(tmp_path):
    """What reads pictures or words is ignored; the padding of generation_config.json wins."""
    extra = {name.replace(".", "__"): np.ones((2, 2), np.float32) for name in READERS}
    extra["model__vqmodel__encoder__down__0__block__0__conv1__bias"] = np.ones(2, np.float32)
    published = written(tmp_path, FULL, **extra)
    (tmp_path / "saved" / "generation_config.json").write_text('{"pad_token_id": 117}')
    parts, said = converted(tmp_path, published)
    check_arrays(parts)
    expected = models.fixture_model("janus_tiny")
    config = dataclasses.replace(expected.config, grid=(6, 6), prompt_tokens=20)
    assert parts["transformer"].config == config
    assert parts["codec"].config == expected.codec.config
    assert "the network that reads pictures" in said and "the encoder: generation only" in said
    assert "ignored lm_head.weight: the head for words" in said and "has no" not in said


def test_sizes_of_the_shapes(tmp_path):
    """A configuration without any size; the output says what is the default of transformers."""
    parts, said = converted(tmp_path, written(tmp_path, BARE, lm_head__weight=None))
    check_arrays(parts)
    expected = models.fixture_model("janus_tiny")
    own = {"num_attention_heads": 32, "num_key_value_heads": 32, "pad_id": 0, "grid": (24, 24)}
    config = dataclasses.replace(expected.config, max_position_embeddings=2048, **own)
    assert parts["transformer"].config == config
    assert parts["codec"].config == expected.codec.config
    assert "no num_attention_heads: taking the default of transformers, 32" in said
    assert "no pad_token_id: padding of unconditional prompts is id 0" in said


@pytest.mark.parametrize("has_encoder", [False, True])
@pytest.mark.parametrize("size", ["1b", "7b"])
def test_released_names(size, has_encoder):
    """Every name of the released sizes matches one rule, and all parameters are filled once."""
    shapes = models.JANUS_FIXTURES / "released_shapes.json.gz"
    given = released_shapes.read(shapes, f"janus_pro_{size}_generation_part")
    given = {renamed(n): t for n, t in given.items()}
    given |= {name: released_shapes.Shape((2, 2)) for name in READERS}
    preset, parts = registry.preset(f"janus-pro-{size}"), registry.family("janus").parts
    codec = {n.removeprefix(TRANSFORMERS.codec): t for n, t in given.items() if "vqmodel" in n}
    config = dataclasses.replace(preset.configs["codec"], has_encoder=has_encoder)
    cases = {"transformer": (given, preset.configs["transformer"]), "codec": (codec, config)}
    taken = {}
    for name, (tensors, config) in cases.items():
        table = RULE_TABLES[parts[name].name].rules(config, tensors)
        module = parts[name].abstract(config)
        taken[name] = released_shapes.check(table, tensors, module)
    expected = {"1b": 227, "7b": 281}[size], (197, 343)[has_encoder]
    assert (taken["transformer"], taken["codec"]) == expected


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
    check_arrays(converted(tmp_path, separate)[0])


WRONG = {
    "activation": (
        {"vq_config": {"hidden_act": "relu"}},
        "config.json: .*hidden_act must be 'gelu'",
    ),
    "aligner": ({"vq_config": {"num_hidden_layers": 3}}, "num_hidden_layers must be 2"),
    "no section": ({"text_config": [1]}, r"text_config is \[1\], it must hold names and values"),
    "positions": (
        {"text_config": {"rope_parameters": {"rope_type": "yarn"}}},
        "rope_scaling=.*yarn.*no released model has it",
    ),
    "sides": ({"vision_config": {"image_size": [96, 96]}}, "image_size is .*it must be one size"),
    "layers": ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is .*at most"),
    "codes": ({"vq_config": {"num_embeddings": "many"}}, "vocab_size is 'many'|codebook_size"),
    "padding": ({"text_config": {"pad_token_id": [1]}}, "pad_id is .*a whole number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_model(tmp_path, case):
    changes, match = WRONG[case]
    refused(tmp_path, written(tmp_path, BARE | changes), match)


def test_files_of_other_kinds(tmp_path):
    """A model that only reads, Janus-Pro for another family, and no Janus-Pro at all."""
    names = (f"model__generation_{n}__weight" for n in ("embeddings", "head__vision_head"))
    reader = written(tmp_path, BARE, **dict.fromkeys(names))
    match = r"lacks the embedding of image tokens \(model.generation_embeddings.weight\), the head"
    refused(tmp_path, reader, match)
    (tmp_path / "other").mkdir()
    whole = written(tmp_path / "other", BARE)
    lumina = dataclasses.replace(models.lumina_files(), source=whole.source)
    refused(tmp_path, lumina, "looks like Janus-Pro transformer weights, not Lumina-mGPT")
    (tmp_path / "third").mkdir()
    llama = written(tmp_path / "third", {"model_type": "llama", "hidden_size": 64})
    refused(tmp_path, llama, "config.json: Janus-Pro configuration: unknown name 'hidden_size'")
    (tmp_path / "third" / "saved" / "config.json").unlink()
    refused(tmp_path, llama, "needs --config=FILE.json")
