"""Watching the process that runs the steps of `experiments.bench --machine`: what it says, how long
a step takes, and how it ends."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from experiments.aot.worker import LAST_LINES
from experiments.bench.worker import AGAIN, MARK

BEGIN_SECONDS = 180  # until the device answers
BETWEEN_SECONDS = 60  # from one step to the next, or to the end of the process


@dataclass(frozen=True)
class Wrong:
    """A wrong result, a check that failed or that did not end. words: the input that shows it, and
    what is wrong. command: repeats it; empty where it is not known."""

    step: str
    words: str
    command: str


class Refused(Exception):
    """The process does not start, or cannot go on. status: the one to exit with. why: empty where
    the process has said it."""

    def __init__(self, status: int, why: str = ""):
        super().__init__(status, why)
        self.status, self.why = status, why


@dataclass
class Watch:
    """What is known of the steps of one call.

    names: all steps. done: those that are kept. failed: {step: why}.
    wrong: what ended the call; None if nothing did.
    """

    names: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    wrong: Wrong | None = None
    _step: dict | None = None  # the one that is running
    _case: dict | None = None  # what it compares
    _place: str = ""  # why results cannot be kept
    _ran: bool = False  # whether this process has started with a step

    @property
    def left(self) -> list[str]:
        """Steps that are neither kept nor failed."""
        return [n for n in self.names if n not in self.done and n not in self.failed]

    def follow(self, command: Sequence[str], environment: dict[str, str], until: float) -> bool:
        """Run the command until it ends, hangs or the time is up, and note what it says. Returns
        whether another one should go on. until: as `time.monotonic` says.

        Raises:
          Refused: it ended, or was ended, before it began with the steps or between two of them, or
            cannot keep what it finds.
        """
        self._step = self._case = None
        self._ran = begun = False
        ends = time.monotonic() + BEGIN_SECONDS
        with _process(command, environment) as (process, events, last):
            while True:
                try:
                    event = events.get(timeout=max(0.0, min(until, ends) - time.monotonic()))
                except queue.Empty:
                    return self._late(until)
                if event is None:
                    return self._ended(process.wait(), begun, last)
                begun = True
                self._note(event)
                between = time.monotonic() + BETWEEN_SECONDS
                ends = self._step["ends"] if self._step else between

    def _note(self, event: dict) -> None:
        kind = event["event"]
        if kind == "begin":
            self.names, self.done = event["steps"], list(event["done"])
            print(f"{event['kind']}: {len(self.done)} of {len(self.names)} steps are done")
        elif kind == "start":
            self._step = {**event, "ends": time.monotonic() + event["limit"]}
            self._case, self._ran = None, True
        elif kind == "case":
            self._case = event
            self._step["ends"] = time.monotonic() + self._step["limit"]
        elif kind == "wrong":
            self.wrong = Wrong(event["name"], event["words"], event["command"])
            self._step = None
        elif kind == "failed":
            self._fail(event["why"])
        elif kind == "empty":  # a check that says nothing about the kernel
            self._leave_out(event["why"])
        elif kind == "stopped":
            self._place, self._step = event["why"], None
        elif kind == "finished":
            self.done.append(event["name"])
            self._step = None
            told = f"{len(self.done)}/{len(self.names)}  {event['name']}  {event['seconds']:.0f} s"
            print(f"steps {told}", file=sys.stderr, flush=True)

    def _late(self, until: float) -> bool:
        """The process said nothing for too long."""
        if self._place:
            raise Refused(2, self._place)
        if self.wrong:
            return False
        up = time.monotonic() >= until
        if not self._ran and not (up and self.names):
            before = "before the time was up" if up else f"within {BEGIN_SECONDS} s"
            raise Refused(1, f"the device did not answer {before}: see whether others use it")
        if up:
            return False
        if self._step:
            self._fail(f"it did not end within {self._step['limit']:.0f} s")
        else:
            print(f"no step for {BETWEEN_SECONDS} s: another process goes on", file=sys.stderr)
        return self.wrong is None and bool(self.left)

    def _ended(self, status: int, begun: bool, last: Sequence[str]) -> bool:
        """The process has ended by itself."""
        said, error = f"ended with {status}: {'; '.join(last)[-400:]}", max(1, status)
        if self._place:
            raise Refused(2, self._place)
        if not begun:
            raise Refused(error, "" if status > 0 else f"the process of the steps {said}")
        if self.wrong:
            return False
        if self._step:
            self._fail(f"the process {said}")
        elif status != AGAIN and self.left:
            raise Refused(error, f"the process of the steps {said}, between two of them")
        return self.wrong is None and bool(self.left)

    def _fail(self, why: str) -> None:
        """The step that is running has failed. Of a check that is a wrong result."""
        name, case = self._step["name"], self._case
        if not self._step["checks"]:
            self._leave_out(why)
            return
        print(f"step {name} failed: {why}", file=sys.stderr, flush=True)
        words = f"{case['words']}: {why}" if case else why
        self.wrong = Wrong(name, words, case["command"] if case else "")
        self._step = None

    def _leave_out(self, why: str) -> None:
        """The step that is running is listed as failed, and the others go on."""
        name = self._step["name"]
        print(f"step {name} failed: {why}", file=sys.stderr, flush=True)
        self.failed[name], self._step = why, None


@contextlib.contextmanager
def _process(command: Sequence[str], environment: dict[str, str]) -> Iterator[tuple]:
    """(a process, the queue of what it says, the last lines of its errors); None in the queue is
    the end. Other lines are printed. At the end of the block it is killed, with what it has
    started. Its input tells it that this process is there (`lifeline`)."""
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    events: queue.Queue = queue.Queue()
    last: deque[str] = deque(maxlen=LAST_LINES)
    errors = threading.Thread(target=_forward, args=(process.stderr, last), daemon=True)
    said = threading.Thread(target=_read, args=(process.stdout, events, errors), daemon=True)
    for reader in (errors, said):
        reader.start()
    try:
        yield process, events, last
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(lines: Iterable[str], events: queue.Queue, errors: threading.Thread) -> None:
    """Put what is said into the queue; at the end, when all errors are read, too, None."""
    for line in lines:
        if line.startswith(MARK):
            events.put(json.loads(line.removeprefix(MARK)))
        else:
            print(line, end="", file=sys.stderr)
    errors.join()
    events.put(None)


def _forward(lines: Iterable[str], last: deque) -> None:
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        if line.strip():
            last.append(line.strip()[:300])
