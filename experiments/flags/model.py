"""Which model a command is about, the shape of its pictures, and how it draws their tokens."""

import numpy as np

from varjax.cli.flags import CommandFlags, about
from varjax.errors import UserError, choose
from varjax.model import Model, describe
from varjax.models import registry
from varjax.models.infinity.schedules import SIZES, TEMPLATES
from varjax.sampling import Sampling

GIVEN = {  # what a model calls its tokens: how a file holds them
    "tokens": "int [N, L]",
    "bits": "uint8 [N, L of the image tokenizer, bits of a code]",
}


class ModelFlags:
    """--checkpoint of a command and, where a model without weights will do, --model; --aspect and
    --size.

    published: what the help says of --model; None: the command has no such flag.
    """

    def __init__(self, flags: CommandFlags, *, published: str | None = None):
        self._checkpoint = flags.string(
            "checkpoint", None, "Checkpoint folder; default: the embedded demo."
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

    def check_alone(self, *others) -> None:
        """Raise `UserError` if several flags name a model. others: holders of further ones."""
        holders = (self._model, self._checkpoint, *others)
        given = [f"--{holder.name}" for holder in holders if holder is not None and holder.value]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} exclude each other: name one model")
        shape = [f"--{h.name}" for h in (self._aspect, self._size) if h.value]
        if shape and any(holder.value for holder in others):
            raise UserError(f"{shape[0]}: {given[0]} says the schedule already, leave it out")

    def resolve(self, *, weights: bool = True, otherwise: str = "") -> Model:
        """The model, its weights not loaded yet; the embedded demo if none is named. weights:
        refuse published names, which have none here. otherwise: another way out."""
        self.check_alone()
        name = None if self._model is None else self._model.value
        if name:
            choose("model", name, registry.PRESETS)
        shape = {"aspect": self._aspect.value, "size": self._size.value}
        model = describe(name or self._checkpoint.value, **shape)
        if weights and model.directory is None:
            raise UserError(
                f"{model.name} is a published model without weights here: {otherwise}convert its "
                f"weights with `python -m ported_weights --model={model.name} ...` and give the "
                f"folder"
            )
        return model


class SamplingFlags:
    """--cfg, --tau, --cfg_insertion_layer, --top_k, --top_p, --greedy, --more_smooth and --seed of
    a command."""

    def __init__(self, flags: CommandFlags):
        self._cfg = flags.string(
            "cfg",
            None,
            "Guidance strength, a number or one per scale (3,3,2.5); default: the checkpoint's "
            "recommendation, as for all sampling flags.",
        )
        self._tau = flags.string(
            "tau", None, "Temperature that logits are divided by, a number or one per scale."
        )
        self._insertion = flags.string(
            "cfg_insertion_layer",
            None,
            "Where guidance acts, a list: 0 on the logits, -k after layer depth - k (Infinity).",
        )
        self._top_k = flags.integer("top_k", None, "Keep the k largest logits; 0 is off.")
        self._top_p = flags.floating("top_p", None, "Nucleus sampling with this mass; 0 is off.")
        self._greedy = flags.boolean("greedy", False, "Take the largest logit instead of sampling.")
        self._more_smooth = flags.boolean(
            "more_smooth", None, "Feed back mixtures of codes: smoother pictures (VAR)."
        )
        self._seed = flags.integer(
            "seed", 0, "Image i depends on (seed, i, its label or prompt) only."
        )

    def sampling(self, model: Model) -> Sampling:
        """As asked, else as the checkpoint recommends."""
        return model.sampling(
            cfg=_numbers(self._cfg, float),
            tau=_numbers(self._tau, float),
            cfg_insertion_layer=_numbers(self._insertion, int),
            top_k=self._top_k.value,
            top_p=self._top_p.value,
            greedy=self._greedy.value,
            more_smooth=self._more_smooth.value,
        )

    @property
    def seed(self) -> int:
        """What the random numbers start from, checked."""
        if not 0 <= self._seed.value < 2**31:
            raise UserError(f"--seed={self._seed.value}: choose 0 to {2**31 - 1}")
        return self._seed.value


def _numbers(holder, kind: type) -> float | tuple | None:
    """The numbers of a flag `1,2,3`, a single float by itself; None if it was not set."""
    if holder.value is None:
        return None
    try:
        found = tuple(kind(part) for part in holder.value.split(","))
    except ValueError:
        what = {int: "whole numbers", float: "numbers"}[kind]
        raise UserError(
            f"--{holder.name}={holder.value}: write {what} separated by commas, or a single one"
        ) from None
    return found[0] if kind is float and len(found) == 1 else found


class GivenFlags:
    """--given_tokens, --given_bits and --given_scales: what replaces the draw."""

    def __init__(self, flags: CommandFlags):
        self._files = {
            kind: flags.string(
                f"given_{kind}", None, f"npz file with `{kind}` {shape} that replace the draw."
            )
            for kind, shape in GIVEN.items()
        }
        self._scales = flags.integer(
            "given_scales", None, "The first so many scales take what is given; default: all."
        )

    def resolve(self, model: Model, num_images: int) -> tuple[np.ndarray | None, int | None]:
        """(tokens as the model draws them, of all images, or None; how many scales take them, None
        for all), checked against the model."""
        mine, schedule = model.transformer.token_name, model.config.schedule
        for kind, holder in self._files.items():
            if holder.value and kind != mine:
                raise UserError(f"--given_{kind}: {model.name} draws {mine}: use --given_{mine}")
        path, scales = self._files[mine].value, self._scales.value
        if scales is not None and (not path or not 0 <= scales <= schedule.num_scales):
            raise UserError(
                f"--given_scales={scales}: 0 to {schedule.num_scales} scales, together with "
                f"--given_{mine}=FILE"
            )
        if not path:
            return None, None
        count = schedule.num_scales if scales is None else scales
        with about(self._files[mine]):
            array = _read(path, mine)
            return model.transformer.tokens_from_file(array, num_images, count), scales


def _read(path: str, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return archive[name]
    except Exception as error:  # NumPy raises many kinds over damaged files
        raise UserError(f"cannot read array `{name}` of an .npz file: {error}") from None
