"""Rules for the tensors of `Inception` and `LPIPS`, networks that judge pictures
(`varjax.models.judges`). The tensors' shapes tell the widths."""

from collections.abc import Collection, Iterable, Mapping

from ported_weights.rules import Ignore, Take, linear
from varjax.core.errors import UserError, some
from varjax.models.judges.inception import CONVOLUTIONS, InceptionConfig
from varjax.models.judges.lpips import LPIPSConfig, layers_of

HEADS = ("lin0.model.1.weight", "lin1.model.1.weight")  # LPIPS: they have a file of their own
_STATISTICS = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "variance"}


def inception_config(tensors: Mapping) -> InceptionConfig:
    """Read the widths from {name: tensor}. `UserError` names all convolutions that are missing."""
    widths = _widths(tensors, [f"{name}.conv.weight" for name in CONVOLUTIONS])
    (classes,) = _widths(tensors, ["fc.weight"], axes=2)
    return InceptionConfig(widths=widths, num_classes=classes)


def lpips_config(net: str, tensors: Mapping) -> LPIPSConfig:
    """Read the widths of a backbone with torchvision's names. `UserError` names what is missing."""
    names = [f"features.{layer.number}.weight" for layer in layers_of(net)]
    return LPIPSConfig(net=net, widths=_widths(tensors, names))


def _widths(tensors: Mapping, names: Iterable[str], axes: int = 4) -> tuple[int, ...]:
    """Return the first length of each named tensor, all of which have so many axes."""
    names = list(names)
    if missing := [name for name in names if name not in tensors]:
        raise UserError(f"{len(missing)} of its tensors are missing: {some(missing, 8)}")
    for name in names:
        if len(tensors[name].shape) != axes:
            raise UserError(f"{name} is {list(tensors[name].shape)}, {axes} axes are needed")
    return tuple(tensors[name].shape[0] for name in names)


def inception_rules(config: InceptionConfig, names: Collection[str] = ()) -> list[Take | Ignore]:
    """Return the rule table of Inception: convolutions before the blocks and in them."""
    rules: list[Take | Ignore] = []
    for pattern, target in ((r"(Conv2d_\w+)", r"\1"), (r"(Mixed_\w+)\.(\w+)", r"\1/\2")):
        rules.append(Take(rf"{pattern}\.conv\.weight", f"{target}/kernel", "conv"))
        for theirs, ours in _STATISTICS.items():
            rules.append(Take(rf"{pattern}\.bn\.{theirs}", f"{target}/{ours}"))
    return [
        *rules,
        *linear("fc", "fc"),
        Ignore(r".*\.bn\.num_batches_tracked", "a counter of training steps"),
    ]


LPIPS_RULES = [  # of backbone and heads together
    Take(r"features\.(\d+)\.weight", r"features_\1/kernel", "conv"),
    Take(r"features\.(\d+)\.bias", r"features_\1/bias"),
    Take(r"lin(\d)\.model\.1\.weight", r"head_\1", "flatten"),
    Ignore(r"classifier\..*", "the classifier, which LPIPS does not need"),
]
