"""Reading configuration dictionaries that use the argument names of published constructors."""

from collections.abc import Collection, Mapping

from varjax.errors import UserError, nearest
from varjax.schedule import Schedule


def arguments(
    what: str, given: Mapping, types: Mapping[str, type], ignored: Collection[str]
) -> dict:
    """The entries of `given` that are arguments, checked and converted to their `types`.

    Args:
      what: the model's name, for messages.
      given: {argument name: JSON value}.
      types: {known name: bool, int, float or object}; object takes anything.
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
        pairs = [(n, n) if isinstance(n, int) else _pair(n) for n in patch_nums]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{what} configuration: patch_nums {patch_nums!r:.80} must list sides or"
            " [height, width] pairs, for example [1, 2, 4]"
        ) from error
    return Schedule(tuple(pairs))


def patch_nums(schedule: Schedule) -> list:
    """Sides where the map is square, else [height, width]: the inverse of `schedule`."""
    return [h if h == w else [h, w] for h, w in schedule.maps]


def _pair(value) -> tuple[int, int]:
    h, w = value
    if not (isinstance(h, int) and isinstance(w, int)):
        raise TypeError(f"{value!r} is not a pair of integers")
    return h, w


def _typed(what: str, name: str, value, kind: type):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        bool: isinstance(value, bool),
        int: is_number and value == int(value) if is_number and value == value else False,
        float: is_number,
        object: True,
    }[kind]
    if not fits:
        words = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise UserError(f"{what} configuration: {name} is {value!r:.60}, it must be {words}")
    return value if kind is object else kind(value)
