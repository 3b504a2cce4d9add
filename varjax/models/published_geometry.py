"""Shapes of published models that plans are made for without their weights."""

from varjax.geometry import Geometry
from varjax.schedule import Schedule

# Infinity, one million pixels, square: 1024 x 1024 at 16 pixels per token.
SIDES_1M = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)

GEOMETRIES = {
    "infinity-2b": Geometry(
        schedule=Schedule.square(SIDES_1M), num_layers=32, num_heads=16, head_dim=128
    ),
    "infinity-8b": Geometry(
        schedule=Schedule.square(SIDES_1M), num_layers=40, num_heads=28, head_dim=128
    ),
}
