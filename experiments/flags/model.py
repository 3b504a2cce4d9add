"""The flags that name a model, --checkpoint and --model, and the shape of its pictures."""

from absl.flags import FlagHolder

from varjax.cli.flags import CommandFlags
from varjax.errors import UserError, choose
from varjax.model import Model, describe
from varjax.models import registry
from varjax.models.infinity.schedules import SIZES, TEMPLATES


class ModelFlags:
    """--checkpoint, --aspect, --size and, for commands that can do without weights, --model.

    published: what the help says about --model; None: the command has no such flag.
    """

    def __init__(self, flags: CommandFlags, *, published: str | None = None):
        self._checkpoint = flags.string(
            "checkpoint",
            None,
            "Checkpoint folder, or demo-llamagen, an embedded model that draws token by token; "
            "default: the embedded demo.",
        )
        self._model = None
        if published is not None:
            names = ", ".join(registry.PRESETS)
            self._model = flags.string("model", None, f"{published}: {names}.")
        self._aspect = flags.string(
            "aspect",
            None,
            f"Height / width of the pictures of a text-to-image model: a number, the nearest of "
            f"{', '.join(sorted(TEMPLATES, key=float))} is taken; default: the checkpoint's.",
        )
        self._size = flags.string(
            "size", None, f"Their pixels: {', '.join(SIZES)}; default: the checkpoint's."
        )

    def check_alone(self, *others: FlagHolder) -> None:
        """Raise `UserError` if several flags name a model. others: further flags that do."""
        holders = (self._model, self._checkpoint, *others)
        given = [f"--{holder.name}" for holder in holders if holder is not None and holder.value]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} exclude each other: name one model")
        shape = [f"--{h.name}" for h in (self._aspect, self._size) if h.value]
        if shape and any(holder.value for holder in others):
            raise UserError(f"{shape[0]}: {given[0]} says the schedule already, leave it out")

    def named(self) -> Model:
        """Return the model that is named, without --aspect and --size."""
        self.check_alone()
        holders = (holder for holder in (self._model, self._checkpoint) if holder is not None)
        return describe(next((holder.value for holder in holders if holder.value), None))

    def resolve(self, *, weights: bool = True, otherwise: str = "") -> Model:
        """Return the model without its weights; the embedded demo if none is named.

        weights: refuse published names, which have no weights here. otherwise: what else a user can
        do then, for the message."""
        self.check_alone()
        name = None if self._model is None else self._model.value
        if name:
            choose("model", name, registry.PRESETS)
        model = describe(
            name or self._checkpoint.value, aspect=self._aspect.value, size=self._size.value
        )
        if weights and model.directory is None:
            raise UserError(
                f"{model.name} is a published model without weights here: {otherwise}convert its "
                f"weights with `python -m ported_weights --model={model.name} ...` and give the "
                f"folder"
            )
        return model
