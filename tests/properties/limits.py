"""Runs Python code in a process of its own that may not use more than so much memory and time.

A bomb that a reader swallows ends that process, not the tests.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
# A small process between: the most memory that a process had counts what the one that started it
# has, which here is a worker of the tests.
BETWEEN = """
import json, resource, subprocess, sys
memory, seconds, report = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
status = subprocess.run([sys.executable, *sys.argv[4:]]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
found = [status, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime]
open(report, "w").write(json.dumps(found))
"""


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
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        limits = (str(memory), str(seconds), str(report))
        ended = subprocess.run(
            [sys.executable, "-S", "-c", BETWEEN, *limits, *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            errors="replace",
        )
        assert report.exists(), ended.stderr
        status, peak, time = json.loads(report.read_text())
    return Ended(status, ended.stdout, ended.stderr, peak, time)
