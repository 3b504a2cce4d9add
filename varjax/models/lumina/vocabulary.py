"""The tokens of the language model that stand for codes of the image tokenizer.

Published vocabularies name the token of a code by its number: `IMGIMG`, a letter per digit (A is 0,
J is 9), and `Z`. The ids of these names are in no order.
"""

import re
from collections.abc import Mapping

from varjax.errors import UserError, show, some

NAME = re.compile(r"IMGIMG([A-J]{1,9})Z")
_DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")


def image_ids(names: Mapping[str, int]) -> tuple[int, ...]:
    """The id of every code, in the order of codes. names: {name: id}, of all tokens.

    Raises:
      UserError: there are no codes, some are missing, or two names have one id or stand for one
        code.
    """
    if not isinstance(names, Mapping):
        raise UserError(f"{show(names)} given: names and ids are needed")
    found: dict[int, int] = {}
    for name, number in names.items():
        if match := NAME.fullmatch(name):
            code = int(match[1].translate(_DIGITS))
            if type(number) is not int or number < 0 or code in found:
                raise UserError(f"{name} has the id {show(number)}: give one number for each code")
            found[code] = number
    missing = sorted(set(range(max(1, len(found)))) - found.keys())
    if missing or len(set(found.values())) < len(found):
        lacking = f"codes {some(map(str, missing), 8)} have no name IMGIMG...Z"
        raise UserError(f"{lacking if missing else 'some codes share an id'}: it is incomplete")
    return tuple(found[code] for code in range(len(found)))
