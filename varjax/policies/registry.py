"""The one list of policies: it drives the command-line values, the README table and the generic
tests; `load_module` adds policies of your own to it."""

import re
from collections.abc import Callable, Mapping
from operator import attrgetter

from varjax.core.arguments import text
from varjax.core.errors import UserError, choose, show
from varjax.core.policy import Policy
from varjax.policies import text_arguments
from varjax.storage import own_modules

_NAME = "[A-Za-z0-9_-]{1,64}"  # also in names of files
POLICIES: dict[str, type[Policy]] = {}


def register(name: str) -> Callable[[type[Policy]], type[Policy]]:
    """Class decorator: make a policy known under `name`.

    Raises:
      UserError: the name is taken or none that people can type; what is decorated is no policy.
    """

    def add(cls: type[Policy]) -> type[Policy]:
        place = f"@register({show(name)}) on {show(cls)}"
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise UserError(f"{place}: give a name of 1 to 64 ASCII letters, digits, _ and -")
        if not isinstance(cls, type) or not issubclass(cls, Policy):
            raise UserError(f"{place}: it is no policy: derive the class from Policy")
        if not cls.rules:
            raise UserError(
                f"{place}: it serves no kind of models: derive the class from StagedPolicy, or "
                f"name its rules (`rules = (ScaleRule,)`)"
            )
        if name in POLICIES:
            taken_by = f"{POLICIES[name].__module__}.{POLICIES[name].__qualname__}"
            raise UserError(f"policy {name!r} is registered already ({taken_by}): rename yours")
        cls.name = name
        POLICIES[name] = cls
        return cls

    return add


def names() -> list[str]:
    """The names of all policies, in the order of tables; your own among them."""
    return list(POLICIES)


def get_policy(
    name: str, budget: float | None = None, arguments: dict[str, str] | None = None
) -> Policy:
    """Builds a registered policy from text arguments; `UserError` for unknown ones."""
    cls = POLICIES[choose("policy", name, POLICIES)]
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping) or not all(isinstance(n, str) for n in arguments):
        raise UserError(f"policy arguments {show(arguments)}: give names and texts")
    given = {name: text(f"policy argument {name}", value) for name, value in arguments.items()}
    values = text_arguments.read(cls, given)
    return cls(**values if budget is None else values | {"budget": budget})


def resolve_policy(policy: str | Policy, budget: float | None = None) -> Policy:
    """A policy from its name and a budget; policies pass through."""
    if not isinstance(policy, str | Policy):
        raise UserError(f"policy={show(policy)}: give a policy or a name: {', '.join(POLICIES)}")
    if isinstance(policy, str):
        return get_policy(policy, budget)
    if budget is not None:
        raise UserError("give the budget to the policy itself, or name the policy as text")
    return policy


OWN = own_modules.Kind(
    "policy", (POLICIES,), attrgetter("__module__"), "decorate a class with @register('its_name')"
)
load_module = OWN.load
