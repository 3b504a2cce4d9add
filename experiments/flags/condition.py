"""The flags that say what images are made of: classes or prompts, as the model's family takes them.

Each kind of condition (`Model.condition`) has its class of flags. Flags of another kind are refused
with a hint at the right ones.
"""

import pathlib

import numpy as np
from absl.flags import FlagHolder

from experiments.flags.prompts import ImagePromptFlags, NegativeFlags, plain
from experiments.prompts.condition import (
    Text,
    TokenizedPrompts,
    check_text_tokens,
    encoder_folder,
    tokenized,
)
from experiments.prompts.sets import PromptSet
from varjax.cli.flags import CommandFlags
from varjax.conditions import MOST_IMAGES, Condition
from varjax.errors import UserError
from varjax.model import Model
from varjax.models.labels import Labels
from varjax.text import encoder as text_encoder
from varjax.text import features as text_features
from varjax.text import prompt_ids
from varjax.text.features import TextFeatures
from varjax.text.prompt_tokenizer import has_tokenizer

ALL_CLASSES_UP_TO = 64  # without flags: every class once, or few images for larger models
FEW_IMAGES = 16


class ConditionFlags:
    """All flags for conditions.

    samples: the default of --num_samples, for a command that takes a few examples only, spread
    evenly over classes or prompts; None: the command takes all.
    literal: --prompts may be a text, too.
    """

    def __init__(self, flags: CommandFlags, *, samples: int | None = None, literal: bool = False):
        flags.heading("What pictures are made of")
        self._samples = None
        if samples is not None:
            self._samples = flags.integer(
                "num_samples",
                samples,
                "Images per measurement, over classes or prompts spread evenly.",
                lower_bound=1,
                upper_bound=10**6,
            )
        prompts = ImagePromptFlags(flags, samples=samples is not None, literal=literal)
        self._kinds = {
            "labels": LabelFlags(flags, self._samples),
            "text": TextFlags(flags, self._samples, prompts),
            "prompt_ids": PromptIdFlags(flags, prompts),
        }

    def resolve(self, model: Model, *, weights: bool = True) -> Condition:
        """Return the condition (`varjax.conditions`), checked; prompts are not encoded yet, nor put
        into places of the model (`ModelFlags.fitted`).

        weights: the model will run; if not, it need not have a text encoder or a tokenizer."""
        mine = self._kinds[model.condition]
        allowed = {holder.name for holder in mine.holders}
        for other in self._kinds.values():
            for name in _given(*other.holders):
                if name not in allowed:
                    raise UserError(f"--{name}: {model.name} {mine.words}")
        return mine.resolve(model, weights)


def _given(*holders: FlagHolder) -> list[str]:
    """Return the names of the flags that are given."""
    return [h.name for h in holders if h.present]


class LabelFlags:
    """--labels, and --num_images and --images_per_class where a command has no --num_samples."""

    words = "is class-conditional; choose images with --labels or --num_images"

    def __init__(self, flags: CommandFlags, samples: FlagHolder[int] | None):
        self._samples = samples
        self._labels = flags.string("labels", None, "Class numbers, one image each: 3,7,7.")
        self._num_images = self._each = None
        if samples is None:
            self._num_images = flags.integer(
                "num_images", None, "Number of images, over all classes in turn."
            )
            self._each = flags.integer(
                "images_per_class", None, "So many images of every class, in turn.", lower_bound=1
            )
        all_of_them = (self._labels, self._num_images, self._each)
        self.holders = tuple(holder for holder in all_of_them if holder is not None)

    def resolve(self, model: Model, weights: bool) -> Labels:
        chosen = self._chosen(model.num_classes)
        return Labels.of(chosen, model.num_classes, model.class_names)

    def _chosen(self, num_classes: int):
        holders = (self._num_images, self._each, self._samples)
        counts = _given(*(holder for holder in holders if holder is not None))
        if len(counts) > 1:
            raise UserError(f"--{counts[0]} and --{counts[1]} exclude each other: keep one of them")
        if counts and self._labels.present:
            raise UserError(
                f"--labels and --{counts[0]} exclude each other: labels already say how many "
                f"images there are"
            )
        if (text := self._labels.value) is not None:
            try:
                return [int(part) for part in text.split(",")]
            except ValueError:
                raise UserError(
                    f"--labels={text!r}: write class numbers separated by commas, for example 3,7,7"
                ) from None
        if self._samples is not None:
            turn = np.arange(self._samples.value) / self._samples.value
            return np.floor(turn * num_classes).astype(np.int32)
        wanted = self._num_images.value
        if wanted is None and self._each.value:
            wanted = self._each.value * num_classes
        return np.arange(_number(wanted, num_classes)) % num_classes


def _number(asked: int | None, num_classes: int) -> int:
    if asked is None:
        return num_classes if num_classes <= ALL_CLASSES_UP_TO else FEW_IMAGES
    if asked < 1:
        raise UserError(f"--num_images={asked}: at least 1")
    if asked > MOST_IMAGES:
        raise UserError(f"--num_images={asked}: at most {MOST_IMAGES}")
    return asked


class TextFlags:
    """Prompts with --negative_prompt, --negative_prompts, --text_features and --text_tokens."""

    words = "draws from text; give --prompt=TEXT, --prompts=FILE or --text_features=FILE.npz"

    def __init__(
        self, flags: CommandFlags, samples: FlagHolder[int] | None, prompts: ImagePromptFlags
    ):
        self._samples, self._prompts = samples, prompts
        self._negative = NegativeFlags(flags)
        self._features = flags.string(
            "text_features",
            None,
            "npz file with `kv` and `lens`, as experiments.encode_text writes: no encoder is "
            "needed. Prompts beside it are the texts it was made of.",
        )
        self._tokens = flags.integer(
            "text_tokens",
            None,
            "Padded length of texts to plan with before they are encoded; default: the most.",
            lower_bound=1,
        )
        own = (*self._negative.holders, self._features, self._tokens)
        self.holders = (*prompts.holders, *own)

    def resolve(self, model: Model, weights: bool) -> Text:
        config = model.config
        features = None
        if path := self._features.value:
            features = text_features.load(path, config.text_channels, config.text_maxlen)
        prompts = self._read_prompts(features)
        if prompts is None and weights:
            raise UserError(f"{model.name} {self.words}")
        prompts = prompts or plain([""], ["--dry_run"])
        if features is not None and (given := _given(*self._negative.holders)):
            raise UserError(f"--{given[0]}: --text_features holds its own, leave it out")
        negative = self._negative.read(prompts)
        encoder = _encoder(model) if weights and features is None else None
        each = self._prompts.each(prompts, *model.pixels)
        text = Text(
            prompts=prompts,
            each=each,
            text_maxlen=config.text_maxlen,
            negative=negative,
            encoder=encoder,
            assumed=check_text_tokens(self._tokens.value, model),
            features=None if features is None else features.repeat(each),
        )
        return text if self._samples is None else text.spread(self._samples.value)

    def _read_prompts(self, features: TextFeatures | None) -> PromptSet | None:
        if features is None:
            return self._prompts.read()
        return self._prompts.read_beside(self._features, features.prompts, len(features.lens))


def _encoder(model: Model) -> pathlib.Path:
    """Return the folder of a checkpoint's text encoder, which is checked except for its weights."""
    folder = encoder_folder(
        model.directory,
        ", or give features that were computed elsewhere with --text_features=FILE.npz",
    )
    width = text_encoder.check_folder(folder)[0].d_model
    wanted = model.config.text_channels
    if width != wanted:
        raise UserError(
            f"the text encoder in {folder} gives features of width {width}, "
            f"{model.name} takes {wanted}: convert the encoder that the model was trained with"
        )
    return folder


class PromptIdFlags:
    """Prompts with --prompt_ids. Only models that draw token by token take them, which no command
    measures with a few samples."""

    words = "reads prompts as token ids; give --prompt=TEXT, --prompts=FILE or --prompt_ids=FILE"

    def __init__(self, flags: CommandFlags, prompts: ImagePromptFlags):
        self._prompts = prompts
        self._ids = flags.string(
            "prompt_ids",
            None,
            "npz file with `ids` and `lens`, token ids as the model's published processor makes "
            "them: no tokenizer is needed. Prompts beside it are the texts it was made of.",
        )
        self.holders = (*prompts.holders, self._ids)

    def resolve(self, model: Model, weights: bool) -> TokenizedPrompts:
        ids = prompt_ids.load(self._ids.value) if self._ids.value else None
        if ids is not None:
            prompts = self._prompts.read_beside(self._ids, ids.prompts, len(ids.lens))
        else:
            prompts = self._prompts.read()
            if prompts is None and weights:
                raise UserError(f"{model.name} {self.words}")
            if prompts is not None and (weights or has_tokenizer(model.directory)):
                ids = tokenized(prompts, model)
        prompts = prompts or plain([""], ["--dry_run"])
        each = self._prompts.each(prompts, *model.pixels)
        if ids is not None:
            ids = ids.checked(model.config, prompts.names).repeat(each)
        return TokenizedPrompts(prompts=prompts, each=each, ids=ids)
