"""Drawing a batch: one pure function of arrays, whichever way a model draws.

It may be jitted, vmapped, and put into programs of one's own. `Generator.decode_arguments`
has what it takes. Generators compile it with weights as a flat tuple (`compiled.flat`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, PyTree

from varjax.core.errors import UserError
from varjax.core.given import Given
from varjax.core.scales import ScaleSpec
from varjax.core.state import KVState
from varjax.core.token_state import LayerCache
from varjax.core.tokens import TokenSpec

State = KVState | tuple[LayerCache, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What a program is told of a batch besides conditions and keys.

    spec: the static side, compared by content: equal ones share a program.
    tables: arrays of the plan, and what its policy knows beforehand (`for_images` of the spec).
    given: tokens that replace the draw; None: all are drawn.
    """

    spec: ScaleSpec | TokenSpec = field(metadata={"static": True})
    tables: tuple
    given: Given | None = None


def decode(
    params: Mapping[str, nnx.Module],
    state: State,
    condition: PyTree[Array],
    keys: Array,
    inputs: Inputs,
) -> tuple[dict[str, Array], State]:
    """Draws a batch of B images, and leaves the cache as it is after the last step. The results and
    the arguments are those of `ScaleSpec.generate` and `TokenSpec.generate`.

    params: "transformer" and "codec", their layers stacked or apart (`varjax.fast.arrange`).
    state: an empty cache of the spec's plan (`CachePlan.empty_state`), finite; donate it.
    condition: of B images (`Condition.take`). keys: a typed random key for each [B].
    `UserError` for a cache, keys or layers that do not fit the plan.
    """
    plan, transformer = inputs.spec.plan, params["transformer"]
    if transformer.model_axis is None:  # else this is one device's share of both
        held, depth = plan.kv_arrays(state), transformer.config.depth
        if depth != plan.geometry.num_layers:
            raise UserError(f"{depth} layers with a plan for {plan.geometry.num_layers}")
        images = len(held[0]) // plan.geometry.rows_per_image
        empty = jax.eval_shape(partial(plan.empty_state, images, held[0].dtype))
        found, own = ([a.shape for a in arrays] for arrays in (held, plan.kv_arrays(empty)))
        if found != own:
            raise UserError(f"the cache has arrays {found}, the plan needs {own}: `empty_state`")
        if keys.shape[:1] != (images,):
            raise UserError(f"keys {keys.shape}, a cache for {images} images: give one for each")
    return inputs.spec.generate(params, state, condition, keys, inputs.tables, inputs.given)
