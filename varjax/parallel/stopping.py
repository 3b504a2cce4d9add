"""Ending early: the system asks one process or many, and all end after the same step."""

import contextlib
import signal

from varjax.parallel import processes


class Stop:
    """Whether the system has asked to end, by SIGTERM. As a context manager it listens.

    Of many processes JAX handles the signal from `processes.start` on, and chooses a step that all
    of them have still to come to.

    done: steps before this run; a step is of training, a batch or a file. Orbax's manager of
      checkpoints asks JAX as well, by the number of its step, so that they are counted alike.
    """

    asked = False

    def __init__(self, done: int = 0):
        self._done = done

    def __enter__(self) -> "Stop":
        if processes.count() == 1:
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
        if processes.count() > 1:
            from jax.experimental import multihost_utils  # it registers what few commands need

            self._done += 1
            # it is True of one step only
            self.asked |= multihost_utils.reached_preemption_sync_point(self._done)
        return self.asked
