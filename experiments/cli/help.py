"""The texts of `--version` and `--help`: an example that runs, the manual of the command, its
essential flags, then the others under the headings that they were defined below."""

import importlib.metadata
import importlib.util
import platform
import sys
import textwrap
from collections.abc import Callable

import jax
from absl import flags

import varjax
from experiments.cli.flags import CommandFlags, Group
from experiments.cli.reading import LISTED, REPEATED, allowed, bare, choices, program

WIDTH = 100
PACKAGES = ("jax", "jaxlib", "flax", "numpy")
KEPT = """Compiled programs are kept for the next start in JAX_COMPILATION_CACHE_DIR, else in
varjax/programs of the user's cache folder; JAX_ENABLE_COMPILATION_CACHE=false keeps none."""
_TYPES = {LISTED: "LIST", REPEATED: "STRING"}  # as absl calls them


def help_text(main: Callable, own: CommandFlags) -> str:
    """Return an example, the manual (docstring of the module of `main`), and the flags."""
    manual = (sys.modules[main.__module__].__doc__ or "").strip()
    rank = {name: i for i, name in enumerate(own.essential)}
    found: dict[str, list[str]] = {"": []}
    for name in sorted(own.values, key=lambda name: rank.get(name, len(rank))):
        before = [title for title, known in own.headings if name not in {*known, *rank}]
        title = before[-1] if before else ""
        group = own.groups.get(name)
        entry = _entry(own.values[name]) if group is None else _group(own.values[name], group)
        found.setdefault(title, []).append(entry)
    lines = [*_example(own.example), manual, "", f"Flags of `{program()}`:", *found.pop("")]
    for title, entries in found.items():
        lines += ["", f"{title}:", *entries]
    kept = ["", KEPT] if own.compiles else []
    return "\n".join([*lines, "  --help, --version", *kept])


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


def _entry(flag: flags.Flag) -> str:
    """Return the lines of `--help` for a flag."""
    head = f"  --[no]{flag.name}" if flag.boolean else f"  --{flag.name}={_kind(flag)}"
    if len(head) > WIDTH:
        head = f"  --{flag.name}=STRING"
    return f"{head}\n{_filled(_words(flag))}"


def _group(flag: flags.Flag, group: Group) -> str:
    """Return the lines of a flag that takes several settings, and of these. Those that may be given
    as flags, too, are written as such."""
    lines = [f"  --{flag.name}=KEY=VALUE,...", _filled(bare(flag))]
    for name in group.values:
        setting = group.values[name]
        kind = "true|false" if setting.boolean else _kind(setting)
        alone = name in group.alone.values()
        head = group.written(name) if alone else name
        lines.append(_filled(f"{head}={kind}: {_words(setting)}"))
    return "\n".join(lines)


def _kind(flag: flags.Flag) -> str:
    kind = flag.flag_type()
    return "|".join(choices(flag)) or _TYPES.get(kind) or kind.upper()


def _words(flag: flags.Flag) -> str:
    """Return what a flag is, with its values where its head does not name them, and its default."""
    values, kind = choices(flag), flag.flag_type()
    notes = [] if values or flag.boolean or not flag.parser.syntactic_help else [allowed(flag)]
    if kind in _TYPES:
        notes = ["may be repeated" if kind == REPEATED else "separated by commas"]
    if len(f"  --{flag.name}={_kind(flag)}") > WIDTH:
        notes = [allowed(flag)]
    if flag.default not in (None, "", []):
        notes.append(f"default: {flag.default_as_str.strip(chr(39))}")
    return bare(flag) + (f" ({'; '.join(notes)})" if notes else "")


def _filled(text: str) -> str:
    space = " " * 6
    return textwrap.fill(text, WIDTH, initial_indent=space, subsequent_indent=space)


def version_text() -> str:
    """Return versions of everything that results may depend on, one a line, and the device. A GPU
    or TPU is not asked: starting it takes seconds and most memory."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    there = plugins or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    told = jax.config.jax_platforms
    device = "cpu" if told == "cpu" or not there else f"not started ({told or 'GPU or TPU'})"
    found = {"varjax": varjax.__version__}
    found |= {name: importlib.metadata.version(name) for name in PACKAGES}
    found |= {"Python": platform.python_version(), "device": device}
    width = max(map(len, found))
    return "\n".join(f"{name.ljust(width)}  {version}" for name, version in found.items())
