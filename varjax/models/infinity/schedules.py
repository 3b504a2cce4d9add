"""Infinity's published resolutions: aspect-ratio templates and sizes, and their rope positions.

One list of 13 token maps per template (height / width). The size says how many of them are used, so
the maps of a small image are the first maps of the large one. Rotary positions belong to the
template, not to the size: a cell's row and column are stretched to the template's last map at 1M.
"""

import math

import numpy as np

from varjax.arguments import real
from varjax.errors import UserError, choose, show
from varjax.schedule import Schedule

# In the published order: the first of two equally near templates is taken.
_MAPS = {
    "1.000": "1x1;2x2;4x4;6x6;8x8;12x12;16x16;20x20;24x24;32x32;40x40;48x48;64x64",
    "1.250": "1x1;2x2;3x3;5x4;10x8;15x12;20x16;25x20;30x24;35x28;45x36;55x44;70x56",
    "0.800": "1x1;2x2;3x3;4x5;8x10;12x15;16x20;20x25;24x30;28x35;36x45;44x55;56x70",
    "1.333": "1x1;2x2;4x3;8x6;12x9;16x12;20x15;24x18;28x21;36x27;48x36;60x45;72x54",
    "0.750": "1x1;2x2;3x4;6x8;9x12;12x16;15x20;18x24;21x28;27x36;36x48;45x60;54x72",
    "1.500": "1x1;2x2;3x2;6x4;9x6;15x10;21x14;27x18;33x22;39x26;48x32;63x42;78x52",
    "0.666": "1x1;2x2;2x3;4x6;6x9;10x15;14x21;18x27;22x33;26x39;32x48;42x63;52x78",
    "1.750": "1x1;2x2;3x3;7x4;11x6;14x8;21x12;28x16;35x20;42x24;56x32;70x40;84x48",
    "0.571": "1x1;2x2;3x3;4x7;6x11;8x14;12x21;16x28;20x35;24x42;32x56;40x70;48x84",
    "2.000": "1x1;2x2;4x2;6x3;10x5;16x8;22x11;30x15;38x19;46x23;60x30;74x37;90x45",
    "0.500": "1x1;2x2;2x4;3x6;5x10;8x16;11x22;15x30;19x38;23x46;30x60;37x74;45x90",
    "2.500": "1x1;2x2;5x2;10x4;15x6;20x8;25x10;30x12;40x16;50x20;65x26;80x32;100x40",
    "0.400": "1x1;2x2;2x5;4x10;6x15;8x20;10x25;12x30;16x40;20x50;26x65;32x80;40x100",
    "3.000": "1x1;2x2;6x2;9x3;15x5;21x7;27x9;36x12;45x15;54x18;72x24;90x30;111x37",
    "0.333": "1x1;2x2;2x6;3x9;5x15;7x21;9x27;12x36;15x45;18x54;24x72;30x90;37x111",
}
TEMPLATES = tuple(_MAPS)
_SCALES = {"0.06M": 7, "0.25M": 10, "0.60M": 12, "1M": 13}
SIZES = tuple(_SCALES)
PIXELS = 16  # image pixels per transformer token along each axis, in every released model
FLATTEST, TALLEST = 0.25, 4.0  # height / width for which the nearest template still makes sense


def resolve(aspect: float | str, size: str) -> dict:
    """The template nearest to `aspect` = height / width, at `size`, as fields of `InfinityConfig`:
    `schedule`, maps of transformer tokens, and `rope_map` (`rope_positions`), the template's last
    map at 1M.

    Raises:
      UserError: for an unknown size, and for an aspect that is no number or outside 0.25 to 4.
    """
    try:  # a flag's text, or a number
        ratio = float(aspect) if isinstance(aspect, str) else real("aspect", aspect)
    except ValueError:  # a `UserError` is one
        ratio = math.nan
    if not FLATTEST <= ratio <= TALLEST:
        known = ", ".join(sorted(TEMPLATES, key=float))
        raise UserError(
            f"aspect {show(aspect)} is not supported: give height / width as a number from"
            f" {FLATTEST:g} to {TALLEST:g}; the nearest template is taken from {known}"
        )
    name = TEMPLATES[int(np.argmin([abs(float(t) - ratio) for t in TEMPLATES]))]
    maps = Schedule.parse(_MAPS[name]).maps
    return {
        "schedule": Schedule(maps[: _SCALES[choose("size", size, SIZES)]]),
        "rope_map": maps[-1],
    }


def name_of(schedule: Schedule, rope_map: tuple[int, int]) -> tuple[str, str] | None:
    """(aspect, size) of published maps; None for others."""
    for aspect, maps in _MAPS.items():
        for size, count in _SCALES.items():
            found = Schedule.parse(maps).maps
            if found[:count] == schedule.maps and found[-1] == tuple(rope_map):
                return aspect, size
    return None


def rope_positions(schedule: Schedule, rope_map: tuple[int, int]) -> np.ndarray:
    """int32 [L, 2]: (row, column) by which each token's keys and queries are rotated.

    Cell i of a map of height h sits at row round(i * H / h), ties to even, with H = `rope_map[0]`;
    columns follow the widths in the same way. This is integer arithmetic, because a float64 ratio
    gets two published entries wrong.
    """
    grids = []
    for height, width in schedule.maps:
        rows, columns = _stretched(height, rope_map[0]), _stretched(width, rope_map[1])
        grids.append(np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2))
    return np.concatenate(grids).astype(np.int32)


def _stretched(cells: int, full: int) -> np.ndarray:
    """round(i * full / cells) for i in 0..cells-1, ties to even."""
    doubled = 2 * np.arange(cells) * full + cells  # floor(doubled / (2 * cells)) rounds half up
    rounded, rest = np.divmod(doubled, 2 * cells)
    return rounded - ((rest == 0) & (rounded % 2 == 1))
