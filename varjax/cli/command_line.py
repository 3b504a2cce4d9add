"""What every command shares: flags with clear errors, help, exit statuses, progress lines.

A command is a module whose docstring is its manual. It has flags of its own, so that commands may
be imported together, and ends with the call:

    FLAGS = command_line.CommandFlags()
    SEED = FLAGS.integer("seed", 0, "What the random numbers start from.")

    if __name__ == "__main__":
        command_line.run(main)

where `main(argv)` returns None or an exit status. Statuses: 0 done, 1 a bug (traceback), 2 wrong
input or a file that cannot be read or written (one message, no traceback), 130 interrupted.
"""

import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TextIO

from absl import flags
from absl.testing import flagsaver

from varjax.engine import compilation_cache
from varjax.errors import UserError, nearest

OWN_PACKAGES = ("experiments", "ported_weights", "varjax", "pallas_kernels")
HELP_FLAGS = {
    f"{dash}{name}" for dash in ("-", "--") for name in ("h", "help", "helpshort", "helpfull")
}
WIDTH = 100


class CommandFlags:
    """The absl flags of one command. Each method defines a flag and returns its holder
    (`holder.value`)."""

    def __init__(self):
        self.values = flags.FlagValues()
        self.string = partial(flags.DEFINE_string, flag_values=self.values)
        self.integer = partial(flags.DEFINE_integer, flag_values=self.values)
        self.floating = partial(flags.DEFINE_float, flag_values=self.values)
        self.boolean = partial(flags.DEFINE_boolean, flag_values=self.values)
        self.enum = partial(flags.DEFINE_enum, flag_values=self.values)
        self.list = partial(flags.DEFINE_list, flag_values=self.values)
        self.require = partial(flags.mark_flag_as_required, flag_values=self.values)

    def compilation_cache(self) -> None:
        """Add --compilation_cache, for commands that compile programs; `run` obeys it."""
        self.string(
            compilation_cache.FLAG,
            None,
            "Folder that keeps compiled programs for the next start, or off; default: "
            "JAX_COMPILATION_CACHE_DIR, else varjax/programs in the user's cache folder.",
        )


def run(main: Callable, argv: Sequence[str] | None = None) -> NoReturn:
    """Parse `argv` (default: the process's), call `main([program])` and exit with its status.

    The flags are those of `FLAGS` in the module of `main` (`CommandFlags`), or absl's global ones.
    Their values are restored on the way out, so a test may run several commands in one process.
    """
    argv = list(sys.argv if argv is None else argv)
    found = getattr(sys.modules[main.__module__], "FLAGS", None)
    values = found.values if isinstance(found, CommandFlags) else flags.FLAGS
    saved = flagsaver.save_flag_values(values)
    try:
        status = _guarded(main, argv, values)
    finally:
        flagsaver.restore_flag_values(saved, values)
    sys.exit(status)


def _guarded(main: Callable, argv: list[str], values: flags.FlagValues) -> int:
    """Exit status of one run; expected failures become a message on standard error."""
    try:
        if _asks_for_help(argv):
            print(_help_text(main, values))
            return 0
        parse_flags(argv, values)
        if compilation_cache.FLAG in values:
            compilation_cache.use(values[compilation_cache.FLAG].value)
        status = main(argv[:1])
        sys.stdout.flush()
        return status or 0
    except UserError as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:  # the reader of our output went away, as in `... | head`
        sys.stdout = None  # nothing is left to flush at exit
        return 1
    except OSError as error:
        return _complain(_describe_os_error(error), 2)


def _complain(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status


def _describe_os_error(error: OSError) -> str:
    """One line for a failed read or write, with the reason and the file where known."""
    reason = error.strerror or str(error) or type(error).__name__
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    return f"{reason}: {' -> '.join(paths)}" if paths else reason


# --- flags ---


def parse_flags(argv: Sequence[str], values: flags.FlagValues) -> None:
    """Set the flags from `argv` (program name first).

    Raises:
      UserError: unknown flag, malformed value, missing required flag or positional argument.
    """
    hint = f"; run `{_program()} --help` for the list of flags"
    values.set_gnu_getopt(True)
    try:
        leftover = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        names = [f"--{name}" for name in values]
        given = f"--{error.flagname}"
        raise UserError(f"unknown flag {given}{nearest(given, names)}{hint}") from None
    except flags.IllegalFlagValueError as error:
        raise UserError("\n".join(_reword(line, values) for line in _entries(str(error)))) from None
    except (flags.Error, ValueError) as error:
        raise UserError(f"{error}{hint}") from None
    empty = [name for name in values if values[name].present and values[name].value in ("", [])]
    if empty:
        raise UserError(f"--{empty[0]}= is empty: give a value, or leave the flag out")
    if leftover:
        given = " ".join(leftover)
        raise UserError(
            f"unexpected argument {given!r}: this command takes only --flag=value{hint}"
        )


def _entries(message: str) -> list[str]:
    """absl reports all failed validators at once, each entry starting with `flag --`."""
    return re.split(r"\n(?=flags? --)", message)


def _reword(entry: str, values: flags.FlagValues) -> str:
    """absl's `flag --name=value: reason` in our words: what was given, what is allowed."""
    match = re.fullmatch(r"flag --([\w-]+)=(.*?): (.*)", entry, re.DOTALL)
    if not match:
        return entry
    name, given, reason = match.groups()
    flag = values[name]
    if flag.value is None and reason.endswith("must have a value other than None."):
        return f"--{name} is required: {_bare_help(flag)}"
    parsed = flag.present and str(flag.value) == given  # then a validator refused it and says why
    if parsed or not _allowed(flag):
        return f"--{name}={given} is not valid: {reason}"
    names = getattr(flag.parser, "enum_values", None) or ()
    return f"--{name}={given} is not valid: it must be {_allowed(flag)}{nearest(given, names)}"


def _allowed(flag) -> str:
    """Allowed values in words; empty for free text."""
    values = getattr(flag.parser, "enum_values", None)
    if values:
        return f"one of {', '.join(values)}"
    if flag.boolean:
        return "true or false"
    return flag.parser.syntactic_help


# --- help ---


def _asks_for_help(argv: Sequence[str]) -> bool:
    arguments = list(argv[1:])
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    return any(argument in HELP_FLAGS for argument in arguments)


def _help_text(main: Callable, values: flags.FlagValues) -> str:
    """The manual (docstring of the module of `main`), then its flags as they were defined."""
    manual = (sys.modules[main.__module__].__doc__ or "").strip()
    entries = [_flag_help(flag) for flag in _own_flags(main, values)]
    return "\n".join([manual, "", f"Flags of `{_program()}`:", *entries])


def _own_flags(main: Callable, values: flags.FlagValues) -> list:
    """Flags defined in the module of `main` or in a package of this project, each once."""
    own = []
    for module, defined in values.flags_by_module_dict().items():
        # absl files the program's own flags under its path or, if imported, under its name
        is_command = values is not flags.FLAGS or module in (sys.argv[0], main.__module__)
        if is_command or module.split(".")[0] in OWN_PACKAGES:
            own += [flag for flag in defined if flag not in own]
    return own


def _flag_help(flag) -> str:
    values = getattr(flag.parser, "enum_values", None)
    if flag.boolean:
        head = f"  --[no]{flag.name}"
    else:
        head = f"  --{flag.name}={'|'.join(values) if values else flag.parser.flag_type().upper()}"
    notes = [] if values or flag.boolean or not flag.parser.syntactic_help else [_allowed(flag)]
    if flag.default is not None:
        notes.append(f"default: {flag.default_as_str.strip(chr(39))}")
    body = _bare_help(flag) + (f" ({'; '.join(notes)})" if notes else "")
    return (
        head + "\n" + textwrap.fill(body, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    )


def _bare_help(flag) -> str:
    """Help text without the list of values that absl puts before it."""
    return re.sub(r"^<[^>]*>: ", "", flag.help or "")


def _program() -> str:
    """How the user calls this command: `python -m package.module` where it was started so."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else ""
    return f"python -m {name}" if name else f"python {sys.argv[0]}"


# --- key=value lists ---


def typed_pairs(text: str) -> dict[str, str]:
    """Read `"window=16,path=a,b.npz"` into `{"window": "16", "path": "a,b.npz"}`.

    Only a comma that is followed by `key=` separates, so values may hold commas and "=". Values
    stay text: whoever knows the type of a key converts it.

    Raises:
      UserError: an entry without `key=value`, an empty value, or a key given twice.
    """
    pairs = {}
    for entry in re.split(r",(?=\s*\w+\s*=)", text) if text.strip() else []:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not (key.isidentifier() and equals and value) or value.endswith(","):
            raise UserError(f"cannot read {entry.strip()!r} of {text!r}: write key=value,key=value")
        if key in pairs:
            raise UserError(f"{key} is given twice in {text!r}: keep one of them")
        pairs[key] = value
    return pairs


# --- progress ---


class Progress:
    """Plain lines `what 3/8  12.3 s, about 20 s left` on standard error.

    Args:
      what: what is counted, for example "images".
      total: how many there will be.
      first: how many of them were there before (a resumed run).
      quiet: print nothing.
      every: seconds that must pass between two lines; the last line is always printed.
      stream: where to print, standard error by default.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        first: int = 0,
        quiet: bool = False,
        every: float = 0.0,
        stream: TextIO | None = None,
    ):
        self.what, self.total, self.quiet, self.every = what, total, quiet, every
        self.stream = sys.stderr if stream is None else stream
        self.start = time.monotonic()
        self.printed = -float("inf")
        self.pace_from = (0.0, first)  # seconds and count that the pace is measured from

    def update(self, done: int, note: str = "") -> None:
        """Report that `done` of `total` are ready."""
        elapsed = time.monotonic() - self.start
        since, before = self.pace_from
        if done > before and not since:  # the first ones took compilation too: not the usual pace
            self.pace_from = (elapsed, done)
        if self.quiet or (done < self.total and elapsed - self.printed < self.every):
            return
        self.printed = elapsed
        line = f"{self.what} {done}/{self.total}  {elapsed:.1f} s"
        if before < done < self.total:
            rest = (elapsed - since) / (done - before) * (self.total - done)
            line += f", about {rest:.0f} s left"
        self.note(f"{line}  {note}" if note else line)

    def note(self, message: str) -> None:
        """Print one line outside the count, for example that a compilation started."""
        if not self.quiet:
            print(message, file=self.stream, flush=True)
