"""The waiting room of a server: a bounded queue of images, and the thread that draws them.

A request's images are taken together or not at all, and places are kept for them before they are
made: decoding what somebody sent comes after that. What was taken is drawn, also while the server
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
from varjax.errors import UserError

LOG = logging.getLogger("varjax.serve")
DRAWING, COMPILING = "drawing", "compiling"  # names of threads
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


class Places:
    """Room for so many images of a `Batcher`, until it is filled or left."""

    def __init__(self, batcher: "Batcher", count: int):
        self._batcher, self._count = batcher, count

    def fill(self, works: Sequence[Item | Callable[[], object]]) -> list[Future]:
        """Have as many images drawn as there are places. This works also while the server ends."""
        assert len(works) == self._count, "a place for each image"
        found, self._count = [_Waiting(work) for work in works], 0
        self._batcher._take(len(found), found)
        return [one.future for one in found]

    def __enter__(self) -> "Places":
        return self

    def __exit__(self, *error) -> None:
        count, self._count = self._count, 0
        if count:
            self._batcher._take(count, [])


class Batcher:
    """Draws what waits, in the order in which it came, in batches.

    most: images that may wait; those that are being drawn do not count.
    """

    def __init__(self, drawer: Drawer, most: int, metrics: Metrics):
        self.drawer, self.most, self.metrics = drawer, most, metrics
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closed, self._reserved = False, 0
        self._seconds = USUAL_SECONDS  # of a batch, lately
        self._thread = threading.Thread(target=self._work, name=DRAWING, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def depth(self) -> int:
        """Images that wait."""
        return len(self._waiting) + self._reserved

    def reserve(self, count: int) -> "Places":
        """Keep room for all images of a request, before anything is done for it.

        Raises:
          QueueFull: there is no room for all of them. Closed: the server ends.
        """
        with self._changed:
            if self._closed:
                raise Closed("the server ends")
            self._forget_cancelled()
            if self.depth + count > self.most:
                rounds = 1 + self.depth / self.drawer.largest
                raise QueueFull(max(1, round(rounds * self._seconds)))
            self._reserved += count
        return Places(self, count)

    def submit(self, items: Sequence[Item]) -> list[Future]:
        """Take all images of a request. Their futures give pictures uint8 [H, W, 3]. Raises as
        `reserve` does."""
        with self.reserve(len(items)) as places:
            return places.fill(items)

    def run(self, work: Callable[[], object]) -> Future:
        """Take something else that needs the device, as one more image; raises as `reserve`."""
        with self.reserve(1) as places:
            return places.fill([work])[0]

    def _take(self, places: int, found: list[_Waiting]) -> None:
        """Put something in the place of what was reserved; nothing gives the places back."""
        with self._changed:
            self._reserved -= places
            self._waiting.extend(found)
            self._changed.notify()

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
                elif self._closed and not self._reserved:
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
            if not isinstance(error, UserError):  # that is told to who asked
                LOG.exception("drawing failed")
            for one in batch:
                if not one.future.done():
                    one.future.set_exception(error)
