"""`experiments.train` as one of several processes, which may be killed on the way:

    python -m tests.experiments.training.many NOTES SIGNAL:STEP --flag=...

It writes every step that it takes to the file NOTES, and sends itself the signal (SIGKILL, SIGTERM;
0: none) when it comes to that step of the transformer.
"""

import os
import signal
import sys

from experiments import processes, train
from experiments.cli import command_line
from experiments.training.var_trainer import TransformerStage


def main() -> None:
    notes, when, *flags = sys.argv[1:]
    name, _, where = when.partition(":")
    step = TransformerStage.step

    def noted(self, state, n):
        if name != "0" and n == int(where):
            os.kill(os.getpid(), getattr(signal, name))
        with open(notes, "a", encoding="ascii") as file:
            file.write(f"{n}\n")
        return step(self, state, n)

    TransformerStage.step = noted
    processes.SEEN_WITHIN = 1.0
    command_line.run(train.main, ["experiments/train.py", *flags])


if __name__ == "__main__":
    main()
