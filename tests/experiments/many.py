"""A command as one of several processes, which may be killed on the way:

    python -m tests.experiments.many NOTES SIGNAL:AFTER VERB --flag=...

The first process writes what it stores to the file NOTES, numbers of images and cells of a sweep.
Each sends itself the signal (SIGKILL, SIGTERM; 0: none) after so many images, or after the first so
many cells. Of training every process writes its steps of the transformer, and the signal comes
before a step.
"""

import os
import signal
import sys

from experiments import __main__ as overview
from experiments import processes
from experiments.cli import command_line
from experiments.output import BatchStore
from experiments.sweep.cells import CellRunner
from experiments.training.var_trainer import TransformerStage
from varjax.generation import hosts


def main() -> None:
    notes, when, verb = sys.argv[1:4]
    name, _, after = when.partition(":")
    add, keep, stored = BatchStore.add, CellRunner.keep, []
    train = TransformerStage.step

    def note(*lines):
        if hosts.is_first():
            with open(notes, "a", encoding="ascii") as file:
                file.writelines(f"{line}\n" for line in lines)
        before = len(stored)
        stored.extend(lines)
        if name != "0" and before < int(after) <= len(stored):
            os.kill(os.getpid(), getattr(signal, name))

    def added(self, series, index, results):
        if hosts.is_first():
            add(self, series, index, results)
        note(*(f"{series} {i}" for i in index))

    def kept(self, cell, row, arrays):
        keep(self, cell, row, arrays)
        note(f"cell {cell.label} {cell.budget:g}")

    def step(self, state, n):
        if name != "0" and n == int(after):
            os.kill(os.getpid(), getattr(signal, name))
        with open(notes, "a", encoding="ascii") as file:
            file.write(f"{n}\n")
        return train(self, state, n)

    BatchStore.add = added
    CellRunner.keep = kept
    TransformerStage.step = step
    processes.SEEN_WITHIN = 1.0
    module = overview.imported(f"experiments.{verb}")
    command_line.run(module.main, [f"experiments/{verb}.py", *sys.argv[4:]])


if __name__ == "__main__":
    main()
