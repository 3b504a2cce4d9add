"""Commands of varjax. `python -m experiments.NAME --help` is the manual of each, and
`varjax NAME --help` the same where the package is installed; all take --version."""

import ast
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SHORT = {"ported_weights": "port"}


def commands() -> dict[str, str]:
    """Return {module that `python -m` takes: first paragraph of its manual}, without imports."""
    here = ROOT / "experiments"
    places = sorted([*here.glob("*.py"), *here.glob("*/__main__.py")])
    found = {}
    for path in (*places, ROOT / "ported_weights" / "__main__.py"):
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__).resolve() and "command_line.run(main)" in text:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            manual = ast.get_docstring(ast.parse(text)) or ""
            found[name.removesuffix(".__main__")] = " ".join(manual.split("\n\n")[0].split())
    return found


def short_names() -> dict[str, str]:
    """Return {sub-command of `varjax`: module}. ported_weights is `port`."""
    return {SHORT.get(name, name.rpartition(".")[2]): name for name in commands()}


def console() -> int:
    """Run a sub-command of the console script `varjax`."""
    name, known = (sys.argv[1:2] or ["--help"])[0], short_names()
    if name not in known:
        return _answer(name, "varjax", {short: short for short in known})
    module = imported(known[name])
    from experiments.cli import command_line  # importing it imports JAX

    sys.argv = [f"varjax {name}", *sys.argv[2:]]
    command_line.run(module.main)


def imported(name: str) -> ModuleType:
    """Return the module of a command with its `main`."""
    module = importlib.import_module(name)
    is_package = hasattr(module, "__path__")
    return importlib.import_module(f"{name}.__main__") if is_package else module


def main(argv: Sequence[str]) -> int:
    """Print the overview or the version. A command after a space is an error with a hint."""
    name = argv[1] if len(argv) > 1 else "--help"
    return _answer(name, "python -m", {n.rpartition(".")[2]: n for n in commands()})


def _answer(name: str, caller: str, known: Mapping[str, str]) -> int:
    """Answer what names no command. known: {short name: name after `caller`}."""
    if name in ("-h", "--help"):
        width, said = max(map(len, known.values())), commands()
        modules = short_names() if caller == "varjax" else {n: n for n in said}
        lines = (f"  {caller} {n.ljust(width)}  {said[module]}" for n, module in modules.items())
        _show("\n".join([" ".join((__doc__ or "").split()), "", *lines]))
        return 0
    if name == "--version":
        from experiments.cli.help import version_text  # importing it imports JAX

        _show(version_text())
        return 0
    close = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
    advice = f"did you mean `{caller} {known[close[0]]}`? " if close else ""
    listed = "varjax --help" if caller == "varjax" else "python -m experiments"
    line = f"error: unexpected argument {name!r}: {advice}`{listed}` lists the commands"
    print(line, file=sys.stderr)
    return 2


def _show(text: str) -> None:
    """Print a text whose reader may go away."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the rest, which is flushed at the end


if __name__ == "__main__":
    sys.exit(main(sys.argv))
