"""The tokens of the language model that stand for codes of the image tokenizer.

Published vocabularies name the token of a code by its number: `IMGIMG`, a letter per digit (A is 0,
J is 9), and `Z`. The ids of these names are in no order.
"""

import re
from collections.abc import Mapping

from varjax.errors import UserError, show, some

NAME = re.compile(r"IMGIMG([A-J]{1,9})Z")
_DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")


def code_of(name: str) -> int | None:
    """The code that a token of this name stands for; None for other tokens."""
    found = NAME.fullmatch(name)
    return int(found[1].translate(_DIGITS)) if found else None


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
        code = code_of(name)
        if code is None:
            continue
        if type(number) is not int or number < 0:
            raise UserError(f"{name} has the id {show(number)}, which is no number of a token")
        if code in found:
            raise UserError(f"code {code} has two names, ids {found[code]} and {number}")
        found[code] = number
    if not found:
        raise UserError("no name has the form IMGIMG...Z: this is no vocabulary with image tokens")
    missing = sorted(set(range(len(found))) - found.keys())
    if missing:
        raise UserError(
            f"{len(found)} codes have names, but codes {some(map(str, missing), 8)} have none: "
            f"the vocabulary is incomplete"
        )
    if len(set(found.values())) < len(found):
        raise UserError("some codes share an id: the vocabulary is damaged")
    return tuple(found[code] for code in range(len(found)))
