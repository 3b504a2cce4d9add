"""The order in which a model draws: maps of tokens, scale by scale, or single tokens.

Scale by scale (`Schedule`): K scales, t_k = h_k * w_k tokens in scale k, c_k = t_0 + ... + t_k.
Scales and tokens are counted from 0; tokens of all scales are concatenated coarse to fine, each map
row-major. The last scale is never cached, so the full cache holds F = c_(K-2) tokens per head
(`persistent_tokens`).

Token by token (`TokenSequence`): M tokens of the condition come first, then N image tokens in
raster order, in lines of n. The last image token is drawn but never read, so F = M + N - 1. A stage
is a run of P tokens between two decisions of a policy; it takes the place of a scale. Stage 0 is
the condition. The other stages cut the N - 1 image tokens that are read.
"""

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

import numpy as np

from varjax.core.arguments import integer, integers
from varjax.core.arguments import text as text_
from varjax.core.errors import UserError, show

SCALES, TOKENS = "scales", "tokens"  # what a model draws in one step
LARGEST_IMAGE = 2**17  # tokens
LARGEST_CONDITION = 2**14
LARGEST_SIDE = 4096  # of a token map
LARGEST_COUNT = 64  # scales
AUTO, SCAN = "auto", "scan"  # of the choices that `check_cut` is asked about


@dataclass(frozen=True)
class Schedule:
    """Heights and widths of the token maps, coarse to fine. Hashable; refuses impossible maps."""

    maps: tuple[tuple[int, int], ...]

    kind: ClassVar[str] = SCALES

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


@dataclass(frozen=True)
class TokenSequence:
    """The order in which a model draws single tokens: the condition, then image tokens row by row.
    Hashable; `UserError` for impossible numbers.

    image_tokens: N, tokens that come one after the other.
    condition: M, slots that the condition takes in the cache.
    line: n, tokens of a line of the image; 0: the image is a square.
    new_lines: whether the last token of every line is a new line. It is known beforehand, so it is
      not drawn, and it is no part of the picture; but the cache holds it like any other.
    """

    image_tokens: int
    condition: int = 1
    line: int = 0
    new_lines: bool = False

    kind: ClassVar[str] = TOKENS
    num_scales: ClassVar[int] = 0

    def __post_init__(self):
        for name, low, high in (
            ("image_tokens", 2, LARGEST_IMAGE),
            ("condition", 1, LARGEST_CONDITION),
            ("line", 0, LARGEST_IMAGE),
        ):
            value = integer(f"token sequence: {name}", getattr(self, name), low, high)
            object.__setattr__(self, name, value)
        line = self.line or max(1, math.isqrt(self.image_tokens))
        object.__setattr__(self, "line", min(line, self.image_tokens))

    def __str__(self) -> str:
        return f"{self.condition}+{self.image_tokens}"

    @property
    def num_drawn(self) -> int:
        """The number of steps that draw an image; a step draws one token."""
        return self.image_tokens - self.new_lines * (self.image_tokens // self.line)

    def check_cut(self, segments: int | str, layers: str = AUTO) -> None:
        """`UserError` for a number of segments, or a scan over layers (`Build`)."""
        if segments != AUTO:
            raise UserError(
                f"segments={show(segments)}: models that draw token by token have no scales to "
                f"cut: give {AUTO!r}"
            )
        # given "auto" or "unroll", layers are separate in any case (`build.arrange`)
        if layers == SCAN:
            raise UserError(
                "layers='scan': models that draw token by token run a body per layer, because a "
                "scan would copy every layer's weights for every token: give 'auto' or 'unroll'"
            )

    def first_tokens(self, count: int) -> int:
        """Tokens of an image that the first `count` steps draw."""
        return min(count, self.num_drawn)

    @property
    def places(self) -> np.ndarray:
        """int64: which of the N tokens are drawn."""
        number = np.arange(self.image_tokens)
        return number[(number + 1) % self.line != 0] if self.new_lines else number

    def outline(self) -> str:
        """The order of drawing, as a line of text."""
        return f"{self.image_tokens} tokens one by one, condition of {self.condition}"

    @property
    def summary(self) -> str:
        """What is drawn at a time, in words."""
        return f"token by token, condition of {self.condition}"

    @property
    def total_tokens(self) -> int:
        return self.condition + self.image_tokens

    @property
    def steps(self) -> int:
        """N - 1: image tokens that later ones read. The model runs one step for each."""
        return self.image_tokens - 1

    @property
    def persistent_tokens(self) -> int:
        """F: tokens per head in a full cache."""
        return self.condition + self.steps

    def stages(self, period: int) -> tuple[int, int]:
        """The number of stages of `period` tokens that end with a decision, and of tokens that
        follow in the last stage, which ends without one."""
        decided = -(-self.steps // period) - 1
        return decided, self.steps - decided * period
