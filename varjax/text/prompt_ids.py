"""Prompts as token ids, one list per image: what models draw from whose transformer reads the text
itself (Janus-Pro, Lumina-mGPT).

Callers give texts, which the tokenizer of the model's checkpoint turns into ids
(`varjax.text.prompt_tokenizer`), or the ids that a published processor made. Lists have different
lengths. A program has M places for them (`config.prompt_tokens`), in which ids stand on the right:
what is left of them is masked.

Letters: P prompts, N images, B images of a batch, M places for a prompt.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from varjax.conditions import ConditionKind, Model
from varjax.core import arguments
from varjax.core.errors import UserError, about
from varjax.storage import values
from varjax.text.prompt_condition import PromptCondition, Tell, no_known_word, read_arrays, warn
from varjax.text.prompt_tokenizer import PromptTokenizer

PROMPTS_WANTED = "give a list of texts, one for each image"
IDS_WANTED = "give a list of lists of token ids, one for each image, or PromptIds"
LONGEST = 2**20  # ids of a prompt, before a model says how many it takes


@dataclass(frozen=True, eq=False)
class PromptIds(PromptCondition):
    """Token ids of P prompts for N images: a `varjax.conditions.Condition`.

    Attributes:
      ids: of all prompts, one after the other.
      lens: how many of them belong to each prompt.
      prompts: the texts, where known.
      numbers: the prompt of every image; by default one image per prompt.
      slots: M, places for the ids of a prompt; None: as many as the longest has.

    Raises:
      UserError: arrays that do not fit each other.
    """

    ids: Int[np.ndarray, " total"]
    lens: Int[np.ndarray, " P"]
    prompts: tuple[str, ...] | None = None
    numbers: Int[np.ndarray, " N"] | None = None
    slots: int | None = None

    def __post_init__(self):
        ids = self._array("ids", 1, np.integer, "a list of whole numbers")
        if ids.min() < -(2**31) or ids.max() >= 2**31:
            raise UserError("ids holds numbers of more than 32 bits")
        object.__setattr__(self, "ids", ids.astype(np.int32))
        self._check_lens("lens", "ids")
        if self.longest > LONGEST:
            raise UserError(f"a prompt has {self.longest} token ids: at most {LONGEST}")
        if self.slots is not None:
            arguments.integer("slots", self.slots, self.longest, LONGEST)
        self._check_images()

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]], prompts: Sequence[str] | None = None) -> Self:
        """One prompt per list of ids. `UserError` for others. prompts: the texts, where known."""
        if isinstance(lists, (str, bytes)) or not hasattr(lists, "__len__") or not len(lists):
            raise arguments.wrong("prompt_ids", lists, IDS_WANTED)
        words, found = "give a list of token ids", []
        for i, one in enumerate(lists):
            found.append(arguments.integers(f"prompt_ids[{i}]", one, words, LONGEST))
            if not found[-1].size:
                raise UserError(f"prompt_ids[{i}] is empty: a prompt has at least 1 token id")
        texts = None if prompts is None else tuple(prompts)
        return cls(np.concatenate(found), np.array([len(one) for one in found]), texts)

    # --- images -----------------------------------------------------------------------------------

    def take(self, index: Sequence[int] | Int[np.ndarray, " B"]) -> dict[str, np.ndarray]:
        """Arrays of the images `index`: `ids` int32 [B, M], each prompt at the end of its row with
        zeros before it, and `length` int32 [B]."""
        chosen = self.numbers[np.asarray(index)]
        result = np.zeros((len(chosen), self.slots or self.longest), np.int32)
        for row, number in zip(result, chosen, strict=True):
            row[len(row) - self.lens[number] :] = self.of_prompt(number)
        return {"ids": result, "length": self.lens[chosen]}

    def of_prompt(self, number: int) -> Int[np.ndarray, " length"]:
        """Token ids of one prompt."""
        end = int(self.lens[: number + 1].sum(dtype=np.int64))
        return self.ids[end - self.lens[number] : end]

    @property
    def longest(self) -> int:
        """Token ids of the longest prompt."""
        return int(self.lens.max())

    def describe(self) -> dict:
        return self._described("prompt_ids")

    def _arrays(self) -> dict[str, np.ndarray]:
        return {"ids": self.ids, "lens": self.lens}

    # --- fitting a model, files -------------------------------------------------------------------

    def checked(self, config: Any, names: Sequence[str] | None = None) -> Self:
        """These prompts. config: a `LlamaConfig`. names: how messages call each of them, such as
        "line 3 of prompts.txt".

        Raises:
          UserError: ids that a model of this configuration does not know or that are no prompt of
            it; a prompt that leaves no room for the image in the model's context.
        """
        for number in range(len(self.lens)):
            with about(names[number] if names else f"prompt {number}"):
                config.check_prompt(self.of_prompt(number))
        return self

    def fitted(self, config: Any, names: Sequence[str] | None = None) -> Self:
        """These prompts in the places that a model of this configuration has. names: as in
        `checked`, which raises the same errors; `UserError` also if there are too few places."""
        self.checked(config, names)
        if self.longest > config.prompt_tokens:
            number = int(self.lens.argmax())
            name = names[number] if names else f"prompt {number}"
            raise UserError(
                f"{name} is the longest and has {self.longest} token ids, the model is prepared for"
                f" {config.prompt_tokens}: take model.with_prompt_tokens({self.longest}), or"
                f" --prompt_tokens={self.longest}"
            )
        return replace(self, slots=config.prompt_tokens)


def load(path: str | os.PathLike) -> PromptIds:
    """Reads the token ids that `save` or another program wrote.

    The file holds `ids` int [sum of lens], the ids of all prompts one after the other, and `lens`
    int [P]; if need be also `prompts` texts [P]. `UserError` if there is no such file, it is
    damaged, or its arrays do not fit each other.
    """
    arrays = read_arrays("prompt ids", path, ("ids", "lens"), ("prompts",))
    with about(f"prompt ids {path}"):
        return PromptIds(**arrays)


def encode(
    prompts: Sequence[str],
    config: Any,
    tokenizer: PromptTokenizer,
    names: Sequence[str] | None = None,
    warn: Tell = warn,
) -> PromptIds:
    """The ids of texts, in the format in which models of this configuration were trained. names:
    how messages call each text. warn: is told of texts without a word that is known."""
    for number, text in enumerate(prompts):
        if not tokenizer.knows(text):
            warn(no_known_word(names[number] if names else f"prompt {number}", text))
    return PromptIds.of([config.encode_prompt(text, tokenizer) for text in prompts], prompts)


class PromptIdKind(ConditionKind):
    """The `ConditionKind` of prompts as token ids. Exactly one of the two arguments is given."""

    name = "prompt_ids"
    arguments = ("prompts", "prompt_ids")

    def count(self, model: Model, *, prompts=None, prompt_ids=None) -> int:
        if prompts is not None:
            return len(values.texts("prompts", prompts, PROMPTS_WANTED))
        return len(self._ids(model, prompt_ids=prompt_ids))

    def resolve(self, model: Model, **given) -> PromptIds:
        """Prompts that fit the model and its places. `UserError` also without a tokenizer."""
        return self._ids(model, **given).fitted(model.config)

    def fitted(self, model: Model, **given) -> Model:
        """The model with as many places as the longest prompt takes."""
        found = self._ids(model, lambda line: None, **given)  # `resolve` will warn
        return model.with_prompt_tokens(found.checked(model.config).longest)

    def _ids(self, model, warn=warn, *, prompts=None, prompt_ids=None) -> PromptIds:
        if prompts is None:
            return prompt_ids if isinstance(prompt_ids, PromptIds) else PromptIds.of(prompt_ids)
        texts = values.texts("prompts", prompts, PROMPTS_WANTED)
        tokenizer = PromptTokenizer.of_checkpoint(model.directory, model.name)
        return encode(texts, model.config, tokenizer, warn=warn)


PROMPT_IDS = PromptIdKind()
