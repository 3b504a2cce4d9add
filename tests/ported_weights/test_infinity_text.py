"""Infinity converted together with its text encoder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ported_weights import convert
from tests.ported_weights.infinity_requests import HERE, a_request, converted, refused
from varjax.storage import parameters
from varjax.text.encoder import TextEncoder


@pytest.fixture
def t5_folder(tmp_path_factory):
    """Makes a T5 folder as it is published, of some width."""
    small = pytest.importorskip("tests.text_encoder_under_test")
    published = HERE.parent / "t5"
    folder = tmp_path_factory.mktemp("t5")
    small.write_tokenizer(folder / "spiece.model")

    def make(width: int) -> Path:
        arrays = {
            name: np.resize(array, [width if n == 64 else n for n in array.shape])
            for name, array in load_file(published / "t5_tiny.safetensors").items()
        }
        config = json.loads((published / "t5_tiny_config.json").read_text())
        config |= {"d_model": width, "d_kv": width // config["num_heads"]}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(arrays, folder / "model.safetensors")
        return folder

    return make


def test_text_encoder_beside_the_model(tmp_path, t5_folder):
    folder = t5_folder(256)
    request = a_request(tmp_path, text_encoder_source=str(folder), dtype="float32")
    _, _, said = converted(request)
    assert "text encoder: 21 tensors read" in said
    encoder = TextEncoder.load(request["out"])
    assert encoder.module.config.d_model == 256
    assert {str(x.dtype) for x in parameters.named(encoder.module).values()} == {"float32"}


def test_text_encoders_that_do_not_fit(tmp_path, t5_folder, monkeypatch, request_for):
    """Found out at once, before the weights of the model are opened."""
    monkeypatch.setattr(convert, "_open_part", lambda *a: pytest.fail("opened the weights"))
    missing = a_request(tmp_path, text_encoder_source=str(tmp_path / "nowhere"))
    refused(missing, "--text_encoder_source: .*nowhere is no folder", tmp_path)
    folder = t5_folder(64)
    request = a_request(tmp_path, text_encoder_source=str(folder))
    refused(request, r"features of width 64, the transformer reads width 256", tmp_path)
    shutil.move(folder / "spiece.model", folder / "moved")
    refused(request, "--text_encoder_source: there is no tokenizer file .*spiece", tmp_path)
    (folder / "config.json").unlink()
    refused(request, "--text_encoder_source: .* has no config.json", tmp_path)
    labels = request_for("c_k5_nol2norm", text_encoder_source=str(folder))
    refused(labels, "VAR draws classes, not texts: drop it", tmp_path)
