"""The flags that give texts: --prompts and --negative_prompts."""

import os
import re
from collections.abc import Sequence

from absl.flags import FlagHolder

from experiments.cli.flags import CommandFlags
from experiments.prompts import sets
from experiments.prompts.sets import Prompt, PromptFormat, PromptSet
from varjax.core.errors import UserError
from varjax.text.encoder import negative_texts

_OF_KIND = re.compile(rf"({'|'.join(kind.value for kind in PromptFormat)}):(?=.)")
_PATH = re.compile(r"\S*(/\S*|\.[A-Za-z]\w*)")  # no text of several words


class PromptFlags:
    """--prompts and --negative_prompts."""

    def __init__(self, flags: CommandFlags):
        self._prompts = flags.texts(
            "prompts",
            None,
            "Prompts: texts, or one file with a prompt per line, or a published set (KIND:FILE for "
            f"another kind than it looks like: {', '.join(kind.value for kind in PromptFormat)}).",
        )
        self._negative = flags.texts(
            "negative_prompts", None, "Texts, or a file, that guidance leads away from: one or all."
        )
        self.positive = (self._prompts,)
        self.holders = (self._prompts, self._negative)

    def read(self) -> PromptSet | None:
        """Return the prompts; None if none are given. Raises the errors of `sets.read_prompts`."""
        return _read(self._prompts)

    def read_negative(self, prompts: PromptSet) -> PromptSet | None:
        """Return one text for each prompt or one for all; None if none are given. Raises the errors
        of `sets.read_prompts` and `negative_texts`."""
        found = _read(self._negative, PromptFormat.LINES)
        if found is not None:
            negative_texts(found.texts, len(prompts), found.names)
        return found

    def read_beside(
        self, holder: FlagHolder[str], texts: Sequence[str] | None, count: int
    ) -> PromptSet:
        """Return the prompts that a file of `count` prepared texts was made of: as they are given,
        else as the file has them (`texts`). holder: the flag that names the file. `UserError` if
        the given prompts are others, or not as many."""
        found = self.read()
        if found is None:
            names = [f"{holder.value}, text {i}" for i in range(count)]
            return plain(texts or [f"text {i}" for i in range(count)], names)
        if count != len(found):
            raise UserError(
                f"--{holder.name} holds {count} texts, there are {len(found)} prompts: encode these"
                f" prompts"
            )
        for prompt, text in zip(found.prompts, texts or (), strict=False):
            if prompt.text.strip() != text:
                raise UserError(
                    f"--{holder.name} was made of {text!r:.60}, but {prompt.where} is "
                    f"{prompt.text!r:.60}: encode these prompts"
                )
        return found


def plain(texts: Sequence[str], names: Sequence[str]) -> PromptSet:
    """Return texts that come from no file as a prompt set. names: how messages call them."""
    given = enumerate(zip(texts, names, strict=True))
    prompts = (Prompt(text, f"{i:05d}", name) for i, (text, name) in given)
    return PromptSet(tuple(prompts), PromptFormat.LINES, 1)


def _read(holder: FlagHolder[list[str]], kind: str = sets.AUTO) -> PromptSet | None:
    """Read a flag whose value is one file, or texts, each like a line of a file; None without."""
    texts = holder.value
    if not texts:
        return None
    for text in texts:
        path = os.path.expanduser(text)
        found = _OF_KIND.match(text) if kind == sets.AUTO else None
        if found or _PATH.fullmatch(text) or text.strip() and os.path.exists(path):
            if len(texts) > 1:
                raise UserError(
                    f"--{holder.name}={text} is a file, and the flag is given {len(texts)} times: "
                    "give one file, or texts of several words"
                )
            if found:
                return sets.read_prompts(os.path.expanduser(text[found.end() :]), found[1])
            return sets.read_prompts(path, kind)
    lines = [" ".join(text.splitlines()).strip() for text in texts]
    number = "" if len(lines) == 1 else " number {}"
    return plain(lines, [f"--{holder.name}{number.format(i)}" for i in range(1, len(lines) + 1)])
