"""Runs Python code in a process of its own that may not use more than so much memory and time.

A bomb that a reader swallows ends that process, not the tests.
"""

import os
import resource
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@dataclass(frozen=True)
class Ended:
    """How the process ended; `peak_bytes` of resident memory, `seconds` of processor time."""

    status: int
    stdout: str
    stderr: str
    peak_bytes: int
    seconds: float


def run_limited(*arguments: str, memory: int = 4 * GIB, seconds: int = 60, cwd=ROOT) -> Ended:
    """`python *arguments` with at most `memory` bytes of address space and `seconds` of time.

    jax takes about 1 GiB of addresses and 0.2 GiB of memory for itself.
    """

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        preexec_fn=limit,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    output = process.stdout.read()
    reader.join()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    process.stderr.close()
    peak, time = used.ru_maxrss * 1024, used.ru_utime + used.ru_stime
    return Ended(process.returncode, output, errors[0], peak, time)
