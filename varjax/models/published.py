"""Reading configuration dictionaries that use the argument names of published constructors."""

import math
from collections.abc import Collection, Mapping

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

    Raises:
      UserError: for an unknown name or a value of another type.
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
    if value < least:
        raise UserError(
            f"{what} configuration: {name} is {value!r:.60}, it must be at least {least}"
        )
    if value > most:
        raise UserError(f"{what} configuration: {name} is {value!r:.60}, it must be at most {most}")


def check_real(what: str, name: str, value: float, *, positive: bool = False) -> None:
    """Raise `UserError` unless `value` is finite and not negative, with `positive` not 0 either."""
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        allowed = "greater than 0" if positive else "at least 0"
        raise UserError(
            f"{what} configuration: {name} is {value!r:.60}, it must be a finite number, {allowed}"
        )


def _pair(value) -> tuple[int, int]:
    h, w = value
    if not (type(h) is int and type(w) is int):  # true and false are no sides
        raise TypeError(f"{value!r} is not a pair of integers")
    return h, w


def _typed(what: str, name: str, value, kind: type):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        bool: isinstance(value, bool),
        int: is_number and (isinstance(value, int) or value.is_integer()),
        float: is_number and (isinstance(value, float) or abs(value) < 1e300),
        INTEGERS: isinstance(value, (list, tuple)) and all(type(n) is int for n in value),
        object: True,
    }[kind]
    if not fits:
        words = {
            bool: "be true or false",
            int: "be a whole number",
            float: "be a number",
            INTEGERS: "list whole numbers, as [1, 2, 4, 4]",
        }[kind]
        raise UserError(f"{what} configuration: {name} is {value!r:.60}, it must {words}")
    return value if kind is object else tuple(value) if kind == INTEGERS else kind(value)
