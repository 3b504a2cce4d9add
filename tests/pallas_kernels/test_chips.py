"""The table of chips, and what is said about compilers that are missing."""

import pytest

from pallas_kernels import chips


def test_names():
    for name in chips.CHIPS:
        assert chips.get_chip(name).name == name
    assert chips.get_chip("v5e") is chips.get_chip("TPU-v5e")
    assert chips.get_chip("v7x") is chips.get_chip("tpu7x")
    with pytest.raises(ValueError, match="unknown chip 'v5litepod-4': .*tpu-v4, tpu-v5e.*b200"):
        chips.get_chip("v5litepod-4")
    with pytest.raises(ValueError, match="unknown chip"):
        chips.why_unavailable("a10000")


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=chips.CHIPS)
def test_numbers_are_of_the_right_order(chip):
    """A misplaced unit is off by a thousand."""
    assert 2**33 < chip.memory < 2**38
    assert 5e13 < chip.bf16_flops < 1e16
    for peak in (chip.int8_flops, chip.fp8_flops):
        assert peak is None or 1.9 < peak / chip.bf16_flops < 4.1
    assert 1e11 < chip.bandwidth < 1e13
    assert (chip.gpu is None) == bool(chip.topologies)
    assert list(chip.topologies) == sorted(chip.topologies) and chip.most_devices == 256


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=chips.CHIPS)
def test_devices_or_the_reason(chip):
    why = chips.why_unavailable(chip.name)
    if why:
        assert "make aot-venv" in why
        with pytest.raises(NotImplementedError, match="make aot-venv"):
            chips.compile_only_devices(chip.name)
        pytest.skip(why)
    for count in (1, 3, 8, 16, 256):
        devices = chips.compile_only_devices(chip.name, count)
        assert len({device.id for device in devices}) == count
        assert devices[0].platform.lower() in ("tpu", "gpu", "cuda")


def versions(monkeypatch, **installed):
    found = {name.replace("_", "-"): version for name, version in installed.items()}
    monkeypatch.setattr(chips, "_version", found.get)
    monkeypatch.setattr(chips, "_has_ptxas", lambda: False)


def test_all_that_is_missing_is_said_at_once(monkeypatch):
    """One command makes an environment, instead of the next missing package after each."""
    versions(monkeypatch, jaxlib="0.10.2")
    why = chips.why_unavailable("v5e", "h200", "tpu-v6e", "a100")
    assert why.startswith("tpu-v5e, tpu-v6e: libtpu is not installed; h200, a100: JAX's CUDA")
    assert why.count("run `make aot-venv` in the folder of varjax, then .venv-aot/bin/python") == 1
    assert "plugin 0.10.2 is not installed" in why and "ptxas is not here" in why
    versions(monkeypatch, jaxlib="0.10.2", libtpu="0.0.42")
    assert chips.why_unavailable("v5e", "v6e") is None
    assert "tpu" not in chips.why_unavailable("v5e", "h200")


def test_chips_of_device_kinds():
    for kind, name in [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v4", "tpu-v4"),
        ("TPU7x", "tpu7x"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
    ]:
        assert chips.of_kind(kind) is chips.get_chip(name)
    others = (
        "TPU v4 lite, NVIDIA L40S, NVIDIA A100-PCIE-40GB, NVIDIA H100 NVL, NVIDIA H200 MIG 1g.18gb"
        ", NVIDIA GeForce RTX 3090 Ti"
    )
    for kind in ("", "cpu", *others.split(", ")):
        assert chips.of_kind(kind) is None, kind
