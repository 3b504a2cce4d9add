"""Chips that programs are compiled for, and compile-only devices of chips that are not here.

Peak numbers are dense ones (no sparsity) from the vendors' public data sheets: Google Cloud's pages
"TPU v4", "TPU v5e", "TPU v5p", "TPU v6e (Trillium)" and "TPU7x (Ironwood)"; NVIDIA's data sheets of
the A100 80GB SXM, RTX A6000, H100 SXM, H200 SXM, HGX B200, L4, and the white papers of the GA102,
Ada and RTX Blackwell architectures (float16 and fp8 with float32 sums). They are numbers of one JAX
device. A TPU v4 or TPU7x chip is two devices, each with half of the chip.

Memory is what a program may fill. For a TPU it is the limit that the compiler enforces. For a GPU
it is what the driver offers. JAX takes three quarters of that unless
`XLA_PYTHON_CLIENT_MEM_FRACTION` says more, and no compiler checks it: compare it yourself.
"""

import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pallas_kernels import target

GIB = 2**30
TERA = 10**12
GPUS_PER_HOST = 8
# Of a GPU's memory, for JAX; libraries take some of the rest.
MEM_FRACTION = 0.95
CUDA_PLUGIN = ("jax-cuda13-plugin", "jax-cuda13-pjrt")  # of the version of jaxlib


@dataclass(frozen=True)
class Gpu:
    """The numbers of a GPU that XLA's compiler asks for.

    capability: compute capability of CUDA.
    accelerated: whether it has Hopper's or Blackwell's architecture-specific instructions.
    cores: multiprocessors.
    lanes: float32 units of a core.
    clock: GHz.
    l2_cache: MiB.
    shared_memory: bytes of a core, and the most of a block.
    threads: the most of a core.
    """

    capability: tuple[int, int]
    accelerated: bool
    cores: int
    lanes: int
    clock: float
    l2_cache: int
    shared_memory: tuple[int, int]
    threads: int


@dataclass(frozen=True)
class Chip:
    """One accelerator device.

    name: as users write it.
    platform: "tpu" or "gpu".
    memory: bytes that a program may fill.
    bf16_flops: peak operations per second.
    int8_flops, fp8_flops: those of products of two 8-bit numbers; None where a compiled product of
      them is not faster than one in bfloat16 (docs/lab/precision.md).
    bandwidth: bytes per second of the memory.
    topologies: (devices, name) of each topology that a TPU offers, smallest first.
    gpu: the numbers that a GPU's compiler asks for.
    """

    name: str
    platform: str
    memory: int
    bf16_flops: float
    int8_flops: float | None
    fp8_flops: float | None
    bandwidth: float
    topologies: tuple[tuple[int, str], ...] = ()
    gpu: Gpu | None = None

    @property
    def capability(self) -> str | None:
        """Compute capability of a GPU, as JAX writes it."""
        return "{}.{}".format(*self.gpu.capability) if self.gpu else None

    @property
    def usable(self) -> int:
        """Bytes for JAX: of a GPU `MEM_FRACTION`, which it has to be told (`environment`)."""
        return int(self.memory * MEM_FRACTION) if self.gpu else self.memory

    @property
    def environment(self) -> str:
        """What a command line begins with that may take `usable` bytes."""
        return f"XLA_PYTHON_CLIENT_MEM_FRACTION={MEM_FRACTION} " if self.gpu else ""

    @property
    def most_devices(self) -> int:
        """Devices of the largest topology that is offered."""
        return self.topologies[-1][0] if self.topologies else 32 * GPUS_PER_HOST


def _chip(
    name: str,
    memory: float,
    peaks: tuple[float, float | None, float | None],
    bandwidth: float,
    kind: Gpu | str,
    devices: int = 1,
) -> Chip:
    """A GPU, or a TPU whose chips form these grids and have so many devices each. Units: bytes of
    memory, 10**12 operations (bfloat16, int8, fp8) and 10**9 bytes per second."""
    gpu, grids = (kind, "") if isinstance(kind, Gpu) else (None, kind)
    model = name.removeprefix("tpu-")
    topologies = (
        (devices * math.prod(map(int, grid.split("x"))), f"{model}:{grid}")
        for grid in grids.split()
    )
    return Chip(
        name,
        "gpu" if gpu else "tpu",
        int(memory),
        *(peak and peak * TERA for peak in peaks),
        bandwidth=bandwidth * 10**9,
        topologies=tuple(topologies),
        gpu=gpu,
    )


_FLAT = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8"
# Shared memory of a core and of a block: CUDA keeps 1 KiB per block for itself.
_AMPERE = partial(Gpu, lanes=64, shared_memory=(167936, 166912), threads=2048)
_CONSUMER = partial(Gpu, lanes=128, shared_memory=(102400, 101376), threads=1536)
_HOPPER = partial(Gpu, lanes=128, shared_memory=(233472, 232448), threads=2048)

_A100 = _AMPERE((8, 0), False, 108, clock=1.41, l2_cache=40)
_A6000 = _CONSUMER((8, 6), False, 84, clock=1.80, l2_cache=6)
_L4 = _CONSUMER((8, 9), False, 58, clock=2.04, l2_cache=48)
_RTX3090 = _CONSUMER((8, 6), False, 82, clock=1.695, l2_cache=6)
_RTX4080 = _CONSUMER((8, 9), False, 76, clock=2.505, l2_cache=64)
_RTX4090 = _CONSUMER((8, 9), False, 128, clock=2.52, l2_cache=72)
_RTX5090 = _CONSUMER((12, 0), True, 170, clock=2.407, l2_cache=96)
_H100 = _HOPPER((9, 0), True, 132, clock=1.98, l2_cache=50)
# a Blackwell core has the sizes of a Hopper one
_B200 = _HOPPER((10, 0), True, 148, clock=1.965, l2_cache=126)

# In the order of `--help`. Numbers of chips with two devices are halved.
_CHIPS = (
    # an int8 product takes a v4 as long as one in bfloat16
    _chip("tpu-v4", 15.25 * GIB, (275 / 2, None, None), 1228 / 2, _CUBES, 2),
    _chip("tpu-v5e", 15.75 * GIB, (197, 394, None), 819, _FLAT),
    _chip("tpu-v5p", 95.74 * GIB, (459, 918, None), 2765, _CUBES + " 4x8x8"),
    _chip("tpu-v6e", 31.25 * GIB, (918, 1836, None), 1640, _FLAT),
    _chip("tpu7x", 94.75 * GIB, (2307 / 2, None, 4614 / 2), 7380 / 2, _CUBES, 2),
    _chip("a100", 85_100_068_864, (312, 624, None), 2039, _A100),
    _chip("a6000", 51_000_000_000, (154.8, 309.7, None), 768, _A6000),
    _chip("l4", 23_600_000_000, (121, 242, 242), 300, _L4),
    _chip("rtx3090", 25_300_000_000, (71, 284, None), 936, _RTX3090),
    _chip("rtx4080", 16_800_000_000, (97.5, 389.9, 194.9), 716.8, _RTX4080),
    _chip("rtx4090", 25_300_000_000, (165.2, 660.6, 330.3), 1008, _RTX4090),
    _chip("rtx5090", 33_600_000_000, (209.5, 838, 419), 1792, _RTX5090),
    _chip("h100", 84_900_000_000, (989.4, 1978.9, 1978.9), 3352, _H100),
    _chip("h200", 150_100_000_000, (989.4, 1978.9, 1978.9), 4800, _H100),
    _chip("b200", 191_500_000_000, (2250, 4500, 4500), 7672, _B200),
)
CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in _CHIPS}
target.CAPABILITIES |= {chip.name: chip.capability for chip in _CHIPS if chip.capability}
_ALIASES = {"tpu-v7x": "tpu7x", "tpu-7x": "tpu7x", "v7x": "tpu7x", "tpu-v7": "tpu7x"}
_ALIASES |= {name.removeprefix("tpu-"): name for name in CHIPS if name.startswith("tpu-")}
_TPU_KINDS = {"tpu v5 lite": "tpu-v5e", "tpu v5": "tpu-v5p", "tpu v6 lite": "tpu-v6e"}
# words of device kinds that go with the peaks that are listed
_OF_CARDS = {"nvidia", "geforce", "rtx", "sxm", "sxm4", "sxm5", "80gb", "hbm3", "hbm3e"}


def get_chip(name: str) -> Chip:
    """The chip called `name` ("tpu-v5e", "v5e" and "h200" are such names).

    Raises:
      ValueError: there is none; the message lists the known names.
    """
    known = _ALIASES.get(name.lower(), name.lower())
    if known not in CHIPS:
        raise ValueError(f"unknown chip {name!r}: choose one of {', '.join(CHIPS)}")
    return CHIPS[known]


def of_kind(kind: str) -> Chip | None:
    """The chip of a JAX device kind ("NVIDIA H200", "TPU v5 lite"). None if its peak numbers are
    not known: a card with other memory than the listed one ("NVIDIA H100 NVL"), a slower one of
    that name ("NVIDIA GeForce RTX 4090 Laptop GPU"), a part of one ("NVIDIA H200 MIG 1g.18gb")."""
    kind = kind.lower()
    if kind.startswith("tpu"):
        kind = _TPU_KINDS.get(kind, kind.replace("tpu ", "tpu-"))
        return CHIPS.get(_ALIASES.get(kind, kind))
    words = set(re.split("[ -]", re.sub(r"rtx (\d)", r"rtx\1", kind))) - _OF_CARDS
    return CHIPS.get(words.pop()) if len(words) == 1 else None


def quiet_environment() -> dict[str, str]:
    """Environment variables for a process that compiles for absent chips; to be set before jax is
    imported there. JAX itself runs on the CPU, and libtpu does not look for a TPU host."""
    return {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling takes no TPU from another process
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any: it does not limit the topologies
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


# --- compilers ---


def why_unavailable(*names: str) -> str | None:
    """Message about what is missing to compile for these chips, with a command that makes an
    environment for it (beside JAX's CUDA plugin every other command would look for a GPU); None if
    nothing is missing.

    Raises:
      ValueError: unknown chip.
    """
    found: dict[str, list[str]] = {}
    for chip in dict.fromkeys(map(get_chip, names)):
        if reasons := _lacking(chip.platform):
            found.setdefault(", ".join(reasons), []).append(chip.name)
    if not found:
        return None
    each = "; ".join(f"{', '.join(chips)}: {why}" for why, chips in found.items())
    return (
        f"{each}: run `make aot-venv` in the folder of varjax, then .venv-aot/bin/python in place "
        "of python"
    )


def _lacking(platform: str) -> list[str]:
    """Descriptions of what is missing to compile for "gpu" or "tpu"."""
    if platform == "tpu":
        return [] if _version("libtpu") else ["libtpu is not installed"]
    wanted, found = _version("jaxlib"), {_version(name) for name in CUDA_PLUGIN}
    plugin = [] if found == {wanted} else [f"JAX's CUDA plugin {wanted} is not installed"]
    return plugin + ([] if _has_ptxas() else ["ptxas is not here (nor a CUDA toolkit)"])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_ptxas() -> bool:
    """Whether XLA finds ptxas: on the path, in a CUDA toolkit, or in NVIDIA's Python package."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = [file for root in roots for file in root.glob("*/bin/ptxas")]
    found.append(Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "ptxas")
    return shutil.which("ptxas") is not None or any(file.exists() for file in found)


def compile_only_devices(name: str, count: int = 1) -> list:
    """`count` devices of a chip, for which programs can be compiled but not run.

    Raises:
      ValueError: unknown chip, or more devices than its largest topology has.
      NotImplementedError: the compiler is not installed (`why_unavailable`).
    """
    from jax.experimental import topologies  # this table is useful without jax

    chip = get_chip(name)
    if not 1 <= count <= chip.most_devices:
        raise ValueError(f"{count} devices of {chip.name}: choose 1 to {chip.most_devices}")
    if why := why_unavailable(chip.name):
        raise NotImplementedError(why)
    if chip.platform == "tpu":
        name = next(grid for devices, grid in chip.topologies if devices >= count)
        description = topologies.get_topology_desc(name, "tpu")
    else:
        # slices x hosts x GPUs per host
        grid = f"1x{-(-count // GPUS_PER_HOST)}x{min(count, GPUS_PER_HOST)}"
        description = topologies.get_topology_desc(
            "", "cuda", target_config=_gpu_target_config(chip), topology=grid
        )
    return list(description.devices)[:count]


def _gpu_target_config(chip: Chip) -> str:
    """The chip as XLA's text message `GpuTargetConfigProto`."""
    gpu, (major, minor) = chip.gpu, chip.gpu.capability
    per_core, per_block = gpu.shared_memory
    extension = "feature_extension: ACCELERATED_FEATURES" if gpu.accelerated else ""
    # shared_memory_per_block is what a block gets without asking for more, which XLA does
    # ("optin"). Libraries recognise the vendor by the word NVIDIA in the description. For a driver
    # of no version XLA records neither library calls nor our kernels into command buffers.
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes}
  shared_memory_per_block: 49152
  shared_memory_per_core: {per_core}
  shared_memory_per_block_optin: {per_block}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {int(chip.bandwidth)}
  l2_cache_size: {gpu.l2_cache * 2**20}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {chip.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
runtime_version {{ major: 13 minor: 0 }}
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {chip.name.upper()}"
"""
