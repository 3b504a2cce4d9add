"""A command as one of several processes, which may be killed on the way:

    python -m tests.experiments.many NOTES SIGNAL:AFTER VERB --flag=...

The first process writes what it stores to the file NOTES, numbers of images and cells of a sweep.
Each sends itself the signal (SIGKILL, SIGTERM; 0: none) after so many images, or after the first so
many cells.
"""

import importlib
import os
import signal
import sys

from experiments.cli import command_line
from experiments.output import BatchStore
from experiments.sweep.cells import CellRunner
from varjax.generation import hosts


def main() -> None:
    notes, when, verb = sys.argv[1:4]
    name, _, after = when.partition(":")
    add, keep, stored = BatchStore.add, CellRunner.keep, []

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

    BatchStore.add = added
    CellRunner.keep = kept
    module = importlib.import_module(f"experiments.{verb}.__main__")
    command_line.run(module.main, [f"experiments/{verb}.py", *sys.argv[4:]])


if __name__ == "__main__":
    main()
