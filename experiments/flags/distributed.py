"""--distributed: many processes that work as one (`experiments.processes`)."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from experiments import processes
from experiments.cli.flags import CommandFlags, about
from experiments.generation import Generation, environment

Job = TypeVar("Job", bound=Generation)
SHARED = ("batch_size", "mesh")
CHECKPOINT = ("model", "model_sources", "model_files", "schedule")


class DistributedFlag:
    """--distributed of a command that has --out."""

    def __init__(self, flags: CommandFlags):
        self._flags = flags.values
        self._flag = flags.string(
            "distributed",
            None,
            "Many processes that work as one, on all their devices: COORDINATOR:PORT,PROCESSES,"
            "INDEX, the address of process 0, how many there are, and which this is (from 0 on); "
            "or auto: what a TPU pod, GKE, SLURM or Open MPI says.",
        )

    def start(self) -> None:
        """Join the other processes, if the flag is given. `UserError` if they cannot be joined."""
        if self._flag.value is not None:
            with about(self._flag):
                processes.start(self._flag.value)

    def resolve(self, resolve: Callable[[], Job]) -> Job:
        """Join the other processes, and return what is to be done, the same in all. `UserError`, in
        all alike, if one of them cannot do it or was asked for something else."""
        self.start()
        if self._flag.value is None:
            return resolve()
        with processes.together():
            job = resolve()
        if isinstance(job, Generation):  # memory decides the batch, and differs
            smallest = int(processes.say_all(np.array(job.batch_size)).min())
            job = dataclasses.replace(job, batch_size=smallest)
        said, versions = job.describe(), environment()["versions"]
        checkpoint = {name: said.pop(name, None) for name in CHECKPOINT}
        # what decides no picture, but the programs that all run together
        same = {f"--{name}": self._flags[name].value for name in SHARED if name in self._flags}
        processes.agree({"checkpoint": checkpoint, "versions": versions, **said, **same})
        return job
