"""The text of `--help`: an example that runs, the manual of the command, its essential flags, then
the others under the headings that they were defined below."""

import sys
import textwrap
from collections.abc import Callable

from absl import flags

from varjax.cli.flags import LISTED, REPEATED, CommandFlags, allowed, bare, choices, program

OWN_PACKAGES = ("experiments", "ported_weights", "varjax", "pallas_kernels")
WIDTH = 100
_TYPES = {LISTED: "LIST", REPEATED: "STRING"}  # as absl calls them


def help_text(main: Callable, values: flags.FlagValues, own: CommandFlags | None = None) -> str:
    """Return an example, the manual (docstring of the module of `main`), and the flags."""
    manual = (sys.modules[main.__module__].__doc__ or "").strip()
    example = _example(own.example) if own else []
    first = own.essential if own else []
    rank = {name: i for i, name in enumerate(first)}
    found: dict[str, list[str]] = {"": []}
    for flag in sorted(_own_flags(main, values), key=lambda f: rank.get(f.name, len(first))):
        title = own.heading_of(flag.name) if own and flag.name not in rank else ""
        found.setdefault(title, []).append(_entry(flag))
    lines = [*example, manual, "", f"Flags of `{program()}`:", *found.pop("")]
    for title, entries in found.items():
        lines += ["", f"{title}:", *entries]
    return "\n".join([*lines, "  --help, --version"])


def _example(text: str) -> list[str]:
    """Return the lines of a command's example, each no longer than the help is wide."""
    if not text:
        return []
    lines = []
    for call in text.splitlines():
        whole = call if call.startswith("python ") else f"{program()} {call}"
        words = textwrap.wrap(
            whole,
            WIDTH - 2,  # room for the backslash
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [*(f"{line} \\" for line in words[:-1]), words[-1]]
    return ["Try:", *lines, ""]


def _own_flags(main: Callable, values: flags.FlagValues) -> list[flags.Flag]:
    """Return the flags that the module of `main` or a package of this project defines."""
    own = []
    for module, defined in values.flags_by_module_dict().items():
        # absl files the program's own flags under its path or, if imported, under its name
        is_command = values is not flags.FLAGS or module in (sys.argv[0], main.__module__)
        if is_command or module.split(".")[0] in OWN_PACKAGES:
            own += [flag for flag in defined if flag not in own]
    return own


def _entry(flag: flags.Flag) -> str:
    """Return the lines of `--help` for a flag."""
    values, kind = choices(flag), flag.flag_type()
    shown = "|".join(values) or _TYPES.get(kind) or kind.upper()
    head = f"  --[no]{flag.name}" if flag.boolean else f"  --{flag.name}={shown}"
    notes = [] if values or flag.boolean or not flag.parser.syntactic_help else [allowed(flag)]
    if kind in _TYPES:
        notes = ["may be repeated" if kind == REPEATED else "separated by commas"]
    if len(head) > WIDTH:
        head, notes = f"  --{flag.name}=STRING", [allowed(flag)]
    if flag.default not in (None, "", []):
        notes.append(f"default: {flag.default_as_str.strip(chr(39))}")
    body = bare(flag) + (f" ({'; '.join(notes)})" if notes else "")
    indent = " " * 6
    return f"{head}\n{textwrap.fill(body, WIDTH, initial_indent=indent, subsequent_indent=indent)}"
