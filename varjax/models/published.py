"""Reading configuration dictionaries that use the argument names of published constructors."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import ClassVar

from varjax.errors import UserError, nearest
from varjax.schedule import Schedule

# Generous limits: what is beyond them is a mistake, refused before anything of that size is made.
LARGEST_DEPTH = 1024  # layers of a transformer
LARGEST_SIZE = 10**7  # widths, classes, codes
INTEGERS = tuple[int, ...]


def arguments(
    what: str, given: Mapping, types: Mapping[str, type], ignored: Collection[str]
) -> dict:
    """The entries of `given` that are arguments, checked and converted to their `types`.

    Args:
      what: the model's name, for messages.
      given: {argument name: JSON value}.
      types: {known name: bool, int, float, tuple[int, ...] or object}; object takes anything.
      ignored: names that are accepted and have no effect on the function computed.

    `UserError` for an unknown name or a value of another type.
    """
    found = {}
    for name, value in given.items():
        if name in types:
            found[name] = _typed(what, name, value, types[name])
        elif name not in ignored:
            raise UserError(
                f"{what} configuration: unknown name {name!r}: known are"
                f" {', '.join(sorted(types))}{nearest(name, types)}"
            )
    return found


def schedule(what: str, patch_nums) -> Schedule:
    """Schedule from `patch_nums`: sides of square maps, or (height, width) pairs."""
    try:
        pairs = [(n, n) if type(n) is int else _pair(n) for n in patch_nums]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{what} configuration: patch_nums {patch_nums!r:.80} must list sides or"
            " [height, width] pairs, for example [1, 2, 4]"
        ) from error
    return Schedule(tuple(pairs))


def patch_nums(schedule: Schedule) -> list:
    """Sides where the map is square, else [height, width]: the inverse of `schedule`."""
    return [h if h == w else [h, w] for h, w in schedule.maps]


def check_size(what: str, name: str, value: int, most: int = LARGEST_SIZE, least: int = 1) -> None:
    """Raise `UserError` unless `least` <= `value` <= `most`."""
    if not least <= value <= most:
        limit = f"at least {least}" if value < least else f"at most {most}"
        raise UserError(f"{what} configuration: {name} is {value!r:.60}, it must be {limit}")


def check_real(what: str, name: str, value: float, *, positive: bool = False) -> None:
    """Raise `UserError` unless `value` is finite and not negative, with `positive` not 0 either."""
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        allowed = "greater than 0" if positive else "at least 0"
        raise UserError(
            f"{what} configuration: {name} is {value!r:.60}, it must be a finite number, {allowed}"
        )


class TransformerConfig:
    """What the configurations of transformers share: frozen dataclasses with the fields named here,
    and `what`, the model's name in messages."""

    what: ClassVar[str]

    def check_sizes(self, *names: str) -> None:
        """Raise `UserError` for an impossible size in the shared fields or in those of `names`."""
        check_size(self.what, "depth", self.depth, LARGEST_DEPTH)
        for name in ("embed_dim", "num_heads", *names):
            check_size(self.what, name, getattr(self, name))
        check_real(self.what, "norm_eps", self.norm_eps)
        check_real(self.what, "mlp_ratio", self.mlp_ratio, positive=True)
        check_size(self.what, "embed_dim * mlp_ratio", self.hidden_dim)

    @classmethod
    def wrong(cls, problem: str) -> UserError:
        return UserError(f"{cls.what} configuration: {problem}")

    def to_published(self) -> dict:
        """The published constructor's names and JSON values: the inverse of `from_published`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        maps = patch_nums(values.pop("schedule"))
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return {**values, "patch_nums": maps}

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


def _pair(value) -> tuple[int, int]:
    h, w = value
    if not (type(h) is int and type(w) is int):  # true and false are no sides
        raise TypeError(f"{value!r} is not a pair of integers")
    return h, w


def _are_integers(value) -> bool:
    return isinstance(value, (list, tuple)) and all(type(n) is int for n in value)


def _typed(what: str, name: str, value, kind: type):
    if kind is object:
        return value
    is_integer, is_float = type(value) is int, isinstance(value, float)
    fits, convert, words = {
        bool: (isinstance(value, bool), bool, "be true or false"),
        int: (is_integer or (is_float and value.is_integer()), int, "be a whole number"),
        float: (is_float or (is_integer and abs(value) < 1e300), float, "be a number"),
        INTEGERS: (_are_integers(value), tuple, "list whole numbers, as [1, 2, 4, 4]"),
    }[kind]
    if not fits:
        raise UserError(f"{what} configuration: {name} is {value!r:.60}, it must {words}")
    return convert(value)
