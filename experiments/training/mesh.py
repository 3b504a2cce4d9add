"""Training over several devices: `data` and `fsdp` divide the pictures of a step, and `fsdp` also
parameters, averages and the optimizer's moments.

State and pictures are placed. While a layer runs its parameters are whole on every device, and its
activations are of the device's own pictures; gradients are summed where the parameters lie (ZeRO,
stage 3: Rajbhandari et al. 2020). The compiler finds the exchanges that this takes: without being
told so, it divides products over heads and widths, and exchanges activations, which are many times
larger. A step computes what it computes on one device, with sums in another order. The devices may
belong to several processes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from varjax.core.errors import UserError
from varjax.generation import hosts
from varjax.generation.mesh import IMAGES, REST, axis_sizes, by_longest, make_mesh, shardings

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
        Without a text one process trains on one device, and many train on all of theirs.
        `UserError` for an unknown axis, no number of devices, more devices than there are, or of
        many processes fewer."""
        if text is None and hosts.count() > 1:
            text = f"{DATA}={REST}"
        found = cls(**axis_sizes(text, AXES, available))
        takes = f"a mesh of {found} takes {found.size} devices, {hosts.where()} has {available}"
        if found.size > available:
            raise UserError(f"{takes}: choose smaller axes")
        if hosts.count() > 1 and found.size < available:
            raise UserError(f"{takes}: the mesh has to take all, for example {DATA}={REST}")
        return found

    def __str__(self) -> str:
        return f"data={self.data},fsdp={self.fsdp}"

    @property
    def size(self) -> int:
        return self.data * self.fsdp

    def check_batch(self, name: str, batch_size: int, accumulate: int = 1) -> None:
        """Raise `UserError` unless the pictures of a step can be divided evenly. name: of the
        setting. accumulate: parts of a step that run one after the other."""
        parts = self.size * accumulate
        if batch_size % parts:
            by = [f"a mesh of {self}"] * (self.size > 1)
            by += [f"accumulate={accumulate}"] * (accumulate > 1)
            raise UserError(
                f"{name}={batch_size} cannot be split evenly over {' and '.join(by)}: choose a "
                f"multiple of {parts}"
            )

    @cached_property
    def devices(self) -> Mesh:
        return self.over(jax.devices())

    def over(self, devices: Sequence[jax.Device]) -> Mesh:
        """The first of these devices with the axes of the mesh; they may be of absent chips."""
        return make_mesh({DATA: self.data, FSDP: self.fsdp}, devices)

    def batch(self) -> NamedSharding:
        """Sharding of the arrays of a step, pictures along their first axis."""
        return shardings(P(IMAGES), self.devices)

    def whole(self) -> NamedSharding:
        """Sharding of arrays that every device holds whole."""
        return shardings(P(), self.devices)

    def state(self, tree: Tree) -> Tree:
        """Sharding of each array of a state, in the array's place: it is divided along its longest
        axis that `fsdp` divides, and whole on all devices if there is none."""
        names = jax.tree.map(lambda a: by_longest(a.shape, self.fsdp), tree)
        return shardings(names, self.devices)

    def images(self, tree: Tree) -> Tree:
        """Keep arrays of a compiled step divided by pictures, their first axis. They stay as they
        are where they cannot be divided evenly."""

        def divided(array: jax.Array) -> jax.Array:
            if self.size == 1 or array.shape[0] % self.size:
                return array
            return jax.lax.with_sharding_constraint(array, self.batch())

        return jax.tree.map(divided, tree)

    def in_use(self, weights: Tree, but: Collection[str] = ()) -> Tree:
        """Return parameters of a compiled step whole on every device. Their gradients are divided
        as they are. but: names of parts that stay divided."""
        if self.fsdp == 1:
            return weights

        def gathered(path: tuple, array: jax.Array) -> jax.Array:
            names = {str(getattr(key, "key", getattr(key, "name", key))) for key in path}
            return array if names & set(but) else self._in_use(array)

        return jax.tree_util.tree_map_with_path(gathered, weights)

    def _in_use(self, array: jax.Array) -> jax.Array:
        divided = self.state(array)
        whole = partial(jax.lax.with_sharding_constraint, shardings=self.whole())
        summed = partial(jax.lax.with_sharding_constraint, shardings=divided)
        gather = jax.custom_vjp(whole)
        # not `gather` again: `but_gathered` has to see the operation
        gather.defvjp(lambda a: (whole(a), None), lambda _, gradient: (summed(gradient),))
        return gather(array)

    def differentiated(self, layer: Callable, once: Collection[str], again: bool) -> Callable:
        """The body of a scan over layers, (activations, (parameters, others)) -> activations, as it
        is differentiated: its parameters are whole only while it runs, also when it runs again.

        once: names of parts that it does not read. again: whether all of it runs again for
          gradients, so that no activation inside is kept; else only what gathers parameters does.
        """
        if self.size == 1:
            return jax.checkpoint(layer) if again else layer

        def divided(x: jax.Array, inputs: tuple) -> jax.Array:
            block, other = inputs
            return self.images(layer(self.images(x), (self.in_use(block, once), other)))

        def but_gathered(primitive, *_, **__) -> bool:
            return primitive.name != "sharding_constraint"

        return jax.checkpoint(divided, policy=None if again else but_gathered)
