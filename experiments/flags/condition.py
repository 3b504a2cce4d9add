"""The flags that say what images are made of: classes or prompts, as the model's family takes them.

Flags of another kind of condition (`Model.condition`) are refused with a hint at the right ones.
"""

import contextlib
import pathlib
import re

import numpy as np
from absl.flags import FlagHolder

from experiments.cli.flags import CommandFlags
from experiments.flags.prompts import PromptFlags, plain
from experiments.prompts.condition import Text, TokenizedPrompts, encoder_folder, warn
from experiments.prompts.layouts import check_layout
from experiments.prompts.sets import PromptSet
from varjax.conditions import MOST_IMAGES, Condition
from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.models.labels import Labels
from varjax.models.model import Model
from varjax.storage.values import MissingExtra
from varjax.text import encoder as text_encoder
from varjax.text import features as text_features
from varjax.text import prompt_ids
from varjax.text.prompt_tokenizer import FILE, FOLDER, PromptTokenizer

ALL_CLASSES_UP_TO = 64  # without flags: every class once, or few images for larger models
FEW_IMAGES = 16
WAYS = {  # by kind of condition
    "labels": "is class-conditional; choose images with --labels or --num_images",
    "text": "draws from text; give --prompts=TEXT, --prompts=FILE or --text_features=FILE.npz",
    "prompt_ids": "reads prompts as token ids; give --prompts=TEXT, --prompts=FILE or "
    "--prompt_ids=FILE",
}


class ConditionFlags:
    """--labels, --num_images, --prompts, --negative_prompts, --text_features and --prompt_ids.

    samples: the default of --num_samples, for a command that takes a few examples only, spread
    evenly over classes or prompts; None: the command takes all, and has --num_images.
    """

    def __init__(self, flags: CommandFlags, *, samples: int | None = None):
        flags.heading("What pictures are made of")
        self._samples = self._count = None
        if samples is not None:
            self._samples = flags.integer(
                "num_samples",
                samples,
                "Images per measurement, over classes or prompts spread evenly.",
                lower_bound=1,
                upper_bound=10**6,
            )
        else:
            self._count = flags.string(
                "num_images",
                None,
                "Number of images, over all classes in turn; or of each one: 50/class, 4/prompt "
                "(default: as the prompt set's scorer expects, else 1).",
            )
        self._labels = flags.string(
            "labels", None, "Classes, by number or name, one image each: 3,7,lemon."
        )
        self._prompts = PromptFlags(flags)
        self._features = flags.string(
            "text_features",
            None,
            "npz file with `kv` and `lens`, as experiments.encode_text writes: no encoder is "
            "needed. Prompts beside it are the texts it was made of.",
        )
        self._ids = flags.string(
            "prompt_ids",
            None,
            "npz file with `ids` and `lens`, token ids as the model's published processor makes "
            "them: no tokenizer is needed. Prompts beside it are the texts it was made of.",
        )
        self._kinds = {
            "labels": (self._of_labels, (self._labels,)),
            "text": (self._resolve_text, (*self._prompts.holders, self._features)),
            "prompt_ids": (self._resolve_ids, (*self._prompts.positive, self._ids)),
        }

    def resolve(self, model: Model, *, weights: bool = True) -> Condition:
        """Return the condition (`varjax.conditions`), checked; prompts are not encoded yet, nor put
        into places of the model (`ModelFlags.fitted`).

        weights: the model will run; if not, it need not have a text encoder or a tokenizer."""
        resolve, holders = self._kinds[model.condition]
        mine = {holder.name for holder in holders}
        for _, others in self._kinds.values():
            for holder in others:
                if holder.present and holder.name not in mine:
                    raise UserError(f"--{holder.name}: {model.name} {WAYS[model.condition]}")
        return resolve(model, weights)

    def _of_labels(self, model: Model, weights: bool) -> Labels:
        num_classes = model.num_classes
        count = self._samples if self._count is None else self._count
        if count.present and self._labels.present:
            raise UserError(
                f"--labels and --{count.name} exclude each other: labels already say how many "
                f"images there are"
            )
        if (text := self._labels.value) is not None:
            chosen = text.split(",")
        elif self._samples is not None:
            turn = np.arange(self._samples.value) / self._samples.value
            chosen = np.floor(turn * num_classes).astype(np.int32)
        else:
            number = num_classes if num_classes <= ALL_CLASSES_UP_TO else FEW_IMAGES
            if self._count.value is not None:
                number, each = read_count(self._count, "class")
                number = number * num_classes if each else number
                arguments.integer(f"--{self._count.name}", number, 1, MOST_IMAGES)
            chosen = np.arange(number) % num_classes
        return Labels.of(chosen, num_classes, model.class_names)

    def _resolve_text(self, model: Model, weights: bool) -> Text:
        config, path = model.config, self._features.value
        features = None
        if path:
            features = text_features.load(path, config.text_channels, config.text_maxlen)
            given = features.prompts, len(features.lens)
            prompts = self._prompts.read_beside(self._features, *given)
            if self._prompts.holders[1].present:
                raise UserError("--negative_prompts: --text_features holds its own, leave it out")
        else:
            prompts = self._given(model, weights)
        each = self._each(prompts, *model.pixels)
        text = Text(
            prompts=prompts,
            each=each,
            text_maxlen=config.text_maxlen,
            negative=self._prompts.read_negative(prompts),
            encoder=_encoder(model) if weights and features is None else None,
            features=None if features is None else features.repeat(each),
        )
        return text if self._samples is None else text.spread(self._samples.value)

    def _resolve_ids(self, model: Model, weights: bool) -> TokenizedPrompts:
        """Refuses measuring with a few samples: only models that draw token by token read ids."""
        ids = None
        if self._ids.value:
            ids = prompt_ids.load(self._ids.value)
            prompts = self._prompts.read_beside(self._ids, ids.prompts, len(ids.lens))
        else:
            prompts = self._given(model, weights)
            there = model.directory and (model.directory / FOLDER / FILE).is_file()
            if self._prompts.positive[0].value and (weights or there):
                tokenizer = PromptTokenizer.of_checkpoint(model.directory, model.name)
                texts, config = prompts.texts, model.config
                ids = prompt_ids.encode(texts, config, tokenizer, prompts.names, warn=warn)
        each = self._each(prompts, *model.pixels)
        if ids is not None:
            ids = ids.checked(model.config, prompts.names).repeat(each)
        return TokenizedPrompts(prompts=prompts, each=each, ids=ids)

    def _given(self, model: Model, weights: bool) -> PromptSet:
        """Return --prompts; without any, one that stands for all where nothing is drawn."""
        found = self._prompts.read()
        if found is None and weights:
            raise UserError(f"{model.name} {WAYS[model.condition]}")
        return found or plain([""], ["--dry_run"])

    def _each(self, prompts: PromptSet, height: int, width: int) -> int:
        """Return how many images every prompt has. `UserError` if the prompt set's scorer cannot
        read so many of this size. Without pillow no files are written."""
        if self._count is None:
            return 1
        count = prompts.images_per_prompt
        if self._count.value is not None:
            count, each = read_count(self._count, "prompt")
            if not each:
                raise UserError(
                    f"--{self._count.name}={count}: prompts say how many images there are; "
                    f"write {count}/prompt for so many of each"
                )
        with contextlib.suppress(MissingExtra):
            check_layout(prompts, count, height, width)
        return count


def read_count(holder: FlagHolder[str], each: str) -> tuple[int, bool]:
    """Return a number of images as N or N/`each`, and whether it is of each one."""
    found = re.fullmatch(rf"(\d{{1,18}})(/{each})?", holder.value)
    if not found:
        raise UserError(
            f"--{holder.name}={holder.value}: write a number of images, or how many of each, as "
            f"4/{each}"
        )
    return arguments.integer(f"--{holder.name}", int(found[1]), 1, MOST_IMAGES), bool(found[2])


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
