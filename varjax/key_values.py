"""`key=value` lists in one text, as arguments of a policy or axes of a mesh are written."""

import re

from varjax.errors import UserError


def parse_pairs(text: str) -> dict[str, str]:
    """Read `"window=16,path=a,b.npz"` into `{"window": "16", "path": "a,b.npz"}`.

    Only a comma that is followed by `key=` separates, so values may hold commas and "=". Values
    stay text: whoever knows the type of a key converts it.

    Raises:
      UserError: an entry without `key=value`, an empty value, or a key given twice.
    """
    pairs = {}
    for entry in re.split(r",(?=\s*\w+\s*=)", text) if text.strip() else []:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not (key.isidentifier() and equals and value) or value.endswith(","):
            raise UserError(f"cannot read {entry.strip()!r} of {text!r}: write key=value,key=value")
        if key in pairs:
            raise UserError(f"{key} is given twice in {text!r}: keep one of them")
        pairs[key] = value
    return pairs
