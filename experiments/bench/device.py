"""What results depend on: the device that is there, its driver and clocks, versions."""

import csv
import io
import os
import platform
import shutil
import subprocess

import jax

from experiments.aot.worker import versions
from pallas_kernels import bench
from pallas_kernels.chips import Chip

NVIDIA_SMI = "nvidia-smi"
ASKED = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "utilization.gpu",
)


def chip() -> Chip | None:
    """The chip that is there; None where its peak numbers are not known."""
    return bench.chip(jax.devices()[0].device_kind)


def describe() -> dict:
    """What decides whether results may be put together: kind of device, versions, flags of XLA."""
    device, known = jax.devices()[0], chip()
    # libtpu and CUDA say here what they are; no path and no address is among it
    plugin = getattr(device.client, "platform_version", "")
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "chip": known and known.name,
        "versions": {**versions(), "python": platform.python_version()},
        "plugin": " ".join(str(plugin).split())[:200],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def clocks() -> list[dict[str, str]] | None:
    """Driver, clocks, power and load of every GPU, as nvidia-smi prints them; None without it."""
    if not shutil.which(NVIDIA_SMI):
        return None
    command = [NVIDIA_SMI, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = csv.reader(io.StringIO(done.stdout), skipinitialspace=True)
    return [dict(zip(ASKED, row, strict=True)) for row in rows if len(row) == len(ASKED)]


def driver(found: list[dict[str, str]] | None) -> str | None:
    """The driver among `clocks()`."""
    return found[0]["driver_version"] if found else None
