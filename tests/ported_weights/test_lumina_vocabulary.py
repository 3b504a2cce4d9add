"""The vocabulary of Lumina-mGPT: where names of its image tokens are, and mistakes in them."""

import dataclasses
import json
import shutil

import pytest

from tests import models_under_test as models
from tests.ported_weights.conversions import converted, refused
from tests.ported_weights.test_prompt_model_rules import LUMINA, LUMINA_CONFIG, WEIGHTS, lumina


@pytest.mark.slow
def test_vocabularies(tmp_path):
    """In a config.json beside the weights, in Chameleon's file beside the tokenizer, or given."""
    names = {**LUMINA_CONFIG["image_vocab"], "<pad>": 1}
    config = {n: v for n, v in LUMINA_CONFIG.items() if n != "image_vocab"} | {"num_codes": 128}
    for folder in ("weights", "chameleon"):
        (tmp_path / folder).mkdir()
    source = shutil.copy(WEIGHTS["lumina_tiny"], tmp_path / "weights")
    tokenizer = shutil.copy(LUMINA / "lumina_tiny_vqgan.ckpt", tmp_path / "chameleon")
    published = lumina(tmp_path, config, source=source, tokenizer_source=tokenizer)
    refused(tmp_path, published, "in no file that was found: give --vocabulary=FILE.*weights and")
    expected = models.fixture_model("lumina_tiny").config.image_ids

    def found(published) -> tuple[int, ...]:
        parts, _, _ = converted(tmp_path, published)
        shutil.rmtree(tmp_path / "out")
        return parts["transformer"].config.image_ids

    files = {
        tmp_path / "given_names.json": {"vocabulary_map": names},
        tmp_path / "chameleon" / "text_tokenizer.json": {"model": {"vocab": names}},
        tmp_path / "weights" / "config.json": {"vocabulary_map": names, "hidden_size": 64},
    }
    for path, content in files.items():
        path.write_text(json.dumps(content))
        given = str(path) if path.name == "given_names.json" else None
        assert found(dataclasses.replace(published, vocabulary=given)) == expected
        assert expected != tuple(sorted(expected))


NAMES = LUMINA_CONFIG["image_vocab"]
FEWER = {name: number for name, number in NAMES.items() if name != "IMGIMGBCHZ"}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"model": {"vocab": NAMES | {"IMGIMGHZ": 260}}}, "ids 260 are outside the vocabulary of"),
        ({"model": {"vocab": FEWER}}, "it names 127 codes, the model has 128"),
        ([], "names.json: no vocabulary in it: expected a config.json with vocabulary_map"),
    ],
)
def test_broken_vocabularies(tmp_path, content, match):
    """Other mistakes: tests/models/test_prompt_models.py."""
    (tmp_path / "names.json").write_text(json.dumps(content))
    refused(tmp_path, lumina(tmp_path, vocabulary=str(tmp_path / "names.json")), match)
