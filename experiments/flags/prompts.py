"""The flags that give texts: --prompt, --prompts, --prompt_set and --images_per_prompt,
--negative_prompt and --negative_prompts."""

import contextlib
import os
from collections.abc import Sequence

from absl.flags import FlagHolder

from experiments.prompts import sets
from experiments.prompts.layouts import check_layout
from experiments.prompts.sets import Kind, Prompt, PromptSet
from varjax.cli.flags import CommandFlags
from varjax.errors import MissingExtra, UserError
from varjax.text.encoder import negative_texts


class PromptFlags:
    """--prompt, --prompts and --prompt_set.

    literal: what --prompts names may also be the text itself, if there is no such file.
    """

    def __init__(self, flags: CommandFlags, *, literal: bool = False):
        self._literal = literal
        self._texts = flags.texts("prompt", None, "A prompt, as it is written here.")
        self._path = flags.string(
            "prompts", None, "Prompts: a file with one per line, or a published set."
        )
        self._kind = flags.enum(
            "prompt_set", sets.AUTO, sets.KINDS, "What --prompts holds; auto: look."
        )
        self.holders = (self._texts, self._path, self._kind)

    def read(self) -> PromptSet | None:
        """Return the prompts; None if none are given. Raises the errors of `sets.read_prompts`."""
        typed = _typed(self._texts, self._path)
        if typed is None and self._path.value:
            if self._literal and not os.path.exists(self._path.value):
                return plain([" ".join(self._path.value.split())], ["--prompts"])
            return sets.read_prompts(self._path.value, self._kind.value)
        if self._kind.present:
            raise UserError(
                f"--prompt_set={self._kind.value} says what the file of --prompts holds: leave it "
                f"out, or give --prompts=FILE"
            )
        return typed


class ImagePromptFlags(PromptFlags):
    """--prompt, --prompts and --prompt_set of a command that draws images; --images_per_prompt
    unless `samples` says that it takes a few examples only."""

    def __init__(self, flags: CommandFlags, *, samples: bool, literal: bool = False):
        super().__init__(flags, literal=literal)
        self._each = None
        if not samples:
            self._each = flags.integer(
                "images_per_prompt",
                None,
                "Images of every prompt; default: as the prompt set's scorer expects, else 1.",
                lower_bound=1,
            )
            self.holders += (self._each,)

    def each(self, prompts: PromptSet, height: int, width: int) -> int:
        """Return how many images every prompt has. `UserError` if the prompt set's scorer cannot
        read so many of this size. Without pillow no files are written."""
        if self._each is None:
            return 1
        each = self._each.value or prompts.images_per_prompt
        with contextlib.suppress(MissingExtra):
            check_layout(prompts, each, height, width)
        return each

    def read_beside(
        self, holder: FlagHolder[str], texts: Sequence[str] | None, count: int
    ) -> PromptSet:
        """Return the prompts that a file of `count` prepared texts was made of: as they are given,
        else as the file has them (`texts`). holder: the flag that names the file.

        Raises:
          UserError: the given prompts are others, or not as many.
        """
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


class NegativeFlags:
    """--negative_prompt and --negative_prompts."""

    def __init__(self, flags: CommandFlags):
        self._texts = flags.texts("negative_prompt", None, "A text to lead away from.")
        self._path = flags.string(
            "negative_prompts", None, "File with one such text per prompt, or one for all."
        )
        self.holders = (self._texts, self._path)

    def read(self, prompts: PromptSet) -> PromptSet | None:
        """Return one text for each prompt or one for all; None if none are given. Raises the errors
        of `sets.read_prompts` and `negative_texts`."""
        found = _typed(self._texts, self._path)
        if found is None and self._path.value:
            found = sets.read_prompts(self._path.value, Kind.LINES)
        if found is not None:
            negative_texts(found.texts, len(prompts), found.names)
        return found


def plain(texts: Sequence[str], names: Sequence[str]) -> PromptSet:
    """Return texts that come from no file as a prompt set. names: how messages call them."""
    given = enumerate(zip(texts, names, strict=True))
    prompts = (Prompt(text, f"{i:05d}", name) for i, (text, name) in given)
    return PromptSet(tuple(prompts), Kind.LINES, 1)


def _typed(texts: FlagHolder[list[str]], path: FlagHolder[str]) -> PromptSet | None:
    """Read the texts of a repeatable flag, each like a line of a file; None without any."""
    if texts.value and path.value:
        raise UserError(
            f"--{texts.name} and --{path.name} exclude each other: write all texts into the file, "
            f"or repeat --{texts.name}"
        )
    if not texts.value:
        return None
    lines = [" ".join(text.splitlines()).strip() for text in texts.value]
    number = "" if len(lines) == 1 else " number {}"
    return plain(lines, [f"--{texts.name}{number.format(i)}" for i in range(1, len(lines) + 1)])
