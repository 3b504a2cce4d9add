"""The device that a program is traced for. It is a device of the mesh in use, whose chips may be
absent, or else this machine's default device."""

import jax

# Compute capabilities of GPUs that are no device here, by kind in small letters, without "NVIDIA":
# `pallas_kernels.chips`, which compiles for them, fills it.
CAPABILITIES: dict[str, str] = {}


def platform() -> str:
    """One of "cpu", "gpu" or "tpu"."""
    abstract = _abstract()
    return abstract.platform if abstract else jax.default_backend()


def device_kind() -> str:
    """The device's kind as JAX names it, "NVIDIA H200" for example."""
    return (_abstract() or jax.devices()[0]).device_kind


def capability() -> str | None:
    """The compute capability of a GPU, "9.0" for example; None where it is not known and for other
    devices."""
    abstract, here = _abstract(), jax.devices()[0]
    if abstract is None or abstract.device_kind == here.device_kind:
        return getattr(here, "compute_capability", None)
    # an absent chip is no device that could be asked
    return CAPABILITIES.get(abstract.device_kind.removeprefix("NVIDIA ").lower())


def major() -> int:
    """The first number of a GPU's compute capability, 9 for Hopper; 0 where it is not known."""
    found = (capability() or "").partition(".")[0]
    return int(found) if found.isdecimal() else 0


def _abstract():
    """The device of an abstract mesh; None without such a mesh."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
