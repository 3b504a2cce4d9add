"""Many processes that work as one: `jax.distributed`, and what they tell each other.

All processes run the same command in step, on one mesh of all their devices; the first one writes.
`together` makes an error of one an error of all, `agree` compares what they were asked for. Without
`start` there is one process, and all of this does nothing. `varjax.generation.hosts` has what the
programs and arrays of several processes take.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from varjax.core.errors import UserError, some
from varjax.generation import hosts
from varjax.storage import lock

AUTO = "auto"
Tree, Item = TypeVar("Tree"), TypeVar("Item")
EXAMPLE = "auto or COORDINATOR:PORT,PROCESSES,INDEX, for example 10.0.0.1:1234,4,0"
START_S, HEARTBEAT_S, STOP_S = 120, 45, 30  # seconds until somebody counts as lost
SEEN_WITHIN = 20.0  # seconds until a shared file system shows what another machine has written
MOST = 10**5  # processes
MESSAGE = 2000  # bytes of an error that other processes are told


class AgreedError(UserError):
    """An error that all processes raise together."""


class Stopped(Exception):
    """The system has asked to end, and what was begun is stored. what: what is counted. of: what
    begins the message."""

    def __init__(self, done: int, total: int, what: str = "images", of: str = ""):
        super().__init__(f"{of}{done} of {total} {what} are stored: resume by the same command")


def start(text: str) -> None:
    """Join the other processes; it waits for all of them. Call it before JAX is used.

    text: "auto" (TPU pods, GKE, SLURM, Open MPI), or "COORDINATOR:PORT,PROCESSES,INDEX".
      `UserError` if it says something else, or nothing is detected. If the others do not come
      within `START_S`, JAX ends the process.
    """
    given = {} if text == AUTO else place(text)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX ends the process by a signal if the others do not come: this says beforehand why
    line = f"--distributed={text}: waiting for all processes, {START_S} s at most"
    print(line, file=sys.stderr, flush=True)
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=START_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=STOP_S,
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"the processes do not find each other ({reason:.200}): start all of them with one "
            f"coordinator that they can reach; give {EXAMPLE}"
        ) from None


def place(text: str) -> dict[str, str | int]:
    """Read "10.0.0.1:1234,4,0": what `jax.distributed.initialize` takes. `UserError` unless it is
    one of its processes."""
    match = re.fullmatch(r"(\S+:(\d{1,5})),(\d{1,6}),(\d{1,6})", text, re.ASCII)
    if not match or not 0 < int(match[2]) < 2**16:
        raise UserError(f"give {EXAMPLE}")
    coordinator, count, index = match[1], int(match[3]), int(match[4])
    if not 1 <= count <= MOST or index >= count:
        raise UserError(
            f"there is no process {index} of {count}: processes are counted from 0 on; give "
            f"{EXAMPLE}"
        )
    found = {"coordinator_address": coordinator, "num_processes": count, "process_id": index}
    if coordinator.startswith(("127.0.0.1:", "localhost:")):
        found["coordinator_bind_address"] = coordinator  # nobody else has to reach it
    return found | {"cluster_detection_method": "deactivate"}


def wait() -> None:
    """Wait for all processes. `LostProcess` if one does not answer."""
    say_all(np.zeros(1))


@contextlib.contextmanager
def held(folder: Path, message: str, advice: str) -> Iterator[None]:
    """Hold `folder` (`varjax.storage.lock`) for all processes while the block runs. `UserError` in
    all of them if another run holds it (`message`), or a process does not see the first one's
    folder (`advice`)."""
    with contextlib.ExitStack() as stack:
        with together():
            if hosts.is_first():
                stack.enter_context(lock.held(folder, message))
        with together():
            end = time.monotonic() + SEEN_WITHIN
            while not (folder / lock.NAME).exists():
                if time.monotonic() > end:
                    where = f"{folder} is not the same folder as that of process 0"
                    raise UserError(f"{where}: {advice}")
                time.sleep(0.2)
        yield


def say_all(values: np.ndarray) -> np.ndarray:
    """Exchange arrays of one shape; return those of all processes, [processes, ...]. It waits for
    all. `LostProcess` if one does not answer."""
    values = np.asarray(values)
    if hosts.count() == 1:
        return values[None]
    from jax.experimental import multihost_utils  # it registers what few commands need

    with hosts.answering():
        return np.asarray(multihost_utils.process_allgather(values))


def from_first(tree: Tree) -> Tree:
    """Return the arrays of the first process, in all of them. The others give arrays of the same
    shapes and types, of at most 32 bits."""
    if hosts.count() == 1:
        return tree
    from jax.experimental import multihost_utils

    with hosts.answering():
        return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Context in which an error of one process is raised in all of them: `AgreedError` for a
    `UserError` or `OSError`. It waits for all; `LostProcess` if one does not answer."""
    if hosts.count() == 1:
        yield
        return
    mine = ""
    try:
        yield
    except (UserError, OSError) as error:
        mine = str(error) or type(error).__name__
    said = np.zeros(MESSAGE, np.uint8)
    data = np.frombuffer(mine.encode(errors="replace")[:MESSAGE], np.uint8)
    said[: len(data)] = data
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in say_all(said)]
    failed = [mine] * bool(mine)
    failed += [f"process {i}: {text}" for i, text in enumerate(texts) if text]
    if failed:
        raise AgreedError(failed[0])


def agree(asked: Mapping[str, object]) -> None:
    """Check that all processes were asked for the same. `AgreedError` says what differs and in
    which processes, the same in all of them. asked: JSON data by name, in one order."""
    named = {"settings": list(asked), **asked}
    texts = [json.dumps(value, sort_keys=True, default=str) for value in named.values()]
    hashes = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    # arrays of one shape, also where one process has more settings than another
    every = say_all(np.frombuffer(hashes.ljust(32 * 256, b"\0"), np.uint8).reshape(256, 32))
    other = (every != every[:1]).any(-1)  # [processes, names]
    if other.any():
        who = some([str(i) for i in np.flatnonzero(other.any(1))], 8)
        what = some(
            [name for name, differs in zip(named, other.any(0), strict=False) if differs], 8
        )
        raise AgreedError(
            f"process {who} was started with another {what} than process 0: give all processes the "
            "same flags, files and versions"
        )


def leave(status: int) -> None:
    """End this process at once if it fails alone. Its connections close, so that the others notice;
    otherwise JAX would first wait for them."""
    if status and hosts.count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Stop:
    """Whether the system has asked to end, by SIGTERM. As a context manager it listens.

    Of many processes JAX handles the signal from `start` on, and chooses a step that all
    of them have still to come to.

    done: steps before this run; a step is of training, a batch or a file. Orbax's manager of
      checkpoints asks JAX as well, by the number of its step, so that they are counted alike.
    """

    asked = False

    def __init__(self, done: int = 0):
        self._done = done

    def __enter__(self) -> "Stop":
        if hosts.count() == 1:
            with contextlib.suppress(ValueError):  # not in the main thread: nobody asks there
                self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *error) -> None:
        with contextlib.suppress(ValueError, AttributeError):
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True

    def after_step(self) -> bool:
        """Whether to end now, the same in all processes. All of them call it after every step."""
        if hosts.count() > 1:
            from jax.experimental import multihost_utils  # it registers what few commands need

            self._done += 1
            # it is True of one step only
            self.asked |= multihost_utils.reached_preemption_sync_point(self._done)
        return self.asked

    def steps(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, until the system has asked to end. The next item ends a step."""
        for item in items:
            yield item
            if self.after_step():
                return
