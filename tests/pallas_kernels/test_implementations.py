"""Which implementation a machine takes, and why others cannot run there."""

from types import SimpleNamespace

import pytest

from pallas_kernels import implementations, jax_versions, target

HERE = jax_versions.importlib.util.find_spec


@pytest.fixture
def machine(monkeypatch):
    """machine(platform, capability, triton): what this machine is from now on."""

    def pretend(platform, capability=None, triton=True):
        jax, spec = implementations.jax, jax_versions.importlib.util
        device = SimpleNamespace(compute_capability=capability, device_kind="here")
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        there = triton or None
        monkeypatch.setattr(
            spec, "find_spec", lambda name: there if name == jax_versions.TRITON else HERE(name)
        )

    return pretend


@pytest.mark.parametrize(
    ("platform", "capability", "triton", "expected"),
    [
        ("cpu", None, True, ()),
        ("tpu", None, False, ("tpu",)),
        ("gpu", "8.0", True, ("triton",)),
        ("gpu", "8.9", False, ()),
        ("gpu", "9.0", True, ("mosaic", "triton")),
        ("gpu", "9.0", False, ("mosaic",)),
        ("gpu", "10.0", True, ("mosaic", "triton")),
        ("gpu", "12.0", True, ("triton",)),  # consumer Blackwell
    ],
)
def test_choices(machine, platform, capability, triton, expected):
    machine(platform, capability, triton)
    expected = (*expected, "reference")
    assert implementations.choices(platform, capability) == expected
    assert implementations.preferred() == expected[0]


@pytest.mark.parametrize(
    ("name", "here", "reason"),
    [
        ("reference", ("cpu",), None),
        ("triton", ("cpu",), "triton needs a GPU, this machine offers cpu"),
        ("tpu", ("gpu", "9.0"), "tpu needs a TPU, this machine offers gpu"),
        ("mosaic", ("gpu", "9.0"), None),
        ("mosaic", ("gpu", "10.0"), None),
        ("mosaic", ("gpu", "8.0"), "capability 9.0 or 10.0, that of this machine is 8.0"),
        ("mosaic", ("gpu", "12.0"), "that of this machine is 12.0"),
        ("triton", ("gpu", "8.0"), None),
        ("triton", ("gpu", "8.0", False), "needs Pallas-Triton, which this JAX"),
        ("triton-interpret", ("cpu",), None),
        ("triton-interpret", ("cpu", None, False), "needs Pallas-Triton"),
    ],
)
def test_why_not_here(machine, name, here, reason):
    machine(*here)
    found = implementations.why_not_here(name)
    assert found == reason if reason is None else reason in found


@pytest.mark.parametrize(
    ("kind", "capability"),
    [("NVIDIA B200", "10.0"), ("NVIDIA H200", "9.0"), ("NVIDIA A100", "8.0"), ("NVIDIA X", None)],
)
def test_programs_for_absent_chips_follow_the_chip(machine, monkeypatch, kind, capability):
    machine("cpu")
    chip = SimpleNamespace(platform="gpu", device_kind=kind)
    monkeypatch.setattr(target, "_abstract", lambda: chip)
    assert (target.platform(), target.capability()) == ("gpu", capability)
    expected = "mosaic" if capability in implementations.MOSAIC else "triton"
    assert implementations.preferred() == expected


def operation(*refusing: str):
    """An operation whose implementations return their names, or refuse."""

    def module(name):
        def call(**options):
            if name in refusing:
                raise NotImplementedError(f"{name} takes other shapes")
            return name

        return lambda: SimpleNamespace(call=call)

    return {name: module(name) for name in ("reference", *implementations.PLATFORMS)}


@pytest.mark.parametrize(
    ("refusing", "triton", "expected", "warning"),
    [
        (("mosaic",), True, "triton", "the kernel triton runs instead: mosaic takes other"),
        (("mosaic", "triton"), True, "reference", "JAX reference .*: mosaic takes .*; triton"),
        (("mosaic",), False, "reference", "JAX reference runs instead: mosaic takes"),
    ],
)
def test_the_next_one_takes_what_a_kernel_cannot(machine, refusing, triton, expected, warning):
    machine("gpu", "9.0", triton)
    modules = operation(*refusing)
    with pytest.warns(UserWarning, match=warning):
        assert implementations.run(None, modules, "call") == expected
    with pytest.raises(NotImplementedError, match="other shapes"):
        implementations.run("mosaic", modules, "call")
