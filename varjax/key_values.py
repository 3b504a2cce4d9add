"""Lists of `key=value` in one text: the arguments of a policy, the axes of a mesh."""

import re

from varjax.arguments import text as text_
from varjax.errors import UserError, show


def parse_pairs(text: str) -> dict[str, str]:
    """Reads `"window=16,path=a,b.npz"` into `{"window": "16", "path": "a,b.npz"}`.

    Only a comma before `key=` separates two entries, so a value may hold commas and "=". Values
    stay texts; the caller knows the type of each key.

    Raises:
      UserError: an entry without `key=value`, an empty value, or a key given twice.
    """
    text_("key=value,key=value", text)
    pairs = {}
    for entry in re.split(r",(?=\s*\w+\s*=)", text) if text.strip() else []:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not (key.isidentifier() and equals and value) or value.endswith(","):
            where = f"{show(entry.strip())} of {show(text)}"
            raise UserError(f"cannot read {where}: write key=value,key=value")
        if key in pairs:
            raise UserError(f"{key} is given twice in {show(text)}: keep one of them")
        pairs[key] = value
    return pairs
