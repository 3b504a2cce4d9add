"""Names of axes, and where the rules send them on each kind of mesh."""

import jax
import pytest
from jax.sharding import AxisType
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


def test_a_name_without_a_rule():
    with pytest.raises(KeyError, match="colour"):
        axes.mesh_spec(P("colour"), DRAWING)


def test_trees_keep_their_shape():
    mesh = axes.make_mesh({"data": 1, "model": 1}, jax.devices())
    assert mesh.axis_types == (AxisType.Auto,) * 2
    placed = axes.shardings({"a": P(axes.IMAGES), "b": (P(), None)}, mesh)
    assert placed["a"].spec == P("data") and placed["a"].mesh == mesh
    assert placed["b"][0].spec == P() and placed["b"][1] is None


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
