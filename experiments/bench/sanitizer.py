"""The kernels of token attention under NVIDIA's compute-sanitizer, which sees accesses out of
bounds that give right numbers by chance."""

import shutil
import subprocess

from experiments import own_process
from experiments.bench.kernel_steps import WrongResult
from experiments.bench.rows import Call, Found, Row

TOOL = "compute-sanitizer"
FOUND = 99  # the status that it ends with if it has found something
SECONDS = 150
NOT_STARTED = (126, 127)  # a shell's, and the loader's: the tool or a library of it cannot run
# what the tool says where it cannot work with the device or the driver
UNABLE = ("Device not supported", "Internal Sanitizer Error", "Unable to find injection library")
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
    """Run the check of both kernels under the tool. `WrongResult` if it finds something, if a
    number is wrong, or if the check does not end by itself. A tool that cannot start is only noted.
    notify: not called."""
    bench = ("python", "-m", "experiments.bench", *FLAGS)
    call = Call("sanitizer", "llamagen-xl-t1", "mosaic", "bfloat16")
    command = [TOOL, f"--error-exitcode={FOUND}", *own_process.command(bench[2]), *FLAGS]
    # this process has taken its share of the device's memory already
    environment = {**own_process.environment(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, env=environment, timeout=SECONDS, **pipes)
    except subprocess.TimeoutExpired:
        note = f"not finished in {SECONDS} s, nothing found until then"
        return Found([Row(call, note=note)])
    except OSError as error:
        return Found([Row(call, note=f"not run: {TOOL} does not start: {error}")])
    if done.returncode == 0:
        return Found([Row(call, note="nothing found")])
    output = done.stdout + done.stderr
    found = done.returncode == FOUND or "WRONG" in output
    unable = done.returncode in NOT_STARTED or any(words in output for words in UNABLE)
    if unable and not found:
        return Found([Row(call, note=f"not run: {TOOL} does not start: {_told(output)}")])
    why = f"it ended with {done.returncode}: {_told(output)}; if the tool is at fault, leave it out"
    repeat = f"{TOOL} --error-exitcode={FOUND} {' '.join(bench)}"
    raise WrongResult(f"attend_token, store_token under {TOOL}: {why} of PATH", repeat)


def _told(output: str) -> str:
    """What the tool or the check says is wrong, or else the last lines."""
    lines = [line.strip(" =") for line in output.splitlines()]
    words = ("Invalid", "WRONG", "ERROR", "Error", "error", "Race")
    told = [line for line in lines if line.startswith(words)]
    return ("; ".join(told[:3]) or "; ".join(lines[-3:]) or "it says nothing")[:400]
