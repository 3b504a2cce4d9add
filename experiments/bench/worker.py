"""The process of `experiments.bench --machine` that uses the device.

It runs the steps one after another, keeps each as a file and says on standard output what it is
doing, in JSON lines. `machine` starts it, watches it, and starts another one where a step has ended
it. So a kernel that never ends, or that takes the process with it, is found, too.
"""

import errno
import gc
import json
import sys
import time
from collections.abc import Collection
from pathlib import Path

import jax

from experiments import step_files
from experiments.bench import device, scope, steps
from experiments.bench.checks import Case
from experiments.bench.kernel_steps import NothingCompared, WrongResult, show
from experiments.bench.steps import Step
from experiments.work_folder import WorkFolder
from pallas_kernels import bench
from pallas_kernels.ragged_attention import config
from varjax.errors import UserError

FORMAT = 1  # of step files
MARK = "@machine "  # begins the lines that `machine` reads
# statuses: a wrong result; nothing can be kept; a step failed, go on in another process
WRONG, STOPPED, AGAIN = 1, 2, 3
# of a place where nothing can be written: every step would fail
NO_PLACE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def settings(quick: bool) -> dict:
    """What two calls have in common if one may continue the other."""
    return {"format": FORMAT, "quick": quick, **device.describe()}


def say(event: str, **content: object) -> None:
    """Tell `machine` something."""
    print(MARK + json.dumps({"event": event, **content}), flush=True)


def work(folder: Path, *, quick: bool, overwrite: bool, skip: Collection[str]) -> int:
    """Run all steps that are not finished, and return the exit status.

    folder: of the unfinished run. overwrite: whether another run's may be discarded. skip: steps
    that failed in this call already.

    Raises:
      UserError: the folder holds another run; tuned tiles that cannot be used are in the way.
    """
    here, kept = scope.here(quick), WorkFolder(folder, settings(quick), "--json")
    kept.check(overwrite)
    check_tuned(here)
    kept.start()
    every = steps.listed(here)
    done = [s.name for s in every if step_files.read(folder, s.name, kept.digest) is not None]
    say("begin", steps=[s.name for s in every], done=done, kind=jax.devices()[0].device_kind)
    for step in every:
        if step.name in done or step.name in skip:
            continue
        status = _run(step, folder, kept.digest)
        if status:
            return status
    return 0


def check_tuned(here: scope.Scope) -> None:
    """Raise `UserError` if a file of tuned tiles for this device cannot be used: it would be
    ignored in every program, and adding to it would lose what it holds."""
    if here.small or here.best not in config.KINDS:
        return
    kind = jax.devices()[0].device_kind
    for operation in config.OPERATIONS:
        check_tuned_file(kind, operation, here.best)


def check_tuned_file(kind: str, operation: str, implementation: str) -> None:
    """Raise `UserError` if there is a file of tuned tiles that cannot be used."""
    path = config.tuned_path(kind, operation)
    try:
        if path.is_file():
            config.read_tuned(kind, operation, implementation)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is no file of tuned tiles for {kind} and {implementation}: {error}; move it "
            "away or delete it"
        ) from None


def _run(step: Step, folder: Path, settings: str) -> int:
    """Run a step and keep what it finds. Returns 0, or the status to end with."""
    say("start", name=step.name, limit=step.limit, checks=step.checks)
    start = time.monotonic()
    try:
        found = step.run(notify=_case) if step.checks else step.run()
    except WrongResult as wrong:
        say("wrong", name=step.name, words=wrong.words, command=wrong.command)
        return WRONG
    except NothingCompared as nothing:
        say("empty", name=step.name, why=str(nothing))
        return 0
    except Exception as error:  # after which the device may be of no use to this process
        if isinstance(error, OSError) and error.errno in NO_PLACE:
            return _stopped(step, folder, error)
        say("failed", name=step.name, why=bench.short(error, 400))
        return AGAIN
    seconds = time.monotonic() - start
    try:
        step_files.write(folder, step.name, settings, {"seconds": seconds, **found.as_json()})
    except OSError as error:
        return _stopped(step, folder, error)
    for row in found.rows:
        print(f"  {show(row)}", file=sys.stderr, flush=True)
    say("finished", name=step.name, seconds=seconds)
    jax.clear_caches()  # compiled programs hold memory of the device
    gc.collect()
    return 0


def _stopped(step: Step, folder: Path, error: OSError) -> int:
    """Say that results cannot be kept, which no further step can change. Returns the status."""
    where = error.filename or folder
    why = f"step {step.name} cannot be kept: {error.strerror or error}: {where}"
    say("stopped", why=f"{why}: make room there, or choose another --json")
    return STOPPED


def _case(case: Case) -> None:
    say("case", words=case.words, command=case.command)


def alone(name: str, quick: bool) -> int:
    """Run one step here, print what it finds, keep nothing. Returns the exit status."""
    step = steps.named(scope.here(quick), name)
    try:
        found = step.run()
    except WrongResult as wrong:
        print(f"error: wrong result: {wrong.words}", file=sys.stderr)
        return WRONG
    except NothingCompared as nothing:
        print(f"error: {nothing}", file=sys.stderr)
        return WRONG
    print("\n".join(show(row) for row in found.rows))
    return 0
