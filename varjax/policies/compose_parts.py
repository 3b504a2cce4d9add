"""The arguments of `compose`: which policies it takes for which role, and which of their arguments
matter there."""

from varjax.errors import UserError, choose
from varjax.policies.base import Policy
from varjax.policies.registry import POLICIES, get_policy

ROLES = {"allocate": "heatkv", "select": "snapkv"}  # with what they are if not said
TOKEN_ROLES = {**ROLES, "allocate": "streaming"}  # the same, on models that draw token by token
DECIDES = {"allocate": "how much heads hold", "select": "which tokens heads keep"}
SHARED = ("budget", "accounting", "block_size")  # arguments of the composition, not of its parts
_GIVEN = "its contents are not chosen by a score, they follow from its own "
REFUSED = {
    ("allocate", "full"): "it keeps everything, so there is nothing to select",
    ("allocate", "headkv"): "how much a head gets is decided for every image, by its own grouping",
    ("allocate", "compose"): "compositions do not nest",
    ("select", "full"): "it keeps everything; any other policy does that with budget 1",
    ("select", "table"): _GIVEN + "file",
    ("select", "compose"): "compositions do not nest",
} | {
    ("select", name): _GIVEN + "schedule of scales"
    for name in ("heatkv", "binary_heatkv", "heatkv_naive")
}


def own_arguments(cls: type[Policy], role: str = "") -> list[str]:
    """Arguments of a part, with a role those that matter to it."""
    used = {"allocate": cls.allocation_arguments, "select": cls.selection_arguments}.get(role)
    idle = (*SHARED, "period")
    names = [name for name in cls.argument_types() if name not in idle]
    return names if used is None else [name for name in names if name in used]


def choose_part(role: str, name: str) -> type[Policy]:
    fitting = [other for other in POLICIES if (role, other) not in REFUSED]
    if reason := REFUSED.get((role, name)):
        raise UserError(
            f"policy 'compose': {role}={name} makes no sense: {reason}; choose one of "
            f"{', '.join(fitting)}"
        )
    return POLICIES[choose(f"policy for {role}:", name, fitting)]


def build(role: str, parts: dict[str, str]) -> Policy:
    """The part that has the role, as given; its own budget is the default."""
    own = f"{role}_"
    named = {n.removeprefix(own): v for n, v in parts.items() if n.startswith(own)}
    return get_policy(choose_part(role, parts[role]).name, arguments=named)


def explain_idle(name: str, parts: dict[str, str]) -> None:
    """Refuse an argument that a part has, but not for its role; return if it has none such."""
    role, _, own = name.partition("_")
    if role not in ROLES or own not in own_arguments(POLICIES[parts[role]]):
        return
    part, other = parts[role], next(r for r in ROLES if r != role)
    usable = ", ".join(f"{role}_{n}" for n in own_arguments(POLICIES[part], role))
    instead = f", or give it to {other}: {other}={part},{other}_{own}={parts[name]}"
    raise UserError(
        f"policy 'compose': {name}={parts[name]} has no effect: {own!r} of {part!r} is about "
        f"{DECIDES[other]}, and {role} decides {DECIDES[role]} (with {part} it takes "
        f"{usable or 'no arguments'}); leave it out" + ("" if (other, part) in REFUSED else instead)
    )
