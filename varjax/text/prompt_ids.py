"""Prompts as token ids (in work)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varjax.conditions import TakesCondition


@dataclass(frozen=True, eq=False)
class PromptIds:
    """A `Condition` of token ids, one list per image."""

    ids: Sequence[np.ndarray]
    slots: int
    captions = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def numbers(self) -> np.ndarray:
        return np.arange(len(self), dtype=np.int32)

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        ids = np.zeros((len(index), self.slots), np.int32)
        for row, i in enumerate(index):
            ids[row, self.slots - len(self.ids[i]) :] = self.ids[i]
        return {"ids": ids, "length": np.array([len(self.ids[i]) for i in index], np.int32)}

    def describe(self):
        return [len(ids) for ids in self.ids]


class PromptIdsKind:
    """The `ConditionKind` of prompts."""

    name = "prompt_ids"
    arguments = ("prompts", "prompt_ids")

    def count(self, model: TakesCondition, *, prompts=None, prompt_ids=None) -> int:
        return len(prompt_ids)

    def resolve(self, model: TakesCondition, *, prompts=None, prompt_ids=None) -> PromptIds:
        for ids in prompt_ids:
            model.config.check_prompt(ids)
        return PromptIds([np.asarray(i, np.int32) for i in prompt_ids], model.config.prompt_tokens)


PROMPT_IDS = PromptIdsKind()
