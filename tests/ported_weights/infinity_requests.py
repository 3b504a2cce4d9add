"""Requests to convert the small Infinity of the fixtures, and what becomes of them."""

from pathlib import Path

import pytest

from tests.ported_weights.conftest import convert_request
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.storage import checkpoint

HERE = Path(__file__).parents[1] / "fixtures" / "infinity"
WEIGHTS = {
    "infinity_A": ("infinity_A.safetensors", "bsqvae_p16_d16.pth"),
    "infinity_B_sharded": ("infinity_B_sharded", "bsqvae_p8_d8.safetensors"),
}


def a_request(tmp_path, name: str = "infinity_A", **changes) -> dict:
    source, tokenizer = WEIGHTS[name]
    fields = {
        "model": "infinity-custom",
        "source": str(HERE / source),
        "tokenizer_source": str(HERE / tokenizer),
        "config": str(HERE / "configs.json"),
        "tokenizer_config": str(HERE / "configs.json"),
        "out": str(tmp_path / "out"),
    }
    return {**fields, **changes}


def converted(request) -> tuple[dict, dict, str]:
    """Parts and description of the checkpoint, read from disk, and what the command says."""
    lines = []
    convert_request(request, say=lines.append)
    return *checkpoint.load(request["out"], registry.CATALOGUE), "\n".join(lines)


def refused(request, match, folder):
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=match):
        convert_request(request, say=lambda line: None)
    assert sorted(folder.rglob("*")) == before
