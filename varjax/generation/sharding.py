"""Generation over several devices: one program, run by every device on its share.

`data` splits the images of a batch, and nothing is exchanged. `model` splits heads and the width of
the feed-forward: every device has a pool of its own for its heads, and two sums per layer are
exchanged. An image does not depend on how a batch is split.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from varjax.core.drawing import Inputs, decode
from varjax.core.errors import UserError
from varjax.core.layer_inputs import SegmentInputs
from varjax.core.plan import CachePlan
from varjax.core.sequence import TOKENS
from varjax.fast.stored import Leaf
from varjax.generation import hosts, weights
from varjax.generation.mesh import DATA, HEADS, IMAGES, MODEL, MeshSpec, mesh_spec

Tree = TypeVar("Tree")  # anything that JAX takes for a tree of arrays
# results along `model` are equal on all devices because of the sums per layer
_unchecked = partial(jax.shard_map, check_vma=False)


@dataclass(frozen=True, eq=False)
class ShardedProgram:
    """The program that draws codes (`varjax.core.decode`, run by every device on its share).

    tree: the structure of the networks.
    specs: `PartitionSpec`s of the arguments (weights, state, condition, keys, inputs).
    """

    mesh: Mesh
    tree: jax.tree_util.PyTreeDef
    specs: tuple

    @classmethod
    def of(
        cls, mesh: Mesh, networks: Mapping[str, nnx.Module], inputs: Inputs, kv_dtype
    ) -> "ShardedProgram":
        """Divide every array by the names of its axes (`varjax.generation.mesh.RULES`).

        networks, inputs: may be shapes. kv_dtype: type of the pool.
        """
        images = P(IMAGES)
        state = _state_names(inputs.spec.plan, mesh.shape[MODEL], kv_dtype)
        tables = _table_names(inputs, mesh.shape[MODEL])
        given = jax.tree.map(lambda _: images, inputs.given)
        flat = tuple(jax.tree.leaves(weights.names(networks)))
        names = flat, state, images, images, replace(inputs, tables=tables, given=given)
        specs = jax.tree.map(lambda a: mesh_spec(a, mesh.axis_names), names)
        return cls(mesh, jax.tree.structure(networks), specs)

    def __call__(self, *arguments):
        state, spec = self.specs[1], self.specs[-1].spec

        def run(local, *more):
            networks = self.tree.unflatten(local)
            if self.mesh.shape[MODEL] > 1:
                divided = networks["transformer"].over(MODEL)
                networks = {**networks, "transformer": divided}
            return decode(networks, *more)

        names = ["tokens", "code_map"] + ["logits"] * spec.keep_logits
        results = {name: P(DATA) for name in names}
        where = {"mesh": self.mesh, "in_specs": self.specs, "out_specs": (results, state)}
        return _unchecked(run, **where)(*arguments)

    def place_shapes(self, which: int | slice, arguments: Tree) -> Tree:
        """Return shapes of some arguments, placed on the mesh. which: their place in `specs`."""
        places = jax.tree.broadcast(self.shardings[which], arguments)
        return jax.tree.map(
            lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
            arguments,
            places,
        )

    def over_images(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Make every device along `data` run `function(weights, array [B, ...]) -> array [B, ...]`
        for its own images. weights: the codec's, whole on all devices."""
        given = (P(), P(DATA))
        return _unchecked(function, mesh=self.mesh, in_specs=given, out_specs=P(DATA))

    @cached_property
    def shardings(self) -> tuple:
        """The `NamedSharding` of every argument."""
        return jax.tree.map(partial(NamedSharding, self.mesh), self.specs)


def check_plan(plan: CachePlan, spec: MeshSpec) -> None:
    """Raise `UserError` if a plan cannot be carried out on such a mesh."""
    if spec.num_devices == 1:
        return
    if spec.model > 1 and (reason := plan.whole_because):
        raise UserError(f"mesh {spec}: policy {plan.policy.name!r} {reason}")
    taken = plan.allocated_bytes(1, "float32", spec.model)
    taken /= max(1, plan.dense_bytes(1, "float32"))
    if plan.accounting == "bytes" and taken > plan.budget + 1e-9:
        raise UserError(
            f"mesh {spec}: the plan keeps {plan.budget:.2%} of the full cache on one device, but "
            f"divided over {spec.model} it would take {taken:.2%}: plan for the mesh "
            f"(varjax.plan(..., mesh=mesh)), or take accounting=tokens"
        )
    # Inputs of a policy are shared by all devices along `data`; they may not depend on the images,
    # of which there may be inputs of one only.
    one, two = (plan.policy_inputs(np.zeros(images, np.int64)) for images in (1, 2))
    if list(map(np.shape, jax.tree.leaves(one))) != list(map(np.shape, jax.tree.leaves(two))):
        raise UserError(
            f"mesh {spec}: policy {plan.policy.name!r} treats the images of a batch differently, "
            f"which works on one device only"
        )


def _state_names(plan: CachePlan, groups: int, dtype) -> PyTree[P]:
    """Return the plan's cache with names of its axes (`varjax.generation.mesh`) in place of
    every array. groups: of heads. dtype: type of the pool."""
    # Axes are found by comparison: that of rows in the cache of two images, those that devices
    # divide in the cache of one of them. The type of queries and keys that a policy observes does
    # not change how they are divided.
    part = plan.divide(groups)[0]
    one, two, share = (
        jax.eval_shape(lambda p=p, n=n, g=g: p.empty_state(n, dtype, groups=g))
        for p, n, g in ((plan, 1, groups), (plan, 2, groups), (part, 1, 1))
    )

    def named(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct, share) -> P:
        sizes = zip(one.shape, two.shape, share.shape, strict=True)
        return P(*(IMAGES if n != m else HEADS if n != s else None for n, m, s in sizes))

    return jax.tree.map(named, one, two, share)


def _table_names(inputs: Inputs, groups: int) -> tuple:
    """The tables with names of their axes in place of every array."""
    plan, tables = inputs.spec.plan, inputs.tables
    if plan.geometry.kind == TOKENS:
        # the same for all images: `check_plan` refuses inputs that depend on them
        # heads are divided along `model`: inputs that differ by head have to be, too
        axis = plan.rule.inputs_heads if tables and groups > 1 else None
        # in front of what `select` sees lies an axis of stages
        name = P() if axis is None else P(*(None,) * (1 + axis), HEADS)
        return jax.tree.map(lambda _: name, tables)
    # tables of groups of heads lie side by side along the third axis; all devices need all of what
    # describes the scale itself
    heads = P(None, None, HEADS) if groups > 1 else P()
    steps = (jax.tree.map(lambda _: P(), segment.step) for segment in tables)
    layers = (jax.tree.map(lambda _: heads, segment.layers) for segment in tables)
    return tuple(map(SegmentInputs, steps, layers))


def place(arrays: Tree, shardings: PyTree[NamedSharding]) -> Tree:
    """Put arrays on a mesh. With several processes each of them has all of every array, and hands
    over its own devices' parts."""
    if hosts.count() == 1:
        return jax.device_put(arrays, shardings)

    def placed(array: Leaf, where: NamedSharding) -> Leaf:
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):  # which are not NumPy's
            kind = jax.random.key_impl(array)
            return jax.random.wrap_key_data(placed(jax.random.key_data(array), where), impl=kind)
        held = np.asarray(array)
        return jax.make_array_from_callback(held.shape, where, lambda part: held[part])

    return jax.tree.map(placed, arrays, jax.tree.broadcast(shardings, arrays))
