"""The arguments of `compose`: which policies it takes for which role, and which of their arguments
matter there."""

from varjax.errors import UserError, choose
from varjax.policies.base import Policy
from varjax.policies.registry import POLICIES, get_policy

ROLES = {"allocate": "heatkv", "select": "snapkv"}  # each with its default
TOKEN_ROLES = {**ROLES, "allocate": "streaming"}  # the same, on models that draw token by token
DECIDES = {"allocate": "how much heads hold", "select": "which tokens heads keep"}
SHARED = ("budget", "accounting", "block_size")  # arguments of the composition, not of its parts


def refusals() -> dict[tuple[str, str], str]:
    """Why a policy cannot have a role, by (role, name of the policy)."""
    return {
        (role, name): reason
        for name, cls in POLICIES.items()
        for role, reason in cls.unfit_roles.items()
    }


def own_arguments(cls: type[Policy], role: str = "") -> list[str]:
    """Names of a part's arguments; if a role is given, only those that matter to the role."""
    used = {"allocate": cls.allocation_arguments, "select": cls.selection_arguments}.get(role)
    idle = (*SHARED, "period")
    names = [name for name in cls.argument_types() if name not in idle]
    return names if used is None else [name for name in names if name in used]


def choose_part(role: str, name: str) -> type[Policy]:
    """The policy of this name; `UserError` if there is none or it cannot have the role."""
    refused = refusals()
    fitting = [other for other in POLICIES if (role, other) not in refused]
    if reason := refused.get((role, name)):
        raise UserError(
            f"policy 'compose': {role}={name} makes no sense: {reason}; choose one of "
            f"{', '.join(fitting)}"
        )
    return POLICIES[choose(f"policy for {role}:", name, fitting)]


def build(role: str, parts: dict[str, str]) -> Policy:
    """The policy that has the role, with the arguments that `parts` gives it and its own default
    budget."""
    own = f"{role}_"
    named = {n.removeprefix(own): v for n, v in parts.items() if n.startswith(own)}
    return get_policy(choose_part(role, parts[role]).name, arguments=named)


def explain_idle(name: str, parts: dict[str, str]) -> None:
    """Raises `UserError` for an argument that the part has but that its role has no use for;
    returns for any other."""
    role, _, own = name.partition("_")
    if role not in ROLES or own not in own_arguments(POLICIES[parts[role]]):
        return
    part, other = parts[role], next(r for r in ROLES if r != role)
    usable = ", ".join(f"{role}_{n}" for n in own_arguments(POLICIES[part], role))
    refused = (other, part) in refusals()
    instead = f", or give it to {other}: {other}={part},{other}_{own}={parts[name]}"
    raise UserError(
        f"policy 'compose': {name}={parts[name]} has no effect: {own!r} of {part!r} is about "
        f"{DECIDES[other]}, and {role} decides {DECIDES[role]} (with {part} it takes "
        f"{usable or 'no arguments'}); leave it out" + ("" if refused else instead)
    )
