"""Commands of varjax. `python -m experiments.NAME --help` is the manual of each; all take
--version."""

import ast
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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


def main(argv: Sequence[str]) -> int:
    """Print the overview or the version. A command after a space is an error with a hint."""
    name = argv[1] if len(argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        from varjax.cli import version  # importing it imports JAX

        print(version.text())
        return 0
    known = {command.rpartition(".")[2]: command for command in commands()}
    close = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
    advice = f"did you mean `python -m {known[close[0]]}`? " if close else ""
    line = f"error: unexpected argument {name!r}: {advice}`python -m experiments` lists them"
    print(line, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
