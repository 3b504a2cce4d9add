"""Arguments of token attention as shapes, for programs that are compiled and not run."""

from dataclasses import replace

import jax

from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.token_attention import HeadSlots
from pallas_kernels.token_specs import Arguments, token_arguments


def abstract_token_arguments(spec: ArgSpec, *args, sharding=None, **options) -> Arguments:
    """`token_arguments` without data: shapes and types only."""
    found = token_arguments(replace(spec, rows=1), *args, poison=False, **options)

    def shape(a):
        sizes = (spec.rows, *a.shape[1:]) if a.shape else ()
        return jax.ShapeDtypeStruct(sizes, a.dtype, sharding=sharding)

    return jax.tree.map(shape, found)


def only(slots: HeadSlots, *names: str) -> HeadSlots:
    """The slots with only the arrays that are named, which may be shapes without data."""
    return jax.tree_util.tree_map_with_path(lambda p, a: a if p[-1].name in names else None, slots)
