"""Commands of varjax. `python -m experiments.NAME --help` is the manual of each, and
`varjax NAME --help` the same where the package is installed; all take --version."""

import ast
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

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


def overview() -> str:
    """Return a line for each command."""
    found = commands()
    width = max(map(len, found))
    lines = (f"  python -m {name.ljust(width)}  {text}" for name, text in found.items())
    return "\n".join([" ".join((__doc__ or "").split()), "", *lines])


def short_names() -> dict[str, str]:
    """Return {sub-command of `varjax`: module}. ported_weights is `port`."""
    return {SHORT.get(name, name.rpartition(".")[2]): name for name in commands()}


def _show(text: str) -> None:
    """Print a text whose reader may go away."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the rest, which is flushed at the end


def console() -> int:
    """Run a sub-command of the console script `varjax`."""
    name, known = (sys.argv[1:2] or ["--help"])[0], short_names()
    if name in known:
        module = importlib.import_module(known[name])
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{known[name]}.__main__")
        from varjax.cli import command_line  # importing it imports JAX

        sys.argv = [f"varjax {name}", *sys.argv[2:]]
        command_line.run(module.main)
    if name in ("-h", "--help"):
        width = max(map(len, known))
        said = commands()
        lines = (f"  varjax {short.ljust(width)}  {said[m]}" for short, m in known.items())
        _show(
            "\n".join(
                ["Commands of varjax; `varjax NAME --help` is the manual of each.", "", *lines]
            )
        )
        return 0
    if name == "--version":
        return main(["varjax", name])
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean `varjax {close[0]}`? " if close else ""
    print(f"error: unknown command {name!r}: {advice}`varjax --help` lists them", file=sys.stderr)
    return 2


def main(argv: Sequence[str]) -> int:
    """Print the overview or the version. A command after a space is an error with a hint."""
    name = argv[1] if len(argv) > 1 else "--help"
    if name in ("-h", "--help"):
        _show(overview())
        return 0
    if name == "--version":
        from varjax.cli import version  # importing it imports JAX

        _show(version.text())
        return 0
    known = {command.rpartition(".")[2]: command for command in commands()}
    close = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
    advice = f"did you mean `python -m {known[close[0]]}`? " if close else ""
    line = f"error: unexpected argument {name!r}: {advice}`python -m experiments` lists them"
    print(line, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
