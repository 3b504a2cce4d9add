"""Estimates of the time that is left of a training stage."""

from varjax.progress import TimeLeft
from varjax.training.stage import TrainingStage


class StageTimeLeft:
    """Adds up the steps, validations and compilations that are ahead, from what each took so far.

    Saving counts as part of the steps.

    start: the first step of this process, which compiles.
    """

    def __init__(self, stage: TrainingStage, start: int):
        self._stage, self._left = stage, TimeLeft()
        self._programs = {start, *stage.new_programs}
        self._compiling = 0.0  # seconds since the last log line

    def called(self, n: int, seconds: float) -> None:
        """Note that the call of step n returned after so many seconds.

        The call waits for nothing but compiling.
        """
        if n in self._programs:
            self._left.measured("compilation", seconds)
            self._compiling += seconds

    def logged(self, steps: int, seconds: float) -> None:
        """Note that so many steps have run since the last log line."""
        self._left.measured("step", seconds - self._compiling, steps)
        self._compiling = 0.0

    def validated(self, seconds: float) -> None:
        """Note a validation that took so long."""
        self._left.measured("validation", seconds)

    def text(self, done: int) -> str:
        """Return `TimeLeft.text` after `done` steps, before the validation that may follow them."""
        steps, every = self._stage.steps, self._stage.settings.validate_every
        return self._left.text(
            step=steps - done,
            validation=-(-steps // every) - (done - 1) // every,
            compilation=sum(n >= done for n in self._programs),
        )
