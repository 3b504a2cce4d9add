"""Rule tables of LlamaGen and its tokenizer, and the conversion of both from all containers."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ported_weights.configurations import PublishedModel
from ported_weights.readers import sources
from tests import models_under_test as models
from tests.ported_weights import conversions
from tests.ported_weights.conversions import assert_same

HERE = models.LLAMAGEN_FIXTURES
CONFIGS = json.loads((HERE / "configs.json").read_text())


def weights(file: str = "gpt_c2i.pt") -> dict[str, np.ndarray]:
    """{published name: array} of a fixture."""
    return {n: np.array(t.read()) for n, t in sources.open_source(HERE / file).tensors.items()}


def converted(tmp_path, weights_file: str = "gpt_c2i.pt", **changes) -> tuple[dict, dict, str]:
    return conversions.converted(tmp_path, files(tmp_path, weights_file, **changes))


def refused(tmp_path, match: str, **changes) -> None:
    conversions.refused(tmp_path, files(tmp_path, "gpt_c2i.pt", **changes), match)


def files(tmp_path, weights_file: str, **changes) -> PublishedModel:
    """With files of one configuration each, for weights that are called otherwise."""
    config, tokenizer = one_config(tmp_path, "gpt_c2i"), one_config(tmp_path, "vq")
    changes = {"config": config, "tokenizer_config": tokenizer, **changes}
    return dataclasses.replace(models.llamagen_files(weights_file), **changes)


def one_config(tmp_path, name: str, **changes) -> str:
    path = tmp_path / f"{name}{len(changes)}.json"
    path.write_text(json.dumps({**CONFIGS[name], **changes}))
    return str(path)


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


# --- what does not fit ----------------------------------------------------------------------------


CASES = {
    "another depth": ({"n_layer": 4}, "missing: layers.3.attention.wo.weight"),
    "another width": ({"dim": 128}, r"output.weight is \[256, 64\], which becomes \[64, 256\]"),
    "other classes": (
        {"num_classes": 30},
        r"embedding_table.weight is \[21, 64\], but \[31, 64\] is expected",
    ),
    "texts": (
        {"model_type": "t2i", "caption_dim": 32, "cls_token_num": 120},
        "the configuration says model_type t2i, the weights c2i",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_of_another_size(tmp_path, case):
    values, match = CASES[case]
    refused(tmp_path, match, config=one_config(tmp_path, "gpt_c2i", **values))
