"""Rule tables of Janus-Pro, Lumina-mGPT and their image tokenizers, and the conversion of both."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ported_weights.configurations import PublishedModel
from ported_weights.convert import convert
from ported_weights.readers import sources
from tests import models_under_test as models
from tests.ported_weights.conversions import assert_same, converted, refused

JANUS, LUMINA = models.JANUS_FIXTURES, models.LUMINA_FIXTURES
WEIGHTS = {"janus_tiny": JANUS / "janus_tiny", "lumina_tiny": LUMINA / "lumina_tiny.safetensors"}
LUMINA_CONFIG = json.loads((LUMINA / "lumina_tiny_config.json").read_text())


def tensors(name: str) -> dict[str, np.ndarray]:
    """{published name: array} of a fixture."""
    return {n: np.array(t.read()) for n, t in sources.open_source(WEIGHTS[name]).tensors.items()}


def janus(tmp_path, name: str = "janus", **arrays) -> PublishedModel:
    """Weights of one file in a folder of this name; None takes a tensor out, an array puts one in.
    `__` stands for a dot."""
    changed = {name.replace("__", "."): array for name, array in arrays.items()}
    found = {n: a for n, a in (tensors("janus_tiny") | changed).items() if a is not None}
    folder = tmp_path / name
    folder.mkdir()
    save_file(found, folder / "model.safetensors")
    return dataclasses.replace(models.janus_files(), source=str(folder))


def lumina(tmp_path, config: dict | None = None, **changes) -> PublishedModel:
    """With another configuration."""
    if config is not None:
        changes["config"] = str(tmp_path / "given.json")
        (tmp_path / "given.json").write_text(json.dumps(config))
    return dataclasses.replace(models.lumina_files(), **changes)


# --- one folder, other files ----------------------------------------------------------------------


def test_one_folder_holds_a_whole_janus(tmp_path):
    """What reads pictures and what speaks is ignored and counted, and so is VQ-16's encoder."""
    ones = np.ones((2, 2), np.float32)
    extra = {f"vision_model__blocks__{i}__weight": ones for i in range(9)}
    extra |= {"aligner__layers__0__weight": ones, "gen_vision_model__encoder__conv_in__bias": ones}
    extra["language_model__model__layers__0__self_attn__rotary_emb__inv_freq"] = ones
    parts, described, said = converted(tmp_path, janus(tmp_path, **extra))
    expected = models.fixture_model("janus_tiny")
    for name, part in parts.items():
        assert_same(part, expected.parts[name])
    assert "ignored 10 tensors, aligner.layers.0.weight to vision_model" in said
    assert "the network that reads pictures" in said and "the encoder: generation only" in said
    assert "ignored language_model.lm_head.weight: the head for words" in said
    assert [s["part"] for s in described["sources"]] == ["transformer", "codec"]
    assert "prompt_tokenizer" not in {path.name for path in (tmp_path / "out").iterdir()}


def test_the_tokenizer_of_prompts_is_kept(tmp_path):
    published, content = janus(tmp_path), {"model": {"type": "BPE", "vocab": {}}}
    (tmp_path / "janus" / "tokenizer.json").write_text(json.dumps(content))
    _, described, said = converted(tmp_path, published)
    kept = tmp_path / "out" / "prompt_tokenizer" / "tokenizer.json"
    assert json.loads(kept.read_text()) == content and "tokenizer of prompts: " in said
    assert list(described["beside"]) == ["prompt_tokenizer/tokenizer.json"]
    assert described["sources"][-1]["part"] == "prompt_tokenizer"
    convert(published, str(tmp_path / "out"), overwrite=True, say=lambda line: None)
    assert kept.is_file()
    # another one, and one that is none
    (tmp_path / "mine.json").write_text(json.dumps(content | {"version": "1.0"}))
    mine = dataclasses.replace(published, prompt_tokenizer_source=str(tmp_path / "mine.json"))
    convert(mine, str(tmp_path / "out"), overwrite=True, say=lambda line: None)
    assert json.loads(kept.read_text())["version"] == "1.0"
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "mine.json").write_text("{}")
    refused(tmp_path, mine, "mine.json is no tokenizer.json")


# --- what does not fit ----------------------------------------------------------------------------


def test_checkpoints_that_do_not_draw(tmp_path):
    """A model that reads pictures, and one of text alone."""
    drawing = [n for n in tensors("janus_tiny") if n.startswith("gen_")]
    reader = janus(tmp_path, **{n.replace(".", "__"): None for n in drawing})
    match = r"lacks the embedding of image tokens \(gen_embed.weight\), the head.*only reads"
    refused(tmp_path, reader, match)
    save_file({"vision_model.a": np.ones(2, "f4")}, tmp_path / "vision.safetensors")
    vision = dataclasses.replace(reader, source=str(tmp_path / "vision.safetensors"))
    refused(tmp_path, vision, "lacks the language model .*it does not draw pictures")
    arrays = load_file(WEIGHTS["lumina_tiny"])
    text = {n: a for n, a in arrays.items() if "_norm." not in n}
    save_file(text, tmp_path / "llama.safetensors")
    llama = lumina(tmp_path, source=str(tmp_path / "llama.safetensors"))
    refused(tmp_path, llama, "lacks Chameleon's norm of queries and keys")


LUMINA_CASES = {
    "depth": ({"num_hidden_layers": 4}, "missing: model.layers.3.self_attn.q_proj.weight"),
    "words": ({"vocab_size": 280}, r"embed_tokens.weight is \[260, 64\], but \[280, 64\]"),
    "sets of norms": ({"model_parallel_size": 2}, r"q_norm.weight is \[1, 16\], but \[2, 16\]"),
}


@pytest.mark.parametrize("case", LUMINA_CASES)
def test_another_size(tmp_path, case):
    changes, match = LUMINA_CASES[case]
    config = {**LUMINA_CONFIG, "model": {**LUMINA_CONFIG["model"], **changes}}
    refused(tmp_path, lumina(tmp_path, config), match)
