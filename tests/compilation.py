"""XLA's flags for tests on a CPU: code that is soon made, since most of the time is compilation.

The sampler of a small model and its decoder: 1.9 seconds of processor time in XLA, of 4.5 without
the first three of them (jaxlib 0.10.2).
"""

import platform
from importlib import metadata


def quick_flags() -> list[str]:
    flags = [
        "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling,xla_cpu_optimize_for_size",
        "--xla_cpu_parallel_codegen_split_count=1",  # parts are for cores that are idle
    ]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("--xla_cpu_max_isa=AVX")  # few instructions to choose from
    if metadata.version("jaxlib").startswith("0.10."):  # later ones do not know this flag
        flags.append("--xla_cpu_use_fusion_emitters=false")  # 4 seconds become 3
    return flags
