"""Batches that devices draw while the host does something else."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import jax
import numpy as np
from jaxtyping import Array, PyTree


class Started:
    """A batch that devices draw.

    results: of `Program.draw`. cache: None if it is not kept. begun: time on `perf_counter`.
    index: numbers of its images; None: not known.
    """

    def __init__(self, results: dict[str, Array], cache: PyTree, begun: float):
        self.results, self.cache, self.index = results, cache, None
        self._begun, self._waited = begun, False
        # a thread: whoever asks late for the results must not make the batch look slow
        self._ended = Future()
        threading.Thread(target=self._await, args=(list(results.values()),)).start()

    def _await(self, results: list[Array]) -> None:
        try:
            jax.block_until_ready(results)
            self._ended.set_result(time.perf_counter())
        except BaseException as error:
            self._ended.set_exception(error)

    def wait(self) -> float | None:
        """Waits until all results are there. Seconds since the start the first time, then None."""
        ended, waited = self._ended.result(), self._waited
        self._waited = True
        return None if waited else ended - self._begun


def in_turn(
    numbers: Iterable[np.ndarray],
    start: Callable[[np.ndarray], Started],
    wait: Callable[[Started], None],
) -> Iterator[Started]:
    """Batches that are done, each as soon as the next one is started, so that devices draw while
    the caller fetches and writes. A batch is handed out, too, if the next one cannot be started.

    numbers: of the images of each batch, asked for when the batch before is done.
    start: starts a batch. wait: waits until it is done; its cache is gone then, before the next one
      is made.
    """
    before, numbers = None, iter(numbers)
    while True:
        try:
            index = next(numbers, None)
            batch = None if index is None else start(index)
        except BaseException:
            if before is not None:
                yield before
            raise
        if before is not None:
            yield before
        if (before := batch) is None:
            return
        wait(before)
