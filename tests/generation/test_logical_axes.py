"""Names of axes, and where the rules send them on each kind of mesh."""

import pytest
from jax.sharding import PartitionSpec as P

from varjax.generation import mesh as axes

DRAWING, TRAINING = (axes.DATA, axes.MODEL), (axes.DATA, axes.FSDP)


@pytest.mark.parametrize(
    ("names", "drawing", "training"),
    [
        (P(), P(), P()),
        (P(axes.IMAGES), P("data"), P(("data", "fsdp"))),
        (P(axes.IMAGES, None, axes.HEADS), P("data", None, "model"), P(("data", "fsdp"))),
        (P(None, axes.HIDDEN), P(None, "model"), P()),
        (P(None, axes.LONGEST), P(), P(None, "fsdp")),
    ],
)
def test_names_go_where_the_mesh_has_axes(names, drawing, training):
    def trimmed(spec):  # P("data", None) is P("data")
        entries = list(spec)
        while entries and entries[-1] is None:
            entries.pop()
        return P(*entries)

    assert trimmed(axes.mesh_spec(names, DRAWING)) == drawing
    assert trimmed(axes.mesh_spec(names, TRAINING)) == training


@pytest.mark.parametrize(
    ("shape", "parts", "names"),
    [
        ((8, 12), 4, P(None, "longest")),
        ((8, 12), 8, P("longest", None)),
        ((3, 5), 2, P()),
        ((), 2, P()),
        ((4,), 1, P()),
    ],
)
def test_the_longest_axis_that_can_be_divided(shape, parts, names):
    assert axes.by_longest(shape, parts) == names
