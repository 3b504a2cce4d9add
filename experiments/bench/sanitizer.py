"""The kernels of token attention under NVIDIA's compute-sanitizer, which sees accesses out of
bounds that give right numbers by chance."""

import os
import shutil
import subprocess
import sys

from experiments.bench.kernel_steps import WrongResult
from experiments.bench.rows import Call, Found, Row

TOOL = "compute-sanitizer"
FOUND = 99  # the status that it ends with if it has found something
SECONDS = 150
FLAGS = (
    "--check",
    "--op=attend_token,store_token",
    "--shape=llamagen-xl-t1",
    "--dtype=bfloat16",
    "--implementation=mosaic",
    "--size=full",
)


def available() -> bool:
    """Whether the tool is here."""
    return shutil.which(TOOL) is not None


def check(notify: object = None) -> Found:
    """Run the check of both kernels under the tool. `WrongResult` if it finds something, or if a
    number is wrong. notify: not called."""
    bench = ("python", "-m", "experiments.bench", *FLAGS)
    call = Call("sanitizer", "llamagen-xl-t1", "mosaic", "bfloat16")
    command = [TOOL, f"--error-exitcode={FOUND}", sys.executable, *bench[1:]]
    # this process has taken its share of the device's memory already
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        note = f"not finished in {SECONDS} s, nothing found until then"
        return Found([Row(call, note=note)])
    if done.returncode in (1, FOUND):
        lines = [x.strip(" =") for x in (done.stdout + done.stderr).splitlines()]
        told = [x for x in lines if x.startswith(("Invalid", "WRONG", "ERROR", "Error", "Race"))]
        said = "; ".join(told[:3]) or "; ".join(lines[-3:])
        repeat = f"{TOOL} --error-exitcode={FOUND} {' '.join(bench)}"
        raise WrongResult(f"attend_token, store_token under {TOOL}: {said[:400]}", repeat)
    note = "nothing found" if done.returncode == 0 else f"it ended with {done.returncode}"
    return Found([Row(call, note=note)])
