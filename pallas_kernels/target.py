"""The device that a program is traced for: of the mesh in use, which may be of chips that are not
here, or else this machine's default device."""

import jax

from pallas_kernels import chips


def platform() -> str:
    """One of "cpu", "gpu" or "tpu"."""
    abstract = _abstract()
    return abstract.platform if abstract else jax.default_backend()


def device_kind() -> str:
    """As JAX names it, "NVIDIA H200" for example."""
    return (_abstract() or jax.devices()[0]).device_kind


def capability() -> str | None:
    """Compute capability of a GPU, "9.0" for example; None where there is none or it is not
    known."""
    abstract, here = _abstract(), jax.devices()[0]
    if abstract is None or abstract.device_kind == here.device_kind:
        return getattr(here, "compute_capability", None)
    chip = chips.CHIPS.get(abstract.device_kind.removeprefix("NVIDIA ").lower())
    return chip and chip.capability


def _abstract():
    """What an abstract mesh knows of its devices."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
