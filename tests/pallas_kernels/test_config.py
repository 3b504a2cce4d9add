"""Tiles of the kernels: heuristics, and tuned files that are read only if they are sound."""

import json

import pytest
from jax.experimental import pallas as pl

from pallas_kernels.ragged_attention import config
from pallas_kernels.ragged_attention.config import Call, TPUConfig, TritonConfig

CALL = Call(
    operation="attend",
    queries=169,
    slots=400,
    head_dim=64,
    block_size=16,
    dtype="bfloat16",
    kv_dtype="int8",
)
TILES = TritonConfig(block_q=128, block_k=32, num_warps=8, num_stages=4)
KIND = "NVIDIA H999"


@pytest.fixture
def tuned_folder(tmp_path, monkeypatch):
    """An empty place for tuned files, and a device that they are for."""
    monkeypatch.setattr(config, "TUNED", tmp_path)
    monkeypatch.setattr(config, "device_kind", lambda: KIND)
    config.tuned.cache_clear()
    yield tmp_path
    config.tuned.cache_clear()


def write(folder, **changes):
    """A tuned file for CALL, with other contents if told."""
    path = config.write_tuned(KIND, "attend", "triton", {CALL: TILES})
    assert path.is_relative_to(folder)
    contents = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(contents))
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("queries", [1, 16, 100, 4096])
def test_heuristics_give_legal_tiles(queries, head_dim, dtype):
    call = Call(**vars(CALL) | {"queries": queries, "head_dim": head_dim, "dtype": dtype})
    tiles = config.heuristic(call, "triton")
    for size in (tiles.block_q, tiles.block_k, tiles.num_warps):
        assert size == pl.next_power_of_2(size)
    assert min(tiles.block_q, tiles.block_k) >= 16  # what tensor cores need
    assert tiles.block_q < 2 * max(16, queries)  # no tile of nothing but padding
    assert isinstance(config.heuristic(call, "tpu"), TPUConfig)


def test_tuned_tiles_are_found_for_calls_of_about_their_size(tuned_folder):
    assert config.choose(CALL, "triton") == config.heuristic(CALL, "triton") != TILES
    write(tuned_folder)
    config.tuned.cache_clear()
    assert config.choose(CALL, "triton") == TILES
    near = Call(**vars(CALL) | {"queries": 200, "slots": 300})
    assert config.choose(near, "triton") == TILES
    for other in ({"queries": 100}, {"kv_dtype": "bfloat16"}, {"operation": "attention_moments"}):
        call = Call(**vars(CALL) | other)
        assert config.choose(call, "triton") == config.heuristic(call, "triton")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, "format is 2, needed is 1"),
        ({"implementation": "tpu"}, "tiles of tpu, needed are triton"),
        ({"entries": None}, "not a file of tuned tiles"),
        ({"entries": [{"call": {}, "config": {}}]}, "not a file of tuned tiles"),
    ],
)
def test_foreign_files_are_left_out(tuned_folder, changes, reason):
    path = write(tuned_folder, **changes)
    config.tuned.cache_clear()
    with pytest.warns(UserWarning, match=reason) as caught:
        assert config.choose(CALL, "triton") == config.heuristic(CALL, "triton")
    assert str(path) in str(caught[0].message) and "--tune" in str(caught[0].message)
    assert config.choose(CALL, "triton") == config.heuristic(CALL, "triton")  # said once


def test_files_that_come_with_the_package_are_sound():
    files = list(config.TUNED.glob("*/*.json"))
    for path in files:
        found = json.loads(path.read_text())
        kind, operation, name = (found[n] for n in ("device", "operation", "implementation"))
        assert (path.parent.name, path.stem) == (kind, operation)
        assert config.tuned(kind, operation, name)
