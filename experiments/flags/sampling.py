"""The sampling flags of a command: how tokens are drawn."""

from absl.flags import FlagHolder

from experiments.cli.flags import CommandFlags
from varjax.core.errors import UserError
from varjax.core.sampling import Sampling, check_seed
from varjax.models.model import Model


class SamplingFlags:
    """--cfg, --top_k, --top_p, --sampling, and --seed of a command.

    seed: whether it has a --seed.
    """

    def __init__(self, flags: CommandFlags, *, seed: bool = True):
        flags.heading("How tokens are drawn")
        self._cfg = flags.string(
            "cfg",
            None,
            "Guidance strength, a number or one per scale (3,3,2.5); default: the checkpoint's "
            "recommendation, as for all sampling flags.",
        )
        self._top_k = flags.integer("top_k", None, "Keep the k largest logits; 0 is off.")
        self._top_p = flags.floating("top_p", None, "Nucleus sampling with this mass; 0 is off.")
        more = flags.group(
            "sampling",
            "Further settings, as tau=0.5,greedy=true.",
            alone=("tau", "greedy", "more_smooth", "cfg_insertion_layer", "cfg_interval"),
        )
        self._tau = more.string(
            "tau", None, "Temperature that logits are divided by, a number or one per scale."
        )
        self._greedy = more.boolean("greedy", False, "Take the largest logit instead of sampling.")
        self._more_smooth = more.boolean(
            "more_smooth", None, "Feed back mixtures of codes: smoother pictures (VAR)."
        )
        self._insertion = more.string(
            "cfg_insertion_layer",
            None,
            "Where guidance acts, a list: 0 on the logits, -k after layer depth - k (Infinity).",
        )
        self._interval = more.integer(
            "cfg_interval",
            None,
            "Guide image tokens 0 to this number + 1 only; -1 guides all (LlamaGen).",
        )
        if seed:
            self._seed = flags.integer(
                "seed", 0, "Image i depends on (seed, i, its label or prompt) only."
            )

    def sampling(self, model: Model) -> Sampling:
        """Return the settings: each as its flag says, else as the checkpoint recommends."""
        return model.sampling(
            cfg=_numbers(self._cfg, float),
            tau=_numbers(self._tau, float),
            cfg_insertion_layer=_numbers(self._insertion, int),
            cfg_interval=self._interval.value,
            top_k=self._top_k.value,
            top_p=self._top_p.value,
            greedy=self._greedy.value,
            more_smooth=self._more_smooth.value,
        )

    def seed(self, runs: int = 1) -> int:
        """Return --seed, checked as the first of `runs` consecutive seeds."""
        return check_seed(self._seed.value, runs, name=f"--{self._seed.name}")


def _numbers(
    holder: FlagHolder[str], number: type[int] | type[float]
) -> float | tuple[float, ...] | None:
    """Read a flag such as `1,2,3`; None if it is not given. A single float is returned by itself.
    number: int or float."""
    if holder.value is None:
        return None
    try:
        found = tuple(number(part) for part in holder.value.split(","))
    except ValueError:
        what = {int: "whole numbers", float: "numbers"}[number]
        raise UserError(
            f"--{holder.name}={holder.value}: write {what} separated by commas, or a single one"
        ) from None
    return found[0] if number is float and len(found) == 1 else found
