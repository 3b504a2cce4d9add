"""The waiting room of a server: a bounded queue of images, and the thread that draws them.

A request's images are taken together or not at all. What was taken is drawn, also while the server
ends; only a client that went away takes its images back, as long as nobody draws them.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from experiments.serve.drawer import Drawer, Item
from experiments.serve.metrics import Metrics

LOG = logging.getLogger("varjax.serve")
USUAL_SECONDS = 1.0  # of a batch, before one was drawn


class QueueFull(Exception):
    """Too many images wait. seconds: after which it may be worth trying again."""

    def __init__(self, seconds: int):
        super().__init__(f"too many pictures wait: try again in {seconds} s")
        self.seconds = seconds


class Closed(Exception):
    """The server ends and takes nothing more."""


@dataclass(eq=False)
class _Waiting:
    work: Item | Callable[[], object]
    future: Future = field(default_factory=Future)


class Batcher:
    """Draws what waits, in the order in which it came, in batches.

    most: images that may wait; those that are being drawn do not count.
    """

    def __init__(self, drawer: Drawer, most: int, metrics: Metrics):
        self.drawer, self.most, self.metrics = drawer, most, metrics
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._seconds = USUAL_SECONDS  # of a batch, lately
        self._thread = threading.Thread(target=self._work, name="drawing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def depth(self) -> int:
        """Images that wait."""
        return len(self._waiting)

    def submit(self, items: Sequence[Item]) -> list[Future]:
        """Take all images of a request. Their futures give pictures uint8 [H, W, 3].

        Raises:
          QueueFull: there is no room for all of them. Closed: the server ends.
        """
        return self._take([_Waiting(item) for item in items])

    def run(self, work: Callable[[], object]) -> Future:
        """Take something else that needs the device, as one more image; raises as `submit` does."""
        return self._take([_Waiting(work)])[0]

    def _take(self, found: list[_Waiting]) -> list[Future]:
        with self._changed:
            if self._closed:
                raise Closed("the server ends")
            self._forget_cancelled()
            if len(self._waiting) + len(found) > self.most:
                rounds = 1 + len(self._waiting) / self.drawer.largest
                raise QueueFull(max(1, round(rounds * self._seconds)))
            self._waiting.extend(found)
            self._changed.notify()
        return [one.future for one in found]

    def _forget_cancelled(self) -> None:
        if any(one.future.cancelled() for one in self._waiting):
            self._waiting = deque(one for one in self._waiting if not one.future.cancelled())

    def close(self, seconds: float | None = None) -> None:
        """Take nothing more, draw what waits, and return when all is done, or after so many
        seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    # --- the drawing thread -----------------------------------------------------------------------

    def _work(self) -> None:
        while batch := self._next():
            start = time.perf_counter()
            if isinstance(batch[0].work, Item):
                self._settle(batch, self._draw)
                self._seconds = 0.8 * self._seconds + 0.2 * (time.perf_counter() - start)
            else:
                self._settle(batch, lambda works: [work() for work in works])

    def _next(self) -> list[_Waiting]:
        """Wait for the next batch; an empty one ends the thread."""
        with self._changed:
            while True:
                self._forget_cancelled()
                if self._waiting:
                    batch = self._some()
                    # from here on nobody can take an image back
                    batch = [one for one in batch if one.future.set_running_or_notify_cancel()]
                    if batch:
                        return batch
                elif self._closed:
                    return []
                else:
                    self._changed.wait()

    def _some(self) -> list[_Waiting]:
        if not isinstance(self._waiting[0].work, Item):
            return [self._waiting.popleft()]
        # images behind something else may come before it: they do not depend on it
        items = [one for one in self._waiting if isinstance(one.work, Item)]
        batch = items[: self.drawer.size_for(len(items))]
        chosen = set(map(id, batch))
        self._waiting = deque(one for one in self._waiting if id(one) not in chosen)
        return batch

    def _draw(self, items: list[Item]) -> list[np.ndarray]:
        start = time.perf_counter()
        found = self.drawer.draw(items)
        self.metrics.drew(len(items), time.perf_counter() - start)
        return found

    def _settle(self, batch: list[_Waiting], do: Callable[[list], list]) -> None:
        """Put results, or what went wrong, into the futures of a batch."""
        try:
            for one, result in zip(batch, do([one.work for one in batch]), strict=True):
                one.future.set_result(result)
        except Exception as error:  # one batch that fails must not end the server
            LOG.exception("drawing failed")
            for one in batch:
                if not one.future.done():
                    one.future.set_exception(error)
