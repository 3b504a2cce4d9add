"""Which implementation a machine takes, and why others cannot run there."""

from types import SimpleNamespace

import pytest

from pallas_kernels import implementations

HERE = implementations.importlib.util.find_spec


@pytest.fixture
def machine(monkeypatch):
    """machine(platform, capability, triton): what this machine is from now on."""

    def pretend(platform, capability=None, triton=True):
        jax, spec = implementations.jax, implementations.importlib.util
        device = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        there = triton or None
        monkeypatch.setattr(
            spec, "find_spec", lambda name: there if name == implementations.TRITON else HERE(name)
        )

    return pretend


@pytest.mark.parametrize(
    ("platform", "capability", "triton", "expected"),
    [
        ("cpu", None, True, "reference"),
        ("tpu", None, False, "tpu"),
        ("gpu", "8.0", True, "triton"),
        ("gpu", "9.0", True, "triton"),
        ("gpu", "9.0", False, "mosaic"),
        ("gpu", "8.0", False, "reference"),
    ],
)
def test_preferred(machine, platform, capability, triton, expected):
    machine(platform, capability, triton)
    assert implementations.preferred(platform) == expected


@pytest.mark.parametrize(
    ("name", "here", "reason"),
    [
        ("reference", ("cpu",), None),
        ("triton", ("cpu",), "triton needs a GPU, this machine offers cpu"),
        ("tpu", ("gpu", "9.0"), "tpu needs a TPU, this machine offers gpu"),
        ("mosaic", ("gpu", "9.0"), None),
        ("mosaic", ("gpu", "8.0"), "compute capability 9.0, this one has 8.0"),
        ("triton", ("gpu", "8.0"), None),
        ("triton", ("gpu", "8.0", False), "has no Pallas-Triton"),
        ("triton-interpret", ("cpu",), None),
    ],
)
def test_why_not_here(machine, name, here, reason):
    machine(*here)
    found = implementations.why_not_here(name)
    assert found == reason if reason is None else reason in found
