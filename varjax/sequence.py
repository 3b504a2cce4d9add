"""The order in which a model draws single tokens: the condition, then image tokens row by row.

`TokenSequence` takes the place of a next-scale model's `Schedule`. Like a schedule it tells the
cache how many tokens there are, and how many of them are ever read again. M tokens of the condition
come first, then N image tokens in raster order, in lines of n. The last image token is drawn but
never read, so the full cache holds F = M + N - 1 tokens per head (`persistent_tokens`).

A stage is a run of P tokens between two decisions of a policy; it takes the place of a scale. Stage
0 is the condition. The other stages cut the N - 1 image tokens that are read.
"""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from varjax.arguments import integer
from varjax.errors import UserError, show
from varjax.schedule import AUTO, SCAN, Schedule

SCALES, TOKENS = "scales", "tokens"  # what a model draws in one step
LARGEST_IMAGE = 2**17  # tokens
LARGEST_CONDITION = 2**14


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


def parse(text: str) -> Schedule | TokenSequence:
    """Reads the text of a schedule, `"1x1;2x2"`, or of a token sequence, `"1+256"`, whose image is
    taken as a square."""
    if found := re.fullmatch(r"([0-9]{1,9})\+([0-9]{1,9})", text):
        return TokenSequence(int(found[2]), int(found[1]))
    return Schedule.parse(text)
