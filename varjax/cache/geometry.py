"""What a cache has to know of a model: its schedule and the shape of its attention."""

import re
from dataclasses import dataclass

from varjax.errors import UserError
from varjax.schedule import Schedule

LARGEST = 10**6  # layers, heads, size of a head, and layers times heads


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """L layers, N key/value heads of size H, a schedule, and how many cache rows an image needs
    (two with guidance)."""

    schedule: Schedule
    num_layers: int
    num_heads: int
    head_dim: int
    rows_per_image: int = 2

    def __post_init__(self):
        for name in ("num_layers", "num_heads", "head_dim", "rows_per_image"):
            if getattr(self, name) < 1:
                raise UserError(f"geometry: {name} is {getattr(self, name)}, it must be at least 1")
            if getattr(self, name) > LARGEST:
                raise UserError(
                    f"geometry: {name} is {getattr(self, name)}, it must be at most {LARGEST}"
                )
        if self.num_layers * self.num_heads > LARGEST:
            raise UserError(
                f"geometry: {self.num_layers} layers of {self.num_heads} heads are"
                f" {self.num_layers * self.num_heads} heads in all, at most {LARGEST} work"
            )

    @classmethod
    def parse(cls, text: str) -> "Geometry":
        """Read `"layers=32,heads=16,head_dim=128,schedule=1x1;2x2;3x4"`."""
        known = {
            "layers": "num_layers",
            "heads": "num_heads",
            "head_dim": "head_dim",
            "schedule": "schedule",
        }
        given = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in known or not value:
                raise UserError(
                    f"cannot read {part!r} of geometry {text!r}: give "
                    f"{', '.join(k + '=...' for k in known)}"
                )
            if known[name] in given:
                raise UserError(f"geometry {text!r:.200} gives {name} twice: keep one of them")
            if name != "schedule" and not re.fullmatch(r"[0-9]{1,18}", value):
                raise UserError(
                    f"geometry: {name}={value:.40} is not a positive whole number up to {LARGEST}"
                )
            given[known[name]] = Schedule.parse(value) if name == "schedule" else int(value)
        missing = [k for k, field in known.items() if field not in given]
        if missing:
            raise UserError(f"geometry {text!r} lacks {', '.join(missing)}")
        return cls(**given)

    @property
    def dense_tokens(self) -> int:
        """Tokens of a full cache over all layers and heads of one row: F * L * N."""
        return self.schedule.persistent_tokens * self.num_layers * self.num_heads
