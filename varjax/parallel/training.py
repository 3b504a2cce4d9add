"""Training over several devices: `data` and `fsdp` divide the pictures of a step, and `fsdp` also
parameters, averages and the optimizer's moments.

Arrays are placed; the compiler finds what has to be exchanged. A step computes what it computes on
one device, with sums in another order.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from varjax.errors import UserError
from varjax.parallel.split import axis_sizes

AXES = {"data": "pictures", "fsdp": "pictures, parameters and optimizer state"}
DATA, FSDP = AXES
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class TrainingMesh:
    """Devices along each axis."""

    data: int = 1
    fsdp: int = 1

    @classmethod
    def parse(cls, text: str | None, available: int) -> "TrainingMesh":
        """Read "data=2,fsdp=4"; one axis may be -1: what is left over of the `available` devices.

        Raises:
          UserError: an unknown axis, no number of devices, or more devices than there are.
        """
        found = cls(**axis_sizes(text, AXES, available))
        if found.size > available:
            raise UserError(
                f"a mesh of {found} takes {found.size} devices, this machine has {available}: "
                "choose smaller axes"
            )
        return found

    def __str__(self) -> str:
        return f"data={self.data},fsdp={self.fsdp}"

    @property
    def size(self) -> int:
        return self.data * self.fsdp

    def check_batch(self, name: str, batch_size: int) -> None:
        """Raise `UserError` unless the pictures of a step can be divided evenly. name: of the
        setting."""
        if batch_size % self.size:
            raise UserError(
                f"{name}={batch_size} cannot be split evenly over a mesh of {self}: choose a "
                f"multiple of {self.size}"
            )

    @cached_property
    def devices(self) -> Mesh:
        return Mesh(np.array(jax.devices()[: self.size]).reshape(self.data, self.fsdp), tuple(AXES))

    def batch(self) -> NamedSharding:
        """Where the arrays of a step lie, pictures along their first axis."""
        return NamedSharding(self.devices, P((DATA, FSDP)))

    def state(self, tree: Tree) -> Tree:
        """Where each array of a state lies, in place of the array: it is divided along its longest
        axis that `fsdp` divides, and whole on all devices if there is none."""
        return jax.tree.map(lambda a: NamedSharding(self.devices, self._spec(a.shape)), tree)

    def _spec(self, shape: tuple[int, ...]) -> P:
        fitting = [n for n in shape if n % self.fsdp == 0 and n >= self.fsdp]
        if self.fsdp == 1 or not fitting:
            return P()
        axis = shape.index(max(fitting))
        return P(*(FSDP if i == axis else None for i in range(len(shape))))
