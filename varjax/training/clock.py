"""How much time is left of a training stage."""

from varjax.progress import TimeLeft
from varjax.training.stage import Stage


class Clock:
    """Steps, validations and compilations that are ahead, each as long as it took so far; saving is
    part of the steps. start: the first step of this process, which compiles."""

    def __init__(self, stage: Stage, start: int):
        self._stage, self._left = stage, TimeLeft()
        self._programs = {start, *stage.new_programs}
        self._compiling = 0.0  # seconds since the last log line

    def called(self, n: int, seconds: float) -> None:
        """The call of step n returned; compiling is the only thing that it waits for."""
        if n in self._programs:
            self._left.measured("compilation", seconds)
            self._compiling += seconds

    def logged(self, steps: int, seconds: float) -> None:
        """So many steps have run since the last log line."""
        self._left.measured("step", seconds - self._compiling, steps)
        self._compiling = 0.0

    def validated(self, seconds: float) -> None:
        self._left.measured("validation", seconds)

    def text(self, done: int) -> str:
        """After `done` steps, before their validation if there is one (`TimeLeft.text`)."""
        steps, every = self._stage.steps, self._stage.settings.validate_every
        return self._left.text(
            step=steps - done,
            validation=-(-steps // every) - (done - 1) // every,
            compilation=sum(n >= done for n in self._programs),
        )
