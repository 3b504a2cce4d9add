"""A model's sizes for a cache, and the order in which it draws, from their texts."""

import re

from varjax.core.allocation import LARGEST, Geometry
from varjax.core.errors import UserError, show
from varjax.core.sequence import Schedule, TokenSequence
from varjax.storage.values import parse_pairs


def read_geometry(text: str) -> Geometry:
    """Reads `"layers=32,heads=16,head_dim=128,schedule=1x1;2x2;3x4"`, or for a model that draws
    token by token `"layers=36,heads=20,head_dim=64,tokens=576,condition=1,line=24"`. Such a
    model may have `queries_per_head=8`; `heads` are those of keys and values."""
    given = parse_pairs(text)
    by_token = "tokens" in given
    needed = ("layers", "heads", "head_dim", "tokens" if by_token else "schedule")
    optional = ("condition", "line", "queries_per_head") if by_token else ()
    for name, value in given.items():
        if name not in (*needed, *optional):
            known = ", ".join(f"{known}=..." for known in (*needed, *optional))
            raise UserError(f"cannot read {name} of geometry {show(text)}: give {known}")
        # more digits would not fit 64 bits, and Python may refuse to read them at all
        if name != "schedule" and not re.fullmatch(r"[0-9]{1,18}", value):
            raise UserError(
                f"geometry: {name}={value:.40} is not a positive whole number up to {LARGEST}"
            )
        given[name] = Schedule.parse(value) if name == "schedule" else int(value)
    if missing := [name for name in needed if name not in given]:
        raise UserError(f"geometry {show(text)} lacks {', '.join(missing)}")
    sizes = {"num_layers": given.pop("layers"), "num_heads": given.pop("heads")}
    sizes |= {n: given.pop(n) for n in ("head_dim", "queries_per_head") if n in given}
    if by_token:
        return Geometry(schedule=TokenSequence(given.pop("tokens"), **given), **sizes)
    return Geometry(**given, **sizes)


def read_order(text: str) -> Schedule | TokenSequence:
    """Reads the text of a schedule, `"1x1;2x2"`, or of a token sequence, `"1+256"`, whose image is
    taken as a square."""
    if found := re.fullmatch(r"([0-9]{1,9})\+([0-9]{1,9})", text):
        return TokenSequence(int(found[2]), int(found[1]))
    return Schedule.parse(text)
