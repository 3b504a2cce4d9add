"""Which KV-cache policy a command plans with: --policy, --budget, --policy_args, --calibration."""

import numpy as np

from experiments.settings import AbstractModel
from varjax import calibration as calibration_lib
from varjax.cache.geometry import Geometry
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.calibration import Calibration
from varjax.cli.command_line import CommandFlags, typed_pairs
from varjax.errors import UserError
from varjax.policies import POLICIES, Policy, get_policy
from varjax.sampling import Sampling

UNMEASURED = (
    "ranking   without --calibration layers and heads count as alike: what each of them keeps is "
    "made up, the budget holds"
)

UNKNOWN_SCHEDULE = (
    "orders    the order list does not say for which schedule it was measured; those published "
    "with HeatKV are for 1M, square"
)


class PolicyFlags:
    """The flags of one policy."""

    def __init__(self, flags: CommandFlags):
        self._policy = flags.enum("policy", "full", list(POLICIES), "KV-cache policy.")
        self._budget = flags.floating(
            "budget",
            None,
            "Fraction of the full cache's bytes that may be kept; default: the policy's own.",
        )
        self._arguments = flags.string(
            "policy_args", "", "Further arguments of the policy: key=value,key=value."
        )
        self._calibration = flags.string(
            "calibration",
            None,
            "Calibration file, for policies that use one; default: calibration.json of the "
            "checkpoint.",
        )

    @property
    def name(self) -> str:
        return self._policy.value

    def resolve(self) -> Policy:
        """The policy, checked."""
        arguments = typed_pairs(self._arguments.value)
        return get_policy(self.name, self._budget.value, arguments)

    def calibration(
        self,
        policy: Policy,
        geometry: Geometry,
        model: AbstractModel | None = None,
        sampling: Sampling | None = None,
    ) -> Calibration | None:
        """The file of --calibration, else the one in the model's folder.

        A file that is given is refused for policies that would ignore it, and any file if it was
        made for other weights than the model's or, with `sampling`, for another guidance. A model
        without weights, which can only be planned for, has a `stand_in`.
        """
        path = self._calibration.value
        if path and not policy.uses_calibration:
            raise UserError(f"policy {policy.name!r} uses no calibration: leave out --calibration")
        if not path and policy.uses_calibration and model is not None:
            path = calibration_lib.beside(model.directory)
        if not path:
            unmeasured = model is not None and model.directory is None
            return stand_in(policy, geometry) if unmeasured else None
        found = calibration_lib.load(path, geometry)
        if model is not None and model.directory is not None:
            guidance = None if sampling is None else sampling.guidance
            try:
                found.check_origin(calibration_lib.model_digest(model.metadata), guidance)
            except UserError as error:
                raise UserError(f"calibration {path}: {error}") from None
        return found

    def remarks(self, plan: CachePlan, calibration: Calibration | None) -> list[str]:
        """Lines to print with a plan."""
        lines = plan.policy.plan_lines(plan.geometry, calibration)
        further = ((UNMEASURED, _is_stand_in), (UNKNOWN_SCHEDULE, _is_bare_order_list))
        return [*lines, *(line for line, applies in further if applies(calibration))]


def stand_in(policy: Policy, geometry: Geometry) -> Calibration | None:
    """Measurements that treat all heads alike, for a policy that cannot plan without any."""
    try:
        plan_cache(geometry, policy, None)
        return None
    except UserError:  # it needs one; if something else is wrong, planning will say so
        pass
    layers, heads, schedule = geometry.num_layers, geometry.num_heads, geometry.schedule
    tokens = np.tril(np.broadcast_to(schedule.tokens, (schedule.num_scales,) * 2))
    beta = tokens / tokens.sum(-1, keepdims=True)
    per_layer = np.broadcast_to([0.0] + [1.0] * (schedule.num_scales - 1), (layers, len(beta)))
    return Calibration(
        schedule=schedule,
        num_layers=layers,
        num_heads=heads,
        beta=np.broadcast_to(beta, (layers, heads, *beta.shape)),
        key_discrepancy=per_layer,
        query_variance=np.ones((layers, heads)),
        selectivity=per_layer,
    )


def _is_stand_in(calibration: Calibration | None) -> bool:
    return calibration is not None and calibration.digest is None


def _is_bare_order_list(calibration: Calibration | None) -> bool:
    if calibration is None or calibration.orders is None:
        return False
    return calibration.beta is None and calibration.schedule is None
