"""Reading absl flags, and error messages about them in our words."""

import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence

from absl import flags

from varjax.core.errors import UserError, nearest

HELP, VERSION = ("h", "help", "helpshort", "helpfull"), ("version",)
_REQUIRED = "is required"
REPEATED, LISTED = "multi string", "comma separated list of strings"  # as absl calls them


def check_arguments(argv: Sequence[str], takes_value: Collection[str]) -> None:
    """Raise `UserError` for texts that could not be printed, written to a report or name a file.

    The same happens for a flag that would take the next flag as its value; takes_value: their
    names. The shell hands over bytes; bytes that are not UTF-8 arrive as lone surrogates.
    """
    for text, following in itertools.zip_longest(argv[1:], argv[2:], fillvalue=""):
        if "\0" in text:
            raise UserError(f"argument {text!r} holds a NUL character: leave it out")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"argument {text!r} is not UTF-8 text: write it in UTF-8") from None
        name = text.lstrip("-")
        if text.startswith("--") and name in takes_value and following.startswith("--"):
            raise UserError(
                f"--{name} has no value, {following!r:.80} follows: write --{name}=VALUE"
            )


def parse_flags(
    argv: Sequence[str],
    values: flags.FlagValues,
    written: Callable[[str], str] = "--{}".format,
    unknown: Callable[[str], str] = str,
) -> None:
    """Set the flags from `argv` (program name first). `UserError` if a flag is unknown, gone,
    malformed or missing, or there is a positional argument.

    written: how messages call a name. unknown: what they say of one that does not exist.
    """
    hint = list_hint()
    values.set_gnu_getopt(True)
    try:
        leftover = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        raise UserError(unknown(error.flagname)) from None
    except flags.IllegalFlagValueError as error:
        # absl reports all failed validators at once, each entry starting with `flag --`
        entries = re.split(r"\n(?=flags? --)", str(error))
        said = "; ".join(_reword(entry, values, written) for entry in entries)
        raise UserError(said + (hint if _REQUIRED in said else "")) from None
    except (flags.Error, ValueError) as error:
        raise UserError(f"{error}{hint}") from None
    _expand_home(values)
    empty = [name for name in values if values[name].present and values[name].value in ("", [])]
    if empty:
        raise UserError(f"{written(empty[0])}= is empty: give a value, or leave the flag out")
    if leftover:
        given = " ".join(leftover)
        raise UserError(
            f"unexpected argument {given!r}: this command takes only --flag=value{hint}"
        )


def list_hint() -> str:
    return f"; run `{program()} --help` for the list of flags"


def _expand_home(values: flags.FlagValues) -> None:
    """Put the home folder for `~` where texts begin with it, and behind the name of an argument, as
    in --policy_args=path=~/order.npz: shells do so at the beginning of a word only. Prompts, which
    may be repeated, stay as they are."""
    home = os.path.expanduser("~")
    for flag in (values[name] for name in values):
        if flag.present and flag.flag_type() in ("string", LISTED):
            texts = [flag.value] if isinstance(flag.value, str) else flag.value
            found = [re.sub(r"^((?:\w+=)?)~(?=/|$)", lambda m: m[1] + home, text) for text in texts]
            flag.value = found[0] if isinstance(flag.value, str) else found


def _reword(entry: str, values: flags.FlagValues, written: Callable[[str], str]) -> str:
    """Put absl's `flag --name=value: reason` in our words: what was given, what is allowed."""
    match = re.fullmatch(r"flag --([\w-]+)=(.*?): (.*)", entry, re.DOTALL)
    if not match:
        return entry
    name, given, reason = match.groups()
    flag = values[name]
    if flag.value is None and reason.endswith("must have a value other than None."):
        return f"{written(name)} {_REQUIRED} ({bare(flag).rstrip('.')})"
    parsed = flag.present and str(flag.value) == given  # then a validator refused it and says why
    if parsed or not allowed(flag):
        return f"{written(name)}={given} is not valid: {reason}"
    return not_valid(flag, given, written(name))


def not_valid(flag: flags.Flag, given: str, written: str) -> str:
    close = nearest(given, choices(flag))
    return f"{written}={given} is not valid: it must be {allowed(flag)}{close}"


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
    return getattr(flag.parser, "enum_values", None) or ()


def bare(flag: flags.Flag) -> str:
    """Return the help text without absl's additions: the list of values, how to repeat it."""
    return re.sub(r"^<[^>]*>: |;\s*repeat this option[\s\S]*", "", flag.help or "")
