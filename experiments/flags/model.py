"""The flags that name a model, the shape of its pictures, and its places for prompts."""

from dataclasses import replace

from absl.flags import FlagHolder

from experiments.cli.flags import CommandFlags
from experiments.prompts.condition import Text, TokenizedPrompts
from varjax.conditions import Condition
from varjax.core.errors import UserError, choose
from varjax.models import registry
from varjax.models.infinity.config import SIZES, TEMPLATES
from varjax.models.loading import describe, has_weights
from varjax.models.model import Model
from varjax.models.registry import found


class ModelFlags:
    """--checkpoint, --aspect, --size, --grid, --prompt_tokens and, for some commands, --model.

    published: what the help says about --model; None: the command has no such flag.
    """

    def __init__(self, flags: CommandFlags, *, published: str | None = None):
        flags.heading("Model")
        self._checkpoint = flags.string(
            "checkpoint",
            None,
            "Checkpoint folder; or the name of a published model that `python -m ported_weights "
            "--source=hub` has converted; or an embedded model: demo (the default), demo-eight "
            "(more scales, so more for a policy to choose from), demo-llamagen (token by token).",
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
            "size",
            None,
            f"Their pixels: {', '.join(SIZES)}, or for Lumina-mGPT height x width, as 768x512; "
            "default: the checkpoint's.",
        )
        self._grid = flags.string(
            "grid",
            None,
            "Their height x width in units of the model, as 24x16: 32 pixels for Lumina-mGPT, "
            "tokens for a Janus of one's own; default: the checkpoint's.",
        )
        self._prompt_tokens = flags.integer(
            "prompt_tokens",
            None,
            "Places for the token ids of a prompt (Janus-Pro, Lumina-mGPT), which shorter ones do "
            "not fill; the same number in several runs gives them the same plan. Default: as many "
            "as the longest prompt has, and without prompts the model's own. Of models that read "
            "features of texts: their padded length until they are encoded; default: the most.",
            lower_bound=1,
        )

    def check_alone(self, *others: FlagHolder) -> None:
        """Raise `UserError` if several flags name a model. others: further flags that do."""
        holders = (self._model, self._checkpoint, *others)
        given = [f"--{holder.name}" for holder in holders if holder is not None and holder.value]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} exclude each other: name one model")
        holders = (self._aspect, self._size, self._grid, self._prompt_tokens)
        shape = [f"--{h.name}" for h in holders if h.value]
        if shape and any(holder.value for holder in others):
            raise UserError(f"{shape[0]}: {given[0]} says the schedule already, leave it out")

    def named(self) -> Model:
        """Return the model that is named, in the shape that it has by itself."""
        self.check_alone()
        holders = (holder for holder in (self._model, self._checkpoint) if holder is not None)
        return describe(found(next((holder.value for holder in holders if holder.value), None)))

    def resolve(self, *, weights: bool = True, otherwise: str = "") -> Model:
        """Return the model without its weights; the embedded demo if none is named.

        weights: refuse published names, which have no weights here. otherwise: what else a user can
        do then, for the message."""
        self.check_alone()
        name = None if self._model is None else self._model.value
        if name:
            choose("model", name, registry.PRESETS)
        model = describe(
            name or found(self._checkpoint.value),
            aspect=self._aspect.value,
            size=self._size.value,
            grid=self._grid.value,
        )
        if self.text_tokens(model) is None:
            model = model.with_prompt_tokens(self._prompt_tokens.value)
        if weights and not has_weights(model):
            raise UserError(
                f"{model.name} is a published model without weights here: {otherwise}get them "
                f"with `python -m ported_weights --model={model.name} --source=hub`; "
                f"--checkpoint={model.name} finds them then"
            )
        return model

    def fitted(self, model: Model, condition: Condition) -> tuple[Model, Condition]:
        """Return both as they fit together: prompts decide how many places the model has for their
        token ids, unless --prompt_tokens does. `UserError` if a prompt does not fit."""
        if isinstance(condition, TokenizedPrompts):
            return condition.fitted(model, self._prompt_tokens.value)
        if isinstance(condition, Text):
            condition = replace(condition, assumed=self.text_tokens(model))
        return model, condition

    def text_tokens(self, model: Model) -> int | None:
        """Return --prompt_tokens of a model that reads features of texts, the padded length to plan
        with; None without it, and of other models. `UserError` if the model takes fewer."""
        asked, most = self._prompt_tokens.value, getattr(model.config, "text_maxlen", None)
        if asked is None or most is None:
            return None
        if asked > most:
            raise UserError(f"--prompt_tokens={asked}: {model.name} takes at most {most}")
        return asked
