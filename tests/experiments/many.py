"""A command as one of several processes, which may be killed on the way:

    python -m tests.experiments.many NOTES SIGNAL:AFTER VERB --flag=...

It writes the numbers of images that it stores to the file NOTES, and sends itself the signal
(SIGKILL, SIGTERM; 0: none) after so many batches.
"""

import importlib
import os
import signal
import sys

from experiments.output import BatchStore
from varjax.cli import command_line
from varjax.parallel import shared_folder


def main() -> None:
    notes, when, verb = sys.argv[1:4]
    name, _, after = when.partition(":")
    add, stored = BatchStore.add, []

    def noted(self, series, index, results):
        add(self, series, index, results)
        stored.append(index)
        with open(notes, "a", encoding="ascii") as file:
            file.writelines(f"{series} {i}\n" for i in index)
        if name != "0" and len(stored) == int(after):
            os.kill(os.getpid(), getattr(signal, name))

    BatchStore.add = noted
    shared_folder.SEEN_WITHIN = 1.0
    module = importlib.import_module(f"experiments.{verb}.__main__")
    command_line.run(module.main, [f"experiments/{verb}.py", *sys.argv[4:]])


if __name__ == "__main__":
    main()
