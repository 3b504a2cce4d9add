"""Imports between the packages and top-level modules of varjax go one way: there is no circle."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
Graph = dict[str, dict[str, set[str]]]  # {part: {part that it imports: what causes it}}


def imported(tree: ast.AST) -> set[str]:
    """Full names that a module imports, also inside its functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def part_of(root: Path, name: str) -> str | None:
    """The package or top-level module of varjax that a full name belongs to. None: another project,
    or a name that `varjax/__init__.py` hands on, which imports every part anyway."""
    first, *words = name.split(".")
    folder = root / "varjax"
    if first != "varjax" or not words:
        return None
    there = (folder / words[0]).is_dir() or (folder / f"{words[0]}.py").is_file()
    return words[0] if there else None


def graph_of(root: Path) -> Graph:
    found: Graph = defaultdict(lambda: defaultdict(set))
    for file in sorted((root / "varjax").rglob("*.py")):
        words = file.relative_to(root).with_suffix("").parts
        module = ".".join(words[:-1] if words[-1] == "__init__" else words)
        part = part_of(root, module)
        for name in imported(ast.parse(file.read_text(encoding="utf-8"))) if part else ():
            other = part_of(root, name)
            if other and other != part:
                found[part][other].add(f"{module} imports {name}")
    return found


def reached(graph: Graph, start: str) -> set[str]:
    """Parts that `start` imports, directly or through others."""
    found: set[str] = set()
    waiting = [*graph.get(start, {})]
    while waiting:
        part = waiting.pop()
        if part not in found:
            found.add(part)
            waiting += graph.get(part, {})
    return found


def circles(graph: Graph) -> list[str]:
    """A line for every import on a circle: the edge and the modules that cause it."""
    far = {part: reached(graph, part) for part in graph}
    return [
        f"{part} -> {other}: {'; '.join(sorted(causes))}"
        for part, edges in sorted(graph.items())
        for other, causes in sorted(edges.items())
        if part in far.get(other, ())
    ]


def test_parts_of_varjax_do_not_import_each_other_in_circles():
    graph = graph_of(ROOT)
    assert {"api", "engine", "models", "storage"} <= graph.keys()
    found = circles(graph)
    assert not found, "imports in a circle:\n" + "\n".join(found)


def test_packages_point_one_way():
    """A command may stand above its package, since nobody imports it: that of ported_weights has
    flags as all commands do."""
    order, upwards = ("pallas_kernels", "varjax", "ported_weights", "experiments"), []
    for rank, package in enumerate(order):
        for file in sorted((ROOT / package).rglob("*.py")):
            names = imported(ast.parse(file.read_text(encoding="utf-8")))
            above = () if file.name == "__main__.py" else order[rank + 1 :]
            wrong = {name for name in names if name.split(".")[0] in above or "__main__" in name}
            upwards += [f"{file.relative_to(ROOT)} imports {name}" for name in sorted(wrong)]
    assert not upwards, "\n".join(upwards)
