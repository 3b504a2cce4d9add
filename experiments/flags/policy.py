"""The flags that choose a KV-cache policy, and what it reads."""

import contextlib
from collections.abc import Callable

import numpy as np
from absl.flags import ArgumentParser, FlagHolder

from experiments import budgets
from experiments.budgets import Sizing
from experiments.cli.flags import CommandFlags, about
from experiments.evaluation import metrics
from varjax.calibration import files as calibration_lib
from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.core.planner import choose, plan_cache
from varjax.core.sampling import Sampling
from varjax.core.sequence import TOKENS
from varjax.models.model import Model
from varjax.models.registry import OWN as own_models
from varjax.policies import POLICIES, Policy, get_policy
from varjax.policies.registry import OWN as own_policies
from varjax.policies.token_rule import SHORT_STAGE
from varjax.storage import own_modules
from varjax.storage.values import parse_pairs

UNMEASURED = (
    "ranking   without --calibration layers and heads count as alike: what each of them keeps is "
    "made up, the budget holds"
)

UNKNOWN_SCHEDULE = (
    "orders    the order list does not say for which schedule it was measured; those published "
    "with HeatKV are for 1M, square"
)


def plugin_flag(flags: CommandFlags) -> None:
    """Define --plugin."""

    def use(names: str) -> None:
        for name in names.split(","):
            own_modules.load([own_policies, own_models, metrics.OWN], name)

    flags.used(
        "plugin",
        "Python files, or import names, separated by commas, that register policies, models or "
        "metrics of your own.",
        use,
    )


def calibration_flag(flags: CommandFlags) -> FlagHolder[str]:
    """Define --calibration."""
    return flags.string(
        "calibration",
        None,
        "Calibration file, for policies that use one; default: calibration.json of the checkpoint.",
    )


def learned_flag(flags: CommandFlags) -> FlagHolder[str]:
    """Define --learned."""
    return flags.string(
        "learned",
        None,
        "Learned tables, for policy learned; default: learned.npz of the checkpoint.",
    )


class BudgetParser(ArgumentParser):
    """A number, or `fit`."""

    syntactic_help = "a number, or fit"

    def parse(self, argument: str | float) -> float | str:
        return argument if argument == budgets.FIT else float(argument)

    def flag_type(self) -> str:
        return "float"


class PolicyFlags:
    """The flags of a command that plans with one policy.

    sizes: whether the budget may be bytes or what fits; the command then calls `sized`.
    usual: the policy without the flag.
    """

    def __init__(self, flags: CommandFlags, *, sizes: bool = True, usual: str = "full"):
        flags.heading("Policy")
        self._policy = flags.choice("policy", usual, POLICIES, "KV-cache policy.")
        fraction, own = "Fraction of the full cache's bytes that may be kept", "the policy's own"
        self._kv_bytes = None
        if sizes:
            fits = "or fit: the largest with which --batch_size fits the device"
            self._budget = flags.define(
                BudgetParser(), "budget", None, f"{fraction}, {fits}; default: {own}."
            )
            self._kv_bytes = flags.string(
                "kv_bytes",
                None,
                "The same as bytes of a batch's cache: 2GiB, in place of --budget.",
            )
        else:
            self._budget = flags.floating("budget", None, f"{fraction}; default: {own}.")
        self._arguments = flags.string(
            "policy_args", "", "Further arguments of the policy: key=value,key=value."
        )
        self._calibration = calibration_flag(flags)
        self._learned = learned_flag(flags)
        plugin_flag(flags)

    def resolve(self) -> Policy:
        """Return the policy, checked."""
        arguments = parse_pairs(self._arguments.value)
        fraction, given = self._budget.value, self._kv_bytes
        if fraction is not None and given is not None and given.value:
            raise UserError("--budget and --kv_bytes exclude each other: both say how much is kept")
        return get_policy(self._policy.value, None if self.is_fitted else fraction, arguments)

    @property
    def is_chosen(self) -> bool:
        """Whether a policy, or anything of one, was asked for."""
        holders = self._policy, self._budget, self._arguments, self._calibration, self._learned
        return any(holder.present for holder in holders)

    @property
    def given(self) -> tuple[dict[str, str], float | None]:
        """(--policy_args, the budget as a number, None if no flag says one)."""
        sized = self.is_fitted or (self._kv_bytes is not None and self._kv_bytes.value)
        return parse_pairs(self._arguments.value), None if sized else self._budget.value

    @property
    def is_fitted(self) -> bool:
        return self._budget.value == budgets.FIT

    def sized(
        self,
        policy: Policy,
        model: Model | Geometry,
        sampling: Sampling | None,
        sizing: Callable[[], Sizing],
        groups: int = 1,
    ) -> tuple[Policy, list[str]]:
        """Return (the policy with the budget that --kv_bytes or --budget=fit means, remarks); the
        policy as it is if neither is given. `UserError` if no budget means that. groups: as of
        `plan`."""
        wanted = self._kv_bytes.value
        if not wanted and not self.is_fitted:
            return policy, []
        sizes = sizing()

        def plan_of(sized: Policy) -> CachePlan:
            return self.plan(sized, model, sampling, groups)[0]

        with about(self._kv_bytes if wanted else self._budget):
            if wanted:
                sized = budgets.of_bytes(policy, budgets.parse_bytes(wanted), plan_of, sizes)
            else:
                sized = budgets.fitting(policy, plan_of, sizes)
        return sized, [budgets.remark(sized, plan_of(sized), sizes)]

    def plan(
        self,
        policy: Policy,
        model: Model | Geometry,
        sampling: Sampling | None = None,
        groups: int = 1,
    ) -> tuple[CachePlan, Calibration | None]:
        """Return (plan, calibration that it was made with, None if there is none). groups: devices
        that heads are divided over.

        The calibration is that of --calibration and --learned, else of the files in the model's
        folder, else, for a model without weights, a `stand_in`. `UserError` if the policy would
        ignore a flag, or a file is of other weights or, with `sampling`, of another guidance.
        """
        self._check_files(policy)
        geometry, guidance = model.geometry if isinstance(model, Model) else model, None
        if sampling is not None:
            geometry, guidance = model.geometry_for(sampling), sampling.guidance
        rule = policy.rule(geometry.kind)
        given = self._calibration.value, guidance, self._learned.value
        found = calibration_lib.find(policy, model, *given)
        if found is None and isinstance(model, Model) and model.directory is None:
            found = stand_in(policy, geometry)
        try:
            return plan_cache(geometry, policy, found, groups=groups), found
        except UserError as error:
            if found is None and rule.uses_calibration:
                raise UserError(f"{error}; --calibration=FILE names it") from None
            raise

    def _check_files(self, policy: Policy) -> None:
        """Raise `UserError` if the policy would ignore --calibration or --learned. One that is
        given alone may be of either kind."""
        given = [holder for holder in (self._calibration, self._learned) if holder.value]
        if given and not policy.uses_calibration:
            so = " with these arguments" if self._arguments.value else ""
            flag = f"--{given[0].name}"
            raise UserError(f"policy {policy.name!r}{so} uses no calibration: leave out {flag}")
        for holder, name in zip(given, calibration_lib.BESIDE, strict=False):
            if len(given) > 1 and name not in policy.calibration_files:
                raise UserError(
                    f"policy {policy.name!r} reads no {name}: leave out --{holder.name}"
                )


def stand_in(policy: Policy, geometry: Geometry) -> Calibration | None:
    """Return measurements that treat all heads alike, for a policy that cannot plan without any;
    None for a policy that can."""
    if not policy.rule(geometry.kind).uses_calibration:
        return None
    with contextlib.suppress(UserError):  # it needs one; planning will report any other reason
        choose(geometry, policy, None)
        return None
    layers, heads, schedule = geometry.num_layers, geometry.num_heads, geometry.schedule
    if geometry.kind == TOKENS:
        seen = -(-schedule.steps // SHORT_STAGE), layers, heads, schedule.steps
        return Calibration(learned={1.0: np.broadcast_to(np.uint8(255), seen)})
    tokens = np.tril(np.broadcast_to(schedule.tokens, (schedule.num_scales,) * 2))
    beta = tokens / tokens.sum(-1, keepdims=True)
    seen = schedule.num_scales - 1, layers, heads, schedule.persistent_tokens
    per_layer = np.broadcast_to([0.0] + [1.0] * (schedule.num_scales - 1), (layers, len(beta)))
    return Calibration(
        schedule=schedule,
        num_layers=layers,
        num_heads=heads,
        beta=np.broadcast_to(beta, (layers, heads, *beta.shape)),
        key_discrepancy=per_layer,
        query_variance=np.ones((layers, heads)),
        selectivity=per_layer,
        learned={1.0: np.full(seen, 255, np.uint8)},
    )


def plan_remarks(plan: CachePlan, calibration: Calibration | None) -> list[str]:
    """Return lines to print with a plan."""
    lines, measured = list(plan.rule.plan_lines(plan.geometry)), calibration
    if measured is None:
        return lines
    unknown = measured.orders is not None and measured.beta is None and measured.schedule is None
    # without a digest it is a `stand_in`
    return lines + [UNMEASURED] * (measured.digest is None) + [UNKNOWN_SCHEDULE] * unknown
