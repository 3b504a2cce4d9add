"""The flags that give texts: --prompt, --prompts and --prompt_set, --negative_prompt and
--negative_prompts."""

from collections.abc import Sequence

from absl.flags import FlagHolder

from experiments.prompts import sets
from experiments.prompts.sets import Kind, Prompt, PromptSet
from varjax.cli.flags import CommandFlags
from varjax.errors import UserError
from varjax.text.encoder import negative_texts


class PromptFlags:
    """--prompt, --prompts and --prompt_set."""

    def __init__(self, flags: CommandFlags):
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
            return sets.read_prompts(self._path.value, self._kind.value)
        if self._kind.present:
            raise UserError(
                f"--prompt_set={self._kind.value} says what the file of --prompts holds: leave it "
                f"out, or give --prompts=FILE"
            )
        return typed


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
