"""The one list of policies: it drives the command-line values, the README table and the generic
tests."""

import numbers
from collections.abc import Callable

from varjax.errors import UserError, choose
from varjax.policies.base import Policy, make_policy

POLICIES: dict[str, type[Policy]] = {}


def register(name: str) -> Callable[[type[Policy]], type[Policy]]:
    """Class decorator: make a policy known under `name`."""

    def add(cls: type[Policy]) -> type[Policy]:
        if name in POLICIES:
            raise ValueError(f"policy {name!r} is registered twice")
        cls.name = name
        POLICIES[name] = cls
        return cls

    return add


def get_policy(
    name: str, budget: float | None = None, arguments: dict[str, str] | None = None
) -> Policy:
    """Build a registered policy from text arguments; unknown names and arguments raise `UserError`
    with what exists."""
    return make_policy(POLICIES[choose("policy", name, POLICIES)], budget, arguments or {})


def resolve_policy(policy: str | Policy, budget: float | None = None) -> Policy:
    """A policy from its name and a budget; policies pass through."""
    if not isinstance(policy, str | Policy):
        raise UserError(f"policy={policy!r:.60}: give a policy or a name: {', '.join(POLICIES)}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, numbers.Real)):
        raise UserError(f"budget={budget!r:.60} is not a number")
    if isinstance(policy, str):
        return get_policy(policy, budget)
    if budget is not None:
        raise UserError("give the budget to the policy itself, or name the policy as text")
    return policy


def markdown_table() -> str:
    """The policy table of the README."""
    rows = ["| policy | keeps | contents | default budget |", "| --- | --- | --- | --- |"]
    for name, cls in POLICIES.items():
        contents = "decided per image" if cls.select is not Policy.select else "known beforehand"
        contents = cls.contents or (contents if cls.budgeted else "given")
        budget = f"{cls().budget:g}" if cls.budgeted else "what it keeps"
        rows.append(f"| `{name}` | {cls.summary} | {contents} | {budget} |")
    return "\n".join(rows)
