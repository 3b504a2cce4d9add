"""Plans on several devices: which can be carried out, and what the axes of their caches count."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from varjax.cache.plan import CachePlan
from varjax.errors import UserError
from varjax.logical_axes import IMAGES
from varjax.parallel.split import MeshSpec


def check_plan(plan: CachePlan, spec: MeshSpec) -> None:
    """Raise `UserError` if a plan cannot be carried out on such a mesh."""
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

    def input_shapes(images: int) -> list[tuple[int, ...]]:
        index = np.zeros(images, np.int64)  # there may be inputs of one image only
        return [np.shape(a) for a in jax.tree.leaves(plan.policy_inputs(index))]

    # Inputs of a policy are shared by all devices along `data`; they may not depend on the images.
    if input_shapes(1) != input_shapes(2):
        raise UserError(
            f"mesh {spec}: policy {plan.policy.name!r} treats the images of a batch differently, "
            f"which works on one device only"
        )


def state_names(plan: CachePlan, spec: MeshSpec, dtype) -> PyTree[P]:
    """Return the plan's cache with names of its axes (`varjax.logical_axes`) in place of every
    array. dtype: type of the pool."""
    # Rows are found by comparing the caches of one and of two images. The type of queries and keys
    # that a policy observes does not change how they are divided.
    one, two = (
        jax.eval_shape(lambda n=n: plan.empty_state(n, dtype, groups=spec.model)) for n in (1, 2)
    )

    def along_rows(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> P:
        return P(*(None if m == n else IMAGES for m, n in zip(a.shape, b.shape, strict=True)))

    names = jax.tree.map(along_rows, one, two)
    return plan.name_heads(names) if spec.model > 1 else names
