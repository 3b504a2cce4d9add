"""Arguments of policies as texts: what `--policy_args` gives, and what strangers may give (requests
to a server)."""

from dataclasses import fields, replace

from varjax.core import arguments
from varjax.core.errors import UserError, nearest, show
from varjax.core.policy import Policy

_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_READ = {  # by type: how to read it from a text, and what it is in words
    "int": (int, "a whole number"),
    "int | None": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text"),
    "bool": (lambda text: _TRUTH[text.lower()], "true or false"),
}


def argument_types(cls: type[Policy]) -> dict[str, str]:
    """The `--policy_args` of a policy and their types (`arguments.field_types`): all fields but the
    budget."""
    return {n: kind for n, kind in arguments.field_types(cls).items() if n != "budget"}


def read(cls: type[Policy], given: dict[str, str]) -> dict[str, object]:
    """Values of a policy's fields from the texts of `--policy_args`. A policy whose arguments are
    not all fields has a method `from_arguments` that does it (`compose`). `UserError`: an argument
    is unknown or malformed."""
    own = getattr(cls, "from_arguments", None)
    return read_fields(cls, given) if own is None else own(given)


def read_fields(cls: type[Policy], given: dict[str, str]) -> dict[str, object]:
    """Values from texts of arguments that are fields; errors as in `read`."""
    known = argument_types(cls)
    for name in given:
        if name not in known:
            own = "; the budget is given by itself (--budget)" if name == "budget" else ""
            raise UserError(
                f"policy {cls.name!r} has no argument {name!r}{nearest(name, known)}; it has: "
                f"{', '.join(known)}{own}"
            )
    found = {}
    for name, text in given.items():
        reader, wanted = _READ[known[name]]
        try:
            found[name] = reader(text)
        except (ValueError, KeyError):
            raise UserError(f"policy argument {name}={show(text)} is not {wanted}") from None
    return found


def open_arguments(cls: type[Policy]) -> dict[str, str]:
    """The arguments that strangers may give and their types: numbers and truth values, and texts
    that name no file, of policies whose texts we know."""
    known, closed = argument_types(cls), cls.names_files
    texts = cls.__module__.startswith("varjax.policies.")
    return {n: k for n, k in known.items() if n not in closed and (texts or k != "str")}


def changed_by(policy: Policy, given: dict[str, str], budget: float | None = None) -> Policy:
    """A policy with other arguments, as strangers give them, and another budget. `UserError` for
    arguments that are not theirs to give."""
    known = open_arguments(type(policy))
    for name in sorted(set(given) - set(known)):
        words = f"policy {policy.name!r} takes no argument {show(name)} from requests"
        raise UserError(f"{words}{nearest(name, known)}; it takes: {', '.join(known)}")
    changed = read(type(policy), given)
    return replace(policy, **changed | ({} if budget is None else {"budget": budget}))


def told(policy: Policy) -> dict[str, object]:
    """The open arguments that differ from their defaults."""
    own = [f for f in fields(policy) if f.name in open_arguments(type(policy))]
    return {f.name: v for f in own if (v := getattr(policy, f.name)) != f.default}
