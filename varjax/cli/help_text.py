"""`--help` of a command: its manual, then its flags as they were defined."""

import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Sequence

from absl import flags

OWN_PACKAGES = ("experiments", "ported_weights", "varjax", "pallas_kernels")
HELP_FLAGS = {
    f"{dash}{name}" for dash in ("-", "--") for name in ("h", "help", "helpshort", "helpfull")
}
WIDTH = 100


def is_wanted(argv: Sequence[str]) -> bool:
    """Whether the arguments (program name first) ask for help."""
    return not HELP_FLAGS.isdisjoint(itertools.takewhile(lambda text: text != "--", argv[1:]))


def help_text(main: Callable, values: flags.FlagValues) -> str:
    """The manual (docstring of the module of `main`), then the flags."""
    manual = (sys.modules[main.__module__].__doc__ or "").strip()
    entries = [_entry(flag) for flag in _own_flags(main, values)]
    return "\n".join([manual, "", f"Flags of `{program()}`:", *entries])


def program() -> str:
    """How the user calls this command: `python -m package.module` where it was started so."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else ""
    return f"python -m {name}" if name else f"python {sys.argv[0]}"


def allowed(flag: flags.Flag) -> str:
    """Allowed values in words; empty for free text."""
    if values := choices(flag):
        return f"one of {', '.join(values)}"
    return "true or false" if flag.boolean else flag.parser.syntactic_help


def choices(flag: flags.Flag) -> Sequence[str]:
    """All values of an enumeration; none for other flags."""
    return getattr(flag.parser, "enum_values", None) or ()


def bare(flag: flags.Flag) -> str:
    """Help text without the list of values that absl puts before it."""
    return re.sub(r"^<[^>]*>: ", "", flag.help or "")


def _own_flags(main: Callable, values: flags.FlagValues) -> list:
    """Flags defined in the module of `main` or in a package of this project, each once."""
    own = []
    for module, defined in values.flags_by_module_dict().items():
        # absl files the program's own flags under its path or, if imported, under its name
        is_command = values is not flags.FLAGS or module in (sys.argv[0], main.__module__)
        if is_command or module.split(".")[0] in OWN_PACKAGES:
            own += [flag for flag in defined if flag not in own]
    return own


def _entry(flag: flags.Flag) -> str:
    values = choices(flag)
    kind = "|".join(values) or flag.parser.flag_type().upper()
    head = f"  --[no]{flag.name}" if flag.boolean else f"  --{flag.name}={kind}"
    notes = [] if values or flag.boolean or not flag.parser.syntactic_help else [allowed(flag)]
    if flag.default is not None:
        notes.append(f"default: {flag.default_as_str.strip(chr(39))}")
    body = bare(flag) + (f" ({'; '.join(notes)})" if notes else "")
    indent = " " * 6
    return f"{head}\n{textwrap.fill(body, WIDTH, initial_indent=indent, subsequent_indent=indent)}"
