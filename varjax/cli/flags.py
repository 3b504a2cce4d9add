"""The flags of one command, and error messages about them in our words."""

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial

from absl import flags

from varjax import errors
from varjax.engine import compilation_cache
from varjax.errors import UserError, nearest

COMPILATION_CACHE = "compilation_cache"
HELP, VERSION = ("h", "help", "helpshort", "helpfull"), ("version",)
_REQUIRED = "is required"
REPEATED, LISTED = "multi string", "comma separated list of strings"


class CommandFlags:
    """The absl flags of one command. Most methods define a flag and return its holder, whose
    `value` is read later.

    example: for the help, arguments of a call that runs; lines before it may be whole commands,
      which make what it reads.
    essential: names of the flags that most people need, which the help shows first.
    """

    def __init__(self, example: str = "", essential: str = ""):
        self.values = flags.FlagValues()
        self.example, self.essential = example, essential.split()
        self._headings: list[tuple[str, set[str]]] = []
        self.string = partial(flags.DEFINE_string, flag_values=self.values)
        self.integer = partial(flags.DEFINE_integer, flag_values=self.values)
        self.floating = partial(flags.DEFINE_float, flag_values=self.values)
        self.boolean = partial(flags.DEFINE_boolean, flag_values=self.values)
        self.enum = partial(flags.DEFINE_enum, flag_values=self.values)
        self.list = partial(flags.DEFINE_list, flag_values=self.values)
        self.texts = partial(flags.DEFINE_multi_string, flag_values=self.values)  # repeated
        self.require = partial(flags.mark_flag_as_required, flag_values=self.values)
        self._first: dict[str, Callable[[str], object]] = {}
        self.argument_name: str | None = None

    def argument(self, name: str, help: str) -> flags.FlagHolder[str]:
        """Define a required text that is given without the name of its flag, or with it."""
        self.argument_name = name
        return self.string(name, None, help, required=True)

    def named(self, argv: Sequence[str]) -> list[str]:
        """Return the arguments (program name first), with the name of the one without."""
        name = self.argument_name
        bare = [i for i, text in enumerate(argv) if i and not text.startswith("-")]
        if name is None or len(bare) != 1 or argv[bare[0] - 1] == f"--{name}":
            return list(argv)
        return [f"--{name}={text}" if i == bare[0] else text for i, text in enumerate(argv)]

    def heading(self, title: str) -> None:
        """Put the flags that follow below a heading of the help."""
        self._headings.append((title, set(self.values)))

    def heading_of(self, name: str) -> str:
        """The heading that a flag was defined below; empty without one."""
        before = [title for title, known in self._headings if name not in known]
        return before[-1] if before else ""

    def choice(self, name: str, default: str, values: Collection[str], help: str):
        """Define an enumeration. More values may be added until the flags are read."""
        parser = flags.EnumParser(values)
        parser.enum_values = values  # the collection itself: absl has made a copy
        flag = flags.Flag(parser, flags.ArgumentSerializer(), name, default, help)
        return flags.DEFINE_flag(flag, flag_values=self.values)

    def define(self, parser: flags.ArgumentParser, name: str, default: object, help: str):
        """Define a flag with a parser of one's own."""
        flag = flags.Flag(parser, flags.ArgumentSerializer(), name, default, help)
        return flags.DEFINE_flag(flag, flag_values=self.values)

    def first(self, name: str, help: str, use: Callable[[str], object]) -> None:
        """Define a text that `use` gets before any other flag is read.

        It may decide which values other flags take.
        """
        self.string(name, None, help)
        self._first[name] = use

    def compilation_cache(self) -> None:
        """Add --compilation_cache, for commands that compile programs; `run` obeys it."""
        self.string(
            COMPILATION_CACHE,
            None,
            "Folder that keeps compiled programs for the next start, or off; default: "
            "JAX_COMPILATION_CACHE_DIR, else varjax/programs in the user's cache folder. Its "
            "subfolder varjax, which older versions wrote, is not read and may be deleted.",
        )

    def use_first(self, argv: Sequence[str]) -> None:
        """Obey the flags that `first` has defined."""
        for name, use in self._first.items():
            alone = flags.FlagValues()
            holder = flags.DEFINE_string(name, None, "", flag_values=alone)
            alone.set_gnu_getopt(True)
            with contextlib.suppress(flags.Error):  # a missing value: reading all flags says so
                alone(list(argv), known_only=True)
                if holder.value:
                    use(_expanded(holder.value))

    def use_compilation_cache(self) -> None:
        """Obey --compilation_cache, if the command has it."""
        if COMPILATION_CACHE in self.values:
            with about(self.values[COMPILATION_CACHE]):
                compilation_cache.use(self.values[COMPILATION_CACHE].value)


def about(holder: flags.FlagHolder | flags.Flag) -> AbstractContextManager[None]:
    """Put the flag and its value before the message of a `UserError` inside (`errors.about`)."""
    return errors.about(f"--{holder.name}={holder.value}")


def check_arguments(argv: Sequence[str], values: flags.FlagValues) -> None:
    """Raise `UserError` for texts that could not be printed, written to a report or name a file.

    The same happens for a flag that would take the next flag as its value. The shell hands over
    bytes; bytes that are not UTF-8 arrive as lone surrogates.
    """
    for text, following in itertools.zip_longest(argv[1:], argv[2:], fillvalue=""):
        if "\0" in text:
            raise UserError(f"argument {text!r} holds a NUL character: leave it out")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"argument {text!r} is not UTF-8 text: write it in UTF-8") from None
        name = text.lstrip("-")
        takes_value = text.startswith("--") and name in values and not values[name].boolean
        if takes_value and following.startswith("--"):
            raise UserError(
                f"--{name} has no value, {following!r:.80} follows: write --{name}=VALUE"
            )


def parse_flags(argv: Sequence[str], values: flags.FlagValues) -> None:
    """Set the flags from `argv` (program name first).

    Raises:
      UserError: a flag is unknown, malformed or missing, or there is a positional argument.
    """
    hint = f"; run `{program()} --help` for the list of flags"
    values.set_gnu_getopt(True)
    try:
        leftover = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        names = [f"--{name}" for name in values]
        given = f"--{error.flagname}"
        raise UserError(f"unknown flag {given}{nearest(given, names)}{hint}") from None
    except flags.IllegalFlagValueError as error:
        # absl reports all failed validators at once, each entry starting with `flag --`
        entries = re.split(r"\n(?=flags? --)", str(error))
        said = "; ".join(_reword(entry, values) for entry in entries)
        raise UserError(said + (hint if _REQUIRED in said else "")) from None
    except (flags.Error, ValueError) as error:
        raise UserError(f"{error}{hint}") from None
    _expand_home(values)
    empty = [name for name in values if values[name].present and values[name].value in ("", [])]
    if empty:
        raise UserError(f"--{empty[0]}= is empty: give a value, or leave the flag out")
    if leftover:
        given = " ".join(leftover)
        raise UserError(
            f"unexpected argument {given!r}: this command takes only --flag=value{hint}"
        )


def _expanded(text: str) -> str:
    found = re.match(r"(\w+=)?~(?=/|$)", text)
    return f"{found[1] or ''}{os.path.expanduser('~')}{text[found.end() :]}" if found else text


def _expand_home(values: flags.FlagValues) -> None:
    """Put the home folder for `~` where texts begin with it, and behind the name of an argument, as
    in --policy_args=path=~/order.npz: shells do so at the beginning of a word only. Prompts, which
    may be repeated, stay as they are."""
    for flag in (values[name] for name in values):
        if flag.present and flag.flag_type() == "string" and isinstance(flag.value, str):
            flag.value = _expanded(flag.value)
        elif flag.present and flag.flag_type() == LISTED:
            flag.value = [_expanded(text) for text in flag.value]


def _reword(entry: str, values: flags.FlagValues) -> str:
    """Put absl's `flag --name=value: reason` in our words: what was given, what is allowed."""
    match = re.fullmatch(r"flag --([\w-]+)=(.*?): (.*)", entry, re.DOTALL)
    if not match:
        return entry
    name, given, reason = match.groups()
    flag = values[name]
    if flag.value is None and reason.endswith("must have a value other than None."):
        return f"--{name} {_REQUIRED} ({bare(flag).rstrip('.')})"
    wanted = allowed(flag)
    parsed = flag.present and str(flag.value) == given  # then a validator refused it and says why
    if parsed or not wanted:
        return f"--{name}={given} is not valid: {reason}"
    close = nearest(given, choices(flag))
    return f"--{name}={given} is not valid: it must be {wanted}{close}"


def is_asked_for(names: Collection[str], argv: Sequence[str]) -> bool:
    """Whether the arguments (program name first) hold a flag of these names, such as `HELP`."""
    wanted = {dashes + name for dashes in ("-", "--") for name in names}
    return not wanted.isdisjoint(itertools.takewhile(lambda text: text != "--", argv[1:]))


def program() -> str:
    """Return how the user calls this command: `python -m package.module`, or a file."""
    if sys.argv[0].startswith("varjax "):  # the console script's sub-command
        return sys.argv[0]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else ""
    return f"python -m {name}" if name else f"python {sys.argv[0]}"


def allowed(flag: flags.Flag) -> str:
    """Describe the allowed values in words; the text is empty if any text is allowed."""
    if values := choices(flag):
        return f"one of {', '.join(values)}"
    return "true or false" if flag.boolean else flag.parser.syntactic_help


def choices(flag: flags.Flag) -> Sequence[str]:
    """Return all values of an enumeration, and none for other flags."""
    return getattr(flag.parser, "enum_values", None) or ()


def bare(flag: flags.Flag) -> str:
    """Return the help text without absl's additions: the list of values, how to repeat it."""
    return re.sub(r"^<[^>]*>: |;\s*repeat this option[\s\S]*", "", flag.help or "")
