"""Which KV-cache policy a command plans with: --policy, --budget, --policy_args, --calibration."""

from experiments.settings import AbstractModel
from varjax.command_line import CommandFlags, typed_pairs
from varjax.errors import UserError
from varjax.geometry import Geometry
from varjax.policies import POLICIES, Policy, get_policy
from varjax.policies import calibration as calibration_lib
from varjax.policies.calibration import Calibration
from varjax.sampling import Sampling


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
        made for other weights than the model's or, with `sampling`, for another guidance.
        """
        path = self._calibration.value
        if path and not policy.uses_calibration:
            raise UserError(f"policy {policy.name!r} uses no calibration: leave out --calibration")
        if not path and policy.uses_calibration and model is not None:
            path = calibration_lib.beside(model.directory)
        if not path:
            return None
        found = calibration_lib.load(path, geometry)
        if model is not None and model.directory is not None:
            guidance = None if sampling is None else sampling.cfg
            try:
                found.check_origin(calibration_lib.model_digest(model.metadata), guidance)
            except UserError as error:
                raise UserError(f"calibration {path}: {error}") from None
        return found
