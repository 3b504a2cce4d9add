"""How many images of a series are stored, by one process or by many."""

import time

import numpy as np

from varjax.parallel import processes
from varjax.progress import Progress


class Made:
    """Counts the images that are stored, and says so in the first process.

    Processes that are not in step leave each other word of their counts, so that what is said
    meanwhile may be a batch old.

    what: what is counted, for people; series: of which processes leave word.
    before: images that were stored already; total: how many there will be.
    """

    def __init__(self, what: str, series: str, before: int, total: int):
        self._topic, self._before, self._own = f"stored of {series}", before, 0
        self._progress, self._said = Progress(what, total, first=before), before
        self._began = time.monotonic()

    def add(self, count: int) -> None:
        """This process has stored so many more, or none: the others learn of it."""
        self._own += count
        processes.post(self._topic, str(self._own))
        self._say()

    def by_all(self, ended: bool) -> tuple[int, bool]:
        """Wait for all processes; return how many images are stored, and whether any process has
        `ended` early. The same in all. `LostProcess` if one is gone."""
        any_ended = bool(processes.say_all(np.array([ended])).any())
        self._say()
        return self._stored(), any_ended

    def _stored(self) -> int:
        many = processes.count() > 1
        return self._before + (sum(map(int, processes.posted(self._topic))) if many else self._own)

    def _say(self) -> None:
        if processes.is_first() and (done := self._stored()) > self._said:
            pace = (done - self._before) / (time.monotonic() - self._began)
            self._progress.update(done, f"{pace:.2f} images/s" if processes.count() > 1 else "")
            self._said = done
