"""The schedule: the list of token maps (h, w) that next-scale prediction goes through.

Letters: K scales, t_k = h_k * w_k tokens in scale k, c_k = t_0 + ... + t_k. Scales and tokens are
counted from 0; tokens of all scales are concatenated coarse to fine, each map row-major. The last
scale is never cached, so the full cache holds F = c_(K-2) tokens per head (`persistent_tokens`).
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

import numpy as np

from varjax.arguments import integer, integers
from varjax.arguments import text as text_
from varjax.errors import UserError, show

LARGEST_SIDE = 4096  # of a token map
LARGEST_COUNT = 64  # scales
AUTO, SCAN = "auto", "scan"  # of the choices that `check_cut` is asked about


@dataclass(frozen=True)
class Schedule:
    """Heights and widths of the token maps, coarse to fine. Hashable; `UserError` for impossible
    maps."""

    maps: tuple[tuple[int, int], ...]

    kind: ClassVar[str] = "scales"

    def __post_init__(self):
        if not isinstance(self.maps, (tuple, list)):
            raise UserError(f"schedule maps are {show(self.maps)}: give (height, width) pairs")
        if not self.maps:
            raise UserError("a schedule needs at least one scale, for example 1x1;2x2;4x4")
        names, maps = ("height of a token map", "width of a token map"), []
        for sides in self.maps:
            if not isinstance(sides, (tuple, list)) or len(sides) != 2:
                raise UserError(f"token map {show(sides)}: give a pair (height, width)")
            pair = zip(names, sides, strict=True)
            maps.append(tuple(integer(name, side, 1, LARGEST_SIDE) for name, side in pair))
        object.__setattr__(self, "maps", tuple(maps))
        if len(self.maps) > LARGEST_COUNT:
            raise UserError(f"{len(self.maps)} scales given: at most {LARGEST_COUNT} work")

    @classmethod
    def square(cls, sides: Sequence[int]) -> "Schedule":
        """Schedule of square maps, as VAR's `patch_nums`."""
        words = "give the sides of square maps, as 1, 2, 4"
        return cls(tuple((n, n) for n in integers("sides", sides, words, LARGEST_COUNT)))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Reads `"1x1;2x2;3x4"` (height x width)."""
        maps, text = [], text_("schedule", text)
        for part in text.strip().split(";"):
            match = re.fullmatch(r"\s*([0-9]{1,18})\s*x\s*([0-9]{1,18})\s*", part)
            if not match:
                raise UserError(
                    f"cannot read the token map {part!r:.60} of schedule {text!r:.200}: write "
                    f"height x width, for example 1x1;2x2;3x4"
                )
            maps.append((int(match[1]), int(match[2])))
        return cls(tuple(maps))

    def __str__(self) -> str:
        return ";".join(f"{h}x{w}" for h, w in self.maps)

    @property
    def num_scales(self) -> int:
        return len(self.maps)

    def check_cut(self, segments: int | str, layers: str = AUTO) -> int | None:
        """The number of segments that the scales are cut into (an int or its text), None for
        "auto". `UserError` for anything but a whole number from 1 to K. layers: any works."""
        if isinstance(segments, str) and segments == AUTO:
            return None
        digits = isinstance(segments, str) and re.fullmatch("[0-9]{1,7}", segments)
        with contextlib.suppress(UserError):
            return integer("segments", int(segments) if digits else segments, 1, self.num_scales)
        raise UserError(
            f"segments={show(segments)} is not valid for a schedule of {self.num_scales} scales: "
            f"give {AUTO!r} or a whole number from 1 to {self.num_scales}"
        )

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Tokens t_k of each scale."""
        return tuple(h * w for h, w in self.maps)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """c_k: tokens of scales 0..k."""
        return tuple(int(c) for c in np.cumsum(self.tokens))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of the first token of each scale."""
        return (0, *self.ends[:-1])

    num_drawn = property(attrgetter("num_scales"))  # steps that draw an image, a scale each

    def first_tokens(self, count: int) -> int:
        """Tokens of an image that the first `count` steps draw."""
        return sum(self.tokens[:count])

    def outline(self) -> str:
        """The order of drawing, as a line of text."""
        return f"token maps {str(self).replace(';', ' ')}"

    @property
    def summary(self) -> str:
        """What is drawn at a time, in words."""
        return f"{self.num_scales} scales"

    @property
    def places(self) -> np.ndarray:
        """int64: which of the L tokens are drawn, and part of the picture."""
        return np.arange(self.total_tokens)

    @property
    def total_tokens(self) -> int:
        return self.ends[-1]

    @property
    def persistent_tokens(self) -> int:
        """F: tokens per head in a full cache (the last scale is never cached)."""
        return self.starts[-1]

    @property
    def final_map(self) -> tuple[int, int]:
        return self.maps[-1]

    @cached_property
    def scale_of_token(self) -> np.ndarray:
        """int32 [L]: the scale of each token."""
        return np.repeat(np.arange(self.num_scales, dtype=np.int32), self.tokens)
